import json
import math
from dataclasses import replace

import pytest
import torch

from holdfast.analysis.comparisons import comparisons
from holdfast.report.charts import comparison_charts, score_charts
from holdfast.report.numbers import Numbers, by_benchmark, run_numbers
from holdfast.report.series import Line, curves, heatmaps, highlights, mean_over_seen, scores

from .conftest import make, run


def two_seeds():
    first, second = run("er", seed=0), run("er", seed=1)
    nan = float("nan")
    one = torch.tensor([[90.0, nan], [60.0, 80.0]], dtype=torch.float64)
    other = torch.tensor([[94.0, nan], [70.0, 90.0]], dtype=torch.float64)
    return make(first.config.change(tasks=2), one), make(second.config.change(tasks=2), other)


def test_mean_over_seen_ignores_tasks_to_come():
    assert mean_over_seen(two_seeds()[0].matrix).tolist() == [90.0, 70.0]


def test_curves_are_means_and_spreads_over_seeds():
    (comparison,) = comparisons(two_seeds())
    (seen,), (first,) = curves(comparison)
    assert seen.seeds == 2
    assert seen.mean == (92.0, 75.0)  # (90 + 94) / 2; ((60 + 80) / 2 + (70 + 90) / 2) / 2
    assert seen.std == pytest.approx((math.sqrt(8), math.sqrt(50)))
    assert first.mean == (92.0, 65.0)
    assert not seen.is_level


def test_joint_training_is_a_level_and_no_heat_map():
    (comparison,) = comparisons([run("joint", 95.0), run("sgd", 20.0)])
    level, line = curves(comparison)[0]
    assert level.is_level
    assert level.mean == (95.0,)
    assert not line.is_level
    assert [heatmap.label for heatmap in heatmaps(comparison)] == ["sgd"]


def test_a_stream_without_tasks_has_no_curves():
    (comparison,) = comparisons([run("er", tasks=1)])
    assert curves(comparison) is None
    assert heatmaps(comparison) == []


def test_heat_maps_are_means_over_seeds():
    (comparison,) = comparisons(two_seeds())
    (heatmap,) = heatmaps(comparison)
    assert heatmap.rows[1] == (65.0, 85.0)
    assert math.isnan(heatmap.rows[0][1])
    numbers = comparison_charts(comparison)[1].numbers
    assert numbers.rows == [("er", 1, 1, 92.0, 2), ("er", 2, 1, 65.0, 2), ("er", 2, 2, 85.0, 2)]


def test_tasks_to_come_are_shown_only_where_they_share_their_classes():
    matrix = torch.tensor([[90.0, 40.0], [60.0, 80.0]], dtype=torch.float64)
    config = run("er").config.change(tasks=2)
    shared, own = make(config, matrix), replace(make(config, matrix), task_matrix=matrix + 5)
    assert heatmaps(comparisons([shared])[0])[0].rows[0] == (90.0, 40.0)
    assert math.isnan(heatmaps(comparisons([own])[0])[0].rows[0][1])
    assert comparisons([shared])[0].variants[0].values("forward_transfer") == [30.0]
    assert comparisons([own])[0].variants[0].values("forward_transfer") == []


def test_scores_are_final_accuracies():
    (score,) = scores(comparisons(two_seeds())[0])
    assert (score.label, score.mean, score.text) == ("er", 75.0, "75.00 ± 7.07 (2)")
    assert score.high - score.mean == pytest.approx(math.sqrt(50))


def test_one_seed_has_no_spread():
    (comparison,) = comparisons([run("er", 80.0), run("l2", 85.0)])
    assert all(math.isnan(score.low) for score in scores(comparison))
    assert score_charts(comparison)[0].numbers.csv().splitlines()[1:] == ["l2,85,,", "er,80,,"]


def test_a_few_lines_stand_out_of_many():
    lines = [Line(name, name, (value,), ()) for name, value in zip("abcdefgh", range(8), strict=True)]
    assert highlights(lines[:6]) == set("abcdef")
    assert highlights([*lines, Line("er", "er", (3.5,), ())]) == {"er", "a", *"hgfe"}
    unknown = Line("z", "z", (math.nan,), ())
    assert highlights([*lines, unknown], 2) == {"z", "h"}


def test_numbers_behind_curves_are_exported():
    numbers = comparison_charts(comparisons(two_seeds())[0])[0].numbers
    text = numbers.csv().splitlines()
    assert text[0] == "line,after_task,seen_tasks_mean,seen_tasks_std,first_task_mean,first_task_std,seeds"
    assert text[2].startswith("er,2,75,7.07107,65,")
    assert json.loads(numbers.json())[1]["seen_tasks_mean"] == 75.0


def test_settings_of_runs_are_written_as_options_are():
    """A table had them as Python writes them, `()` where there are none."""
    found = run("ballast", settings=(("decay", 0.996), ("turn", 1.0), ("target", "stored")), options=(("p", 2.0),))
    plain = run("ballast", seed=1)
    rows = run_numbers([found, plain]).plain()
    assert [row["settings"] for row in rows] == ["decay=0.996 target=stored turn=1", ""]
    assert [row["options"] for row in rows] == ["p=2", ""]
    (alike,) = by_benchmark([plain])
    assert "settings" not in dict(alike["common"])


def test_csv_disarms_formulas_and_quotes():
    text = Numbers(("a", "b"), [("=1+1", -2), ('x,"y"', float("nan"))]).csv()
    assert text == 'a,b\n\'=1+1,-2\n"x,""y""",\n'
    assert json.loads(Numbers(("a",), [(float("nan"),)]).json()) == [{"a": None}]
