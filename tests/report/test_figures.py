import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from holdfast.analysis.comparisons import METHODS as ORDER
from holdfast.analysis.comparisons import comparisons, method_order
from holdfast.config import RunConfig
from holdfast.experiments import EXPERIMENTS, assess
from holdfast.report.charts import comparison_charts, score_charts, table_charts
from holdfast.report.draw.canvas import inline_svg, save_figure
from holdfast.report.draw.runs import DARK_CELLS, draw_dots, draw_lines, spread
from holdfast.report.draw.style import DARK, LIGHT, METHODS, OTHERS, color_map, method_style
from holdfast.report.numbers import Numbers
from holdfast.report.series import Dot, Line

from .conftest import make, run, square


def luminance(color):
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def pairs():
    for theme in (LIGHT, DARK):
        for text in ("ink", "muted", "link", "good", "bad", "warn", "open"):
            for ground in ("paper", "surface"):
                yield theme[text], theme[ground]
        for status in ("good", "bad", "warn", "open"):
            yield theme[status], theme[f"{status}-bg"]
            yield theme["ink"], theme[f"{status}-bg"]
            yield theme["muted"], theme[f"{status}-bg"]
    for style in (*METHODS.values(), *OTHERS):
        yield style.color, LIGHT["paper"]
        yield style.dark, DARK["paper"]


@pytest.mark.parametrize(("text", "ground"), sorted(set(pairs())))
def test_all_text_has_enough_contrast(text, ground):
    assert contrast(text, ground) >= 4.5


def test_each_method_has_a_look_of_its_own():
    assert tuple(METHODS) == ORDER
    looks = [(style.dash, style.marker) for style in METHODS.values()]
    colors = [style.color for style in METHODS.values()]
    assert len(set(colors)) == len(METHODS)
    assert len(set(looks)) >= len(METHODS) - 1  # Even without colour; er and l2 share a marker, not a dash.


def test_methods_from_outside_get_looks_in_turn():
    assert method_order(["zeta", "mse", "er", "alef"]) == ["er", "mse", "alef", "zeta"]
    assert method_style("zeta", ["alef", "er"]) == OTHERS[1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=13), st.floats(0.1, 5))
def test_spread_keeps_distance_order_and_bounds(wanted, gap):
    places = spread(wanted, gap, 0, 100)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    ordered = sorted(places)
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(ordered))
    for (want_a, place_a), (want_b, place_b) in itertools.combinations(zip(wanted, places, strict=True), 2):
        if want_a < want_b:
            assert place_a < place_b


def test_labels_that_do_not_overlap_stay_where_they_are():
    assert spread([10.0, 50.0], 5.0, 0.0, 100.0) == [10.0, 50.0]


def test_a_figure_is_saved_with_its_numbers(tmp_path):
    figure = draw_lines({"panel": [Line("er", "er", (90.0, 80.0), (1.0, 1.0))]}, {1: "1", 2: "2"}, title="a title")
    path = save_figure(figure, tmp_path / "deep" / "picture", Numbers(("x",), [(1,)]))
    assert path == tmp_path / "deep" / "picture.png"
    assert {file.suffix for file in path.parent.iterdir()} == {".png", ".svg", ".csv", ".json"}
    assert path.with_suffix(".csv").read_text() == "x\n1\n"
    assert "a title" in path.with_suffix(".svg").read_text()


def texts_of(figure):
    """Every text that is drawn; tick labels outside of the axes are made but not drawn."""
    yield from figure.texts
    for panel in figure.axes:
        yield from (*panel.texts, panel.title, panel._left_title, panel.xaxis.label, panel.yaxis.label)
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    yield from (label for label in (tick.label1, tick.label2) if label.get_visible())


