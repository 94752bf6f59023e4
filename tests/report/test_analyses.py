"""The figures of the analyses: the numbers behind them, and that nothing in them is clipped or overlaps."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from holdfast.analysis import BENCHMARK_CORRUPTIONS, CORRUPTIONS, Robustness, calibration, recency, robustness
from holdfast.analysis.findings import Findings, compare
from holdfast.analysis.runs import RunAnalysis
from holdfast.config import RunConfig
from holdfast.report.analyses import analysis_charts, write_analysis_figures
from holdfast.report.draw.analyses import draw_contact_sheet, save_contact_sheet
from holdfast.results import RunResult

CHARTS = ("overview", "reliability", "recency", "robustness", "transfer", "tasks")
METHODS = ("joint", "sgd", "er", "l1", "l2", "linf", "mse", "kl", "mi", "simclr", "byol", "dino", "barlow")


def analysis(method: str, seed: int = 0, *, tasks: int = 5, robust: bool = True, **changes) -> RunAnalysis:
    """A run with made-up numbers; the later in METHODS, the better calibrated and the less biased."""
    config = RunConfig.preset("seq-mnist", method, seed=seed, tasks=tasks, **changes)
    draw = torch.Generator().manual_seed(1000 * seed + METHODS.index(method))
    labels = torch.arange(40 * tasks) % (2 * tasks)
    logits = torch.randn(len(labels), 2 * tasks, generator=draw)
    logits[:, -2:] += 2 - 0.15 * METHODS.index(method)
    fall = torch.rand(tasks, tasks, generator=draw, dtype=torch.float64)
    matrix = torch.tril(95 - 40 * fall, diagonal=0)
    matrix[torch.triu(torch.ones(tasks, tasks), diagonal=2).bool()] = torch.nan
    if method == "joint":
        matrix = matrix[-1:]
    classes = [[2 * task, 2 * task + 1] for task in range(tasks)]
    made = RunAnalysis(
        Path(config.fingerprint),
        RunResult(config, matrix, matrix, torch.full((tasks,), 10.0), 1.0),
        calibration(logits, labels),
        recency(logits, classes),
    )
    return replace(made, robustness=robustness_of(method)) if robust else made


@cache
def robustness_of(method: str) -> Robustness:
    """Accuracies that differ by method, over all nineteen corruptions."""
    rank = METHODS.index(method)
    found = robustness(
        lambda x: torch.stack((x.float().mean((1, 2, 3)), torch.full((len(x),), 100.0 + 4 * rank)), dim=1),
        torch.randint(0, 256, (6, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 0, 1, 0, 1]),
        CORRUPTIONS,
        [1, 3],
    )
    return replace(found, clean=90.0 - rank)


@pytest.fixture(scope="module")
def every_method() -> Findings:
    (found,) = compare([analysis(method, seed) for method in METHODS for seed in (0, 1)])
    return found


@pytest.fixture(scope="module")
def ten_tasks() -> Findings:
    (found,) = compare([analysis(method, tasks=12, robust=False) for method in ("er", "l1", "mi")])
    return found


def test_runs_are_compared_within_benchmark_and_buffer() -> None:
    runs = [analysis("er", robust=False), analysis("sgd", robust=False), analysis("er", robust=False, buffer_size=500)]
    found = compare([*runs, runs[0], analysis("er", tasks=4, robust=False)])
    assert [[summary.label for summary in one.summaries] for one in found] == [["er"], ["sgd", "er"], ["sgd", "er"]]
    assert len({one.title for one in found}) == 3
    assert all(summary.seeds == (0,) for one in found for summary in one.summaries)


def test_numbers_are_those_of_the_summaries(every_method: Findings) -> None:
    er = next(one for one in every_method.summaries if one.label == "er")
    tables = {
        name: [dict(zip(chart.numbers.columns, row, strict=True)) for row in chart.numbers.rows]
        for name, chart in analysis_charts(every_method).items()
    }
    ours = {name: [row for row in rows if row["method"] == "er"] for name, rows in tables.items()}
    assert er.ece is not None
    assert er.calibration is not None
    assert er.recency is not None
    assert [row["count"] for row in ours["reliability"]] == er.calibration.count
    assert {row["ece_percent"] for row in ours["reliability"]} == {er.ece.mean}
    assert all(row["accuracy"] is None for row in ours["reliability"] if row["count"] == 0)
    assert [row["probability"] for row in ours["recency"]] == er.recency.task_probabilities
    assert len(ours["robustness"]) == 19 * 2
    assert {row["measure"] for row in ours["transfer"]} == {"backward transfer", "forgetting"}
    assert len(ours["tasks"]) == 5 * 6 // 2 + 4  # the lower triangle and the next task
    assert ours["overview"] == []
    assert {row["method"] for row in tables["overview"]} == set(METHODS[3:])
    assert "joint" not in {row["method"] for row in tables["transfer"]}


def test_forward_transfer_is_shown_only_where_tasks_share_their_classes(every_method: Findings) -> None:
    def measures(found: Findings) -> set[object]:
        return {row[2] for row in analysis_charts(found)["transfer"].numbers.rows}

    shared = [replace(analysis(method, robust=False), recency=None) for method in ("er", "l1")]
    other = [replace(one, result=replace(one.result, task_matrix=one.result.matrix / 2)) for one in shared]
    assert "forward transfer" in measures(compare(shared)[0])
    assert "forward transfer" not in measures(compare(other)[0])
    assert "forward transfer" not in measures(every_method)  # its tasks have classes of their own


def test_methods_are_sorted_by_what_a_figure_shows(every_method: Findings) -> None:
    def order(name: str) -> list[str]:
        return list(dict.fromkeys(str(row[0]) for row in analysis_charts(every_method)[name].numbers.rows))

    by_label = {summary.label: summary for summary in every_method.summaries}
    eces = [value.mean for label in order("reliability") if (value := by_label[label].ece)]
    gaps = [value.mean for label in order("recency") if (value := by_label[label].recency_gap)]
    mras = [value.mean for label in order("robustness") if (value := by_label[label].mra)]
    assert eces == sorted(eces, reverse=True)
    assert gaps == sorted(gaps, reverse=True)
    assert mras == sorted(mras, reverse=True)
    assert len(eces) == len(gaps) == len(mras) == len(METHODS)


def test_every_figure_is_written_with_its_numbers(tmp_path: Path, ten_tasks: Findings) -> None:
    written = write_analysis_figures(ten_tasks, tmp_path)
    assert [path.stem for path in written] == ["overview", "reliability", "recency", "transfer", "tasks"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "<svg" in path.with_suffix(".svg").read_text("utf-8")
        rows = json.loads(path.with_suffix(".json").read_text("utf-8"))
        table = list(csv.DictReader(path.with_suffix(".csv").read_text("utf-8").splitlines()))
        assert [row["method"] for row in rows] == [row["method"] for row in table]


def test_charts_say_in_words_what_they_show(every_method: Findings) -> None:
    shown = analysis_charts(every_method)
    assert tuple(shown) == CHARTS
    assert "ECE in percent: " in shown["reliability"].alt
    assert shown["overview"].draw().get_suptitle() == ""


def boxes(figure: Figure) -> tuple[list[tuple[str, np.ndarray]], np.ndarray]:
    """Every text that is drawn with its box in pixels, and the size of the page."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
    texts = figure.findobj(lambda item: isinstance(item, Text) and item.get_visible() and item.get_text().strip())
    extents = [(text.get_text(), text.get_window_extent().get_points()) for text in set(texts) - hidden]
    return extents, np.array(canvas.get_width_height())


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("which", ["every_method", "ten_tasks"])
def test_no_text_is_clipped_or_overlaps(name: str, which: str, request: pytest.FixtureRequest) -> None:
    found: Findings = request.getfixturevalue(which)
    chart = analysis_charts(found).get(name)
    if chart is None:
        pytest.skip("not drawn")
    texts, page = boxes(chart.draw(title=chart.title))
    for text, box in texts:
        assert (box >= -1).all(), text
        assert (box <= page + 1).all(), text
    upright = [
        (text, box) for text, box in texts if name != "robustness" or "\N{MINUS SIGN}" in text or text[0].isdigit()
    ]
    for number, (text, (low, high)) in enumerate(upright):
        for other, (other_low, other_high) in upright[number + 1 :]:
            overlap = np.minimum(high, other_high) - np.maximum(low, other_low)
            assert not (overlap > 1.5).all(), f"{text!r} over {other!r}"