def drawn(figure):
    """The texts of a figure that fall outside of it, and pairs of texts that overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    edge, renderer = figure.bbox, canvas.get_renderer()
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts_of(figure) if t.get_text().strip()]
    outside = [t for t, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > edge.x1 + 1 or box.y1 > edge.y1 + 1]
    overlapping = [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if one[1].shrunk(0.9, 0.75).overlaps(other[1].shrunk(0.9, 0.75))
    ]
    return outside, overlapping


@pytest.mark.parametrize(("tasks", "title"), [(2, "rot-mnist, buffer 200"), (5, ""), (20, "rot-mnist, buffer 200")])
def test_no_text_is_clipped_or_overlaps_with_all_methods(tasks, title):
    runs = [run(method, 80 + place / 50, tasks=tasks) for place, method in enumerate(METHODS)]
    (comparison,) = comparisons(runs)
    for chart in (*comparison_charts(comparison), *score_charts(comparison)):
        assert drawn(chart.draw(title=title)) == ([], []), chart.title


@pytest.mark.parametrize("several", [3, 7])
def test_long_names_of_variants_neither_overlap_nor_become_the_same(several):
    """Titles of accuracy matrices were printed over each other."""
    usual = {"replay_size": 64, "optimizer": "adamw"}
    runs = [run("er", 80.0 + at, lr=0.123, weight_decay=at / 1000, **usual) for at in range(several)]
    (comparison,) = comparisons([*runs, *(run("er", lr=lr) for lr in (0.1, 0.2, 0.3, 0.4))])
    for chart in (*comparison_charts(comparison), *score_charts(comparison)):
        assert drawn(chart.draw(title=chart.title)) == ([], []), chart.title
    titles = [panel.get_title("left") for panel in comparison_charts(comparison)[1].draw().axes[:-1]]
    assert len({title.split("\n")[0] for title in titles}) == several + 4


def test_dots_say_their_numbers():
    figure = draw_dots({"ours": [Dot.of_runs("er", "er", 80.0, 1.0, 3), Dot("l2", "l2", 85.0)]}, title="t")
    assert drawn(figure) == ([], [])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["80.00 ± 1.00 (3)", ""]


def test_differences_stand_around_the_published_value_and_far_ones_are_arrows():
    dots = [Dot("er", "er", 1.0, -0.5, 2.5), Dot("dino", "dino", -27.0, -60.0, 5.0)]
    (panel,) = draw_dots({"rot-mnist": dots}, bands={"rot-mnist": 2.0}).axes
    low, high = panel.get_xlim()
    assert -low == high == 3.0  # around the published value; what is far off does not squeeze the rest
    assert [line.get_marker() for line in panel.get_lines() if line.get_xdata()[0] == -3.0] == ["<"]
    assert len(panel.patches) == 1  # the band


def test_dots_far_from_zero_are_not_drawn_on_the_edge():
    """All close to each other, they were cut in half."""
    (panel,) = draw_dots({"gain": [Dot("l2", "l2", -25.1), Dot("mse", "mse", -24.9)]}, from_zero=True).axes
    low, high = panel.get_xlim()
    assert low < -26.5
    assert 0 <= high < 5


def test_dots_do_not_begin_at_zero_and_mark_it_where_it_matters():
    def panel(*means):
        return draw_dots({"ours": [Dot.of_runs(str(m), "er", m, 0.1, 3) for m in means]}).axes[0]

    low, high = panel(80.0, 81.0).get_xlim()
    assert low > 79
    assert high < 82
    vertical = [line for line in panel(-1.0, 2.0).get_lines() if list(line.get_xdata()) == [0, 0]]
    assert len(vertical) == 1


def test_one_variant_alone_gets_no_dots():
    (comparison,) = comparisons([run("er", 80.0), run("er", 81.0, seed=1)])
    assert score_charts(comparison) == []


def test_lines_beyond_the_first_few_are_grey_and_without_a_name():
    (comparison,) = comparisons([run(method, 80 + place / 50) for place, method in enumerate(METHODS)])
    figure = comparison_charts(comparison)[0].draw()
    assert len({text.get_text() for text in figure.axes[0].texts}) == 6


def test_the_ink_in_coloured_cells_does_not_change_with_the_theme():
    (comparison,) = comparisons([run("er", 80.0), run("l2", 20.0)])
    chart = comparison_charts(comparison)[1]
    svg = inline_svg(chart.draw(), "fig", chart.alt)
    numbers = re.findall(r"<text[^>]*style=\"([^\"]*)\"[^>]*>\d+</text>", svg)
    assert any("#fefefe" in style for style in numbers)
    assert not any("--paper" in style for style in numbers)


def test_heat_maps_can_be_read_in_both_themes():
    colors = [to_hex(color_map()(step)) for step in range(256)]
    assert min(contrast(color, DARK["paper"]) for color in colors) > 2  # the darkest cell is no hole in the page
    edge = round(DARK_CELLS * 255)
    assert min(contrast(color, "#fefefe") for color in colors[:edge]) >= 4.5
    assert min(contrast(color, "#000000") for color in colors[edge:]) >= 4.5


def test_control_characters_in_names_are_drawn_as_codes(tmp_path):
    (comparison,) = comparisons([run("er\x1b[2J", 80.0, benchmark="a\x07"), run("l2", 20.0, benchmark="a\x07")])
    chart = comparison_charts(comparison)[0]
    text = save_figure(chart.draw(title=chart.title), tmp_path / "picture").with_suffix(".svg").read_text("utf-8")
    ElementTree.fromstring(text)
    assert "er\\x1b[2J" in text


def test_the_tasks_of_the_recency_figure_are_named(stored):
    config = RunConfig.preset("seq-cifar10", "er", buffer_size=500)
    results = []
    for method in ("er", "l2"):
        result = make(config.change(method=method), square(60.0, 5))
        for task in range(5):
            result.logits[f"logits.{task}"] = torch.eye(10)[2 * task : 2 * task + 2]
            result.logits[f"labels.{task}"] = torch.arange(2 * task, 2 * task + 2)
        results.append(result)
    table = assess(EXPERIMENTS["recency"], stored(*results))
    (chart,) = table_charts(table)["seq-cifar10"]
    figure = chart.draw()
    assert figure.axes[0].get_xlabel() == "task"
    assert figure.axes[0].get_ylabel() == "probability"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list("12345")
    assert chart.numbers.rows[0][:3] == ("er", pytest.approx(0.0), 1)


def test_a_figure_inside_a_page_is_self_contained_themed_and_escaped():
    name = "<b>$x_1$ & 1.23456"
    (comparison,) = comparisons([run(name, 80.0), run("er", 70.0)])
    svg = inline_svg(comparison_charts(comparison)[0].draw(), "fig", 'say "cheese" <now>')
    assert svg.startswith('<svg role="img" aria-label="say &quot;cheese&quot; &lt;now&gt;"')
    assert "http" not in svg
    assert "&lt;b&gt;$x_1$ &amp; 1.23456" in svg
    assert "<b>" not in svg
    assert "var(--m-er)" in svg
    assert "var(--ink)" in svg
    assert not re.search(r'id="(?!fig-)', svg)
    assert all(f'id="{target}"' in svg for target in re.findall(r'(?:url\(|href=")#([^)"]+)', svg))


MEASURED = {
    **{"ece": 20.0, "recency_gap": 0.2, "last_task_probability": 0.4, "mra": 50.0},
    **{f"task_probability_{task}": 0.3 for task in range(1, 11)},
    **{f"robust_{kind}": 50.0 for kind in ("noise", "blur", "weather", "digital")},
}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_each_experiment_draws_its_figure(name, stored):
    experiment = EXPERIMENTS[name]
    benchmark = "rot-mnist" if name in ("forward-transfer", "field") else experiment.cells[0].config.benchmark
    chosen = [cell.config for cell in experiment.cells if cell.config.benchmark == benchmark]
    runs = [make(config, torch.full((5, 5), 50.0 + place % 7)) for place, config in enumerate(dict.fromkeys(chosen))]
    results = stored(*runs)
    for one in results:
        one.measures.update(MEASURED)
    charts = [chart for found in table_charts(assess(experiment, results)).values() for chart in found]
    assert charts
    for chart in charts:
        assert drawn(chart.draw(title=chart.title)) == ([], []), chart.title
        assert len(chart.numbers.rows) > 2
        assert len(chart.alt) > len(chart.title)


def test_reliability_diagrams_are_drawn_where_there_are_logits(stored):
    result = make(RunConfig.preset("seq-cifar10", "er", buffer_size=500), square(60.0, 5))
    for task in range(5):
        result.logits[f"logits.{task}"] = torch.eye(10)[2 * task : 2 * task + 2]
        result.logits[f"labels.{task}"] = torch.arange(2 * task, 2 * task + 2)
    (chart,) = table_charts(assess(EXPERIMENTS["calibration"], stored(result)))["seq-cifar10"]
    assert chart.title == "Expected calibration error: reliability, seq-cifar10"
    assert sum(row[-1] for row in chart.numbers.rows) == 10