def test_long_names_are_cut(tmp_path: Path) -> None:
    runs = [analysis("l1", robust=False, lr=lr, alpha=lr) for lr in (0.0123456789, 0.0223456789)]
    (found,) = compare([*runs, analysis("er", robust=False)])
    for name in ("reliability", "recency"):
        texts, page = boxes(analysis_charts(found)[name].draw())
        assert all((box <= page + 1).all() for _, box in texts)
    assert any("…" in text for text, _ in texts)


@pytest.mark.parametrize("channels", [1, 3])
def test_contact_sheet(tmp_path: Path, channels: int) -> None:
    images = torch.randint(0, 256, (1, channels, 8, 8), dtype=torch.uint8)
    texts, page = boxes(draw_contact_sheet(images))
    shown = [text for text, _ in texts]
    assert {name.replace("_", " ") for name in CORRUPTIONS} <= set(shown)
    assert {"clean", "severity 1", "severity 5"} <= set(shown)
    assert all((box >= -1).all() and (box <= page + 1).all() for _, box in texts)
    if channels == 3:
        assert save_contact_sheet(images, tmp_path / "new").read_bytes().startswith(b"\x89PNG")


def test_fifteen_corruptions_decide_the_mean(every_method: Findings) -> None:
    robust = every_method.summaries[2].robustness
    assert robust is not None
    assert robust.mra == pytest.approx(np.mean([robust.per_corruption[name] for name in BENCHMARK_CORRUPTIONS]))
