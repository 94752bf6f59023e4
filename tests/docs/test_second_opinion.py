"""benchmarks/second_opinion.py on the committed runs: its numbers are those of the page, and right."""

import json
import runpy
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest

from holdfast.experiments import EXPERIMENTS
from tables.agreement import parallel, parallel_runs
from tables.papers import witness_verdicts, witnesses

from .blocks import ROOT

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "second_opinion.py"))
CODES = ("holdfast", "second-opinion")


@pytest.fixture(scope="module")
def found():
    return SCRIPT["numbers"]()


def test_the_page_has_these_numbers(found):
    stored = json.loads((ROOT / "docs" / "pictures" / "how-sure.json").read_text("utf-8"))
    assert json.loads(json.dumps(found)) == stored, "run `make pictures`"


def test_the_runs_are_whole():
    runs = SCRIPT["read"]("runs.jsonl")
    seeds = {code: [run["seed"] for run in runs if run["code"] == code] for code in ("holdfast", "second-opinion")}
    assert seeds == {"holdfast": list(range(32)), "second-opinion": list(range(18))}
    for run in runs:
        assert run["tail"][-1] == run["accuracy"] == pytest.approx(fmean(run["accuracy_matrix"][-1]), abs=0.01)
        assert (len(run["tail"]), len(run["short_norms"])) == (10, 25)


def test_the_later_runs_are_whole():
    later = SCRIPT["read"]("later.jsonl")
    assert [run["seed"] for run in later] == list(range(8))
    for run in later:
        assert (run["method"], run["buffer_size"], run["epochs"], run["precision"]) == ("linf", 500, 5, "bfloat16")
        assert run["accuracy"] == pytest.approx(fmean(run["accuracy_matrix"][-1]), abs=0.01)


def test_what_the_page_says_of_all_runs_is_so(found):
    runs, authors = found["all_runs"], found["authors"]
    assert (runs["all"]["n"], runs["even"]["n"], runs["first"]["n"], runs["later"]["n"]) == (40, 33, 24, 8)
    assert runs["all"]["difference"] < 2 * runs["even"]["difference"] < 0, "half of the gap, or more"
    assert authors["second_last"]["difference"] < 0
    assert (runs["uneven_of_first"], runs["uneven_of_lowest"]) == (6, 4)
    assert abs(runs["later"]["mean"] - runs["first"]["median"]) < 1, "the accuracy is what it was"


def test_what_the_page_says_of_last_minibatches_is_so(found):
    minibatches = found["minibatches"]
    assert minibatches["ends"]["p"] < 0.001
    assert minibatches["drops"]["p"] < 0.05
    fifty = minibatches["fifty"]
    assert (fifty["n"], fifty["cells"]) == (5, 8)
    assert abs(fifty["mean"]) < 2 * fifty["error"], "it costs little"
    assert minibatches["ends"]["uneven"]["mean"] < 3 * fifty["mean"]
    counts = SCRIPT["last_uneven"]()
    worst = min(
        (run for run in SCRIPT["read"]("runs.jsonl") if run["code"] == "holdfast"),
        key=lambda run: run["accuracy_matrix"][0][0],
    )
    assert counts[5, worst["seed"]][0]


def test_the_two_programs_took_the_same_steps(found):
    """Where both compute by the same operations, to the last bit of the last step."""
    both = [run for run in SCRIPT["read"]("authors.jsonl") if run["code"] == "both"]
    methods = {run["method"] for run in both}
    assert methods == {"er", "l1", "l2", "linf", "mse", "kl", "mi", "simclr", "byol", "dino", "barlow"}
    assert len(both) == 2 * len(methods), "each with its network and with ours"
    for run in both:
        assert run["steps"] == 5 * -(-(run["images"] or 10_000) // 32)
        if not run["own"] and run["method"] not in ("l2", "kl", "mi", "simclr"):
            assert run["equal_steps"] == run["steps"]
    table = found["beside"]["methods"]
    assert found["beside"]["apart"] == 0
    assert all(each["median_error"] < 50 for each in table.values()), "millionths: rounding"


def test_means_and_the_interval_by_hand(found):
    """Welch's interval from its formula, with Student's quantile as printed in tables."""
    runs = SCRIPT["read"]("runs.jsonl")
    ours, theirs = (
        [fmean(run["tail"]) for run in runs if run["code"] == code] for code in ("holdfast", "second-opinion")
    )
    tail = found["measures"]["tail"]
    assert tail["holdfast"]["mean"] == pytest.approx(fmean(ours), abs=1e-4)
    assert tail["second"]["sd"] == pytest.approx(stdev(theirs), abs=1e-4)
    parts = [stdev(each) ** 2 / len(each) for each in (ours, theirs)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (ours, theirs), strict=True))
    assert 32 < freedom < 33
    half = 1.693 * sum(parts) ** 0.5  # t(0.95) at 32 to 33 degrees of freedom: 1.694 and 1.692
    apart = fmean(ours) - fmean(theirs)
    assert tail["interval90"] == pytest.approx([apart - half, apart + half], abs=1e-3)


def test_holm():
    corrected = SCRIPT["holm"]({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5})
    assert corrected == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.5})


def test_power_by_simulation():
    """The chances that the formulas give are those of experiments with made-up runs."""
    import numpy as np
    from scipy import stats

    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(0, 1.3, (2000, 24)), draw.normal(0, 1.5, (2000, 18))
    error, freedom = (1.3**2 / 24 + 1.5**2 / 18) ** 0.5, 33.5
    found = stats.ttest_ind(ours, theirs, axis=1, equal_var=False).confidence_interval(0.90)
    inside = np.mean((found.low > -1) & (found.high < 1))
    assert SCRIPT["equivalence_power"](1.0, error, freedom) == pytest.approx(inside, abs=0.05)
    shifted = stats.ttest_ind(ours + SCRIPT["detectable"](error, freedom), theirs, axis=1, equal_var=False)
    assert np.mean(shifted.pvalue < 0.05) == pytest.approx(0.8, abs=0.04)


def test_what_the_page_says_is_so(found):
    """The sentences that would have to change with the numbers."""
    measures, authors = found["measures"], found["authors"]
    assert measures["tail"]["equivalent"] == {"1": False, "2": True}
    assert measures["tail"]["interval95"][0] > -3, "a fault of three points is ruled out"
    assert measures["task_tail"]["equivalent"] == {"1": True, "2": True}
    assert (
        measures["task_tail"]["holm_p"] < 0.05 < min(measures[name]["holm_p"] for name in ("last", "tail", "task_last"))
    )
    assert all(each["difference"] < 0 for each in measures.values()), "Holdfast lies lower in every row"
    assert authors["second_last"]["difference"] < 0
    assert authors["holdfast_last"]["difference"] < 0
    assert all(each["norm_and_drop"] > 0.5 for each in found["last_step"].values())
    assert found["checks"]["corrected_p"] > 0.05


def test_readers_of_results_pass_it_over():
    from holdfast.experiments import load_results

    found = load_results(ROOT / "results" / "second-opinion")
    assert len(found) == 0
    assert found.skipped == []


def test_what_the_page_says_of_seeds_and_settings_is_so(found):
    chosen, l1 = found["chosen"], found["l1"]
    assert chosen["cells"] == 22
    assert chosen["ours"] > 1.3 * chosen["published"]
    assert chosen["best"]["10"]["gain"] > 1.5 > chosen["best"]["5"]["gain"] > 0.8
    assert chosen["best"]["5"]["spread"] == pytest.approx(chosen["published"], rel=0.15), "as the published ones do"
    assert 0.05 < chosen["best"]["10"]["p"] < chosen["best"]["5"]["p"], "cannot rule it out"
    assert l1["given"]["200"] < l1["paper"]["200"] - 10
    assert all(abs(l1["tenth"][size] - l1["paper"][size]) < 1.5 for size in ("200", "500"))


def test_what_the_page_says_of_seeds_that_move_all_methods_is_so(found):
    cells = {(cell.cell.row, cell.cell.config.buffer_size): cell for cell in SCRIPT["_paper_cells"]()}
    by_hand: dict[tuple[int, int], list[float]] = {}
    for (method, size), cell in cells.items():
        runs = {run.config.seed: value for run, value in zip(cell.stored, cell.values, strict=True)}
        if method != "er":
            for seed, value in runs.items():
                by_hand.setdefault((size, seed), []).append(value - cell.published.mean)
            assert size == 500 or runs[1] > runs[0], "each of the ten methods is higher"
    for (size, seed), values in by_hand.items():
        assert found["by_seed"][str(size)][str(seed)] == pytest.approx(
            {"n": len(values), "mean": fmean(values)}, abs=1e-3
        )
    small, large = ([found["by_seed"][size][seed]["mean"] for seed in "01"] for size in ("200", "500"))
    assert round(small[1] - small[0]) == 4, "four points over the first"
    assert small[0] < -1
    assert small[1] > 1
    assert max(large) < -1
    assert abs(large[0] - large[1]) < 0.5, "alike"
    assert abs(found["by_seed"]["500"]["2"]["mean"]) < 0.5, "the third close to it"


def test_what_the_page_says_of_larger_draws_is_so(found):
    draws, lines = found["er_draws"], SCRIPT["read"]("er-draws.jsonl")
    assert [(run["seed"], run["replay_size"]) for run in lines] == [
        (seed, size) for seed in (300, 301, 302, 303, 304, 305, 308, 309) for size in (32, 128)
    ]
    by_hand = [
        wide["mean_of_last_10_steps"] - usual["mean_of_last_10_steps"]
        for usual, wide in zip(lines[::2], lines[1::2], strict=True)
    ]
    assert draws["difference"] == pytest.approx(fmean(by_hand), abs=1e-3)
    assert draws["interval90"][1] < 0
    assert draws["p"] < 0.05


def test_what_the_page_says_of_precision_is_so(found):
    lines = SCRIPT["read"]("precision.jsonl")
    runs = {(run["seed"], run["precision"]): run for run in lines}
    seeds = sorted({seed for seed, _ in runs})
    assert len(runs) == len(lines) == 2 * len(seeds)
    assert all(runs[seed, "bfloat16"]["method"] == runs[seed, "float32"]["method"] for seed in seeds)
    assert {run["method"] for run in lines if run["seed"] < 500} == {"linf"}, "the first pairs, of linf alone"
    for name, measure in (("tail", "mean_of_last_10_steps"), ("task_il", "task_il_accuracy")):
        by_hand = [runs[seed, "bfloat16"][measure] - runs[seed, "float32"][measure] for seed in seeds]
        assert found["precision"][name]["difference"] == pytest.approx(fmean(by_hand), abs=1e-3)
        low, high = found["precision"][name]["interval90"]
        assert low < 0 < high
    first = [seed for seed in seeds if seed < 500]
    alone = fmean(
        runs[seed, "bfloat16"]["mean_of_last_10_steps"] - runs[seed, "float32"]["mean_of_last_10_steps"]
        for seed in first
    )
    assert len(first) == 7
    assert alone / found["precision"]["tail"]["difference"] == pytest.approx(2, abs=0.1), "twice as much"
    assert found["precision"]["tail"]["interval90"][0] > -2, "two points are ruled out"


def test_what_the_page_says_of_other_papers_is_so(found):
    verdicts, table = witness_verdicts(), witnesses()
    cells = {key: each.difference for key, each in verdicts.items()}
    ours = {key: each.mean for key, each in verdicts.items()}
    keepers = [(method, size, "accuracy") for method in ("der", "mse", "er-ace", "clser") for size in (200, 500)]
    assert all(abs(cells[key]) < 1 for key in keepers), "within a point"
    assert {cells[key] > 0 for key in keepers} == {True, False}, "some over and some under"
    assert 62 < min(ours[key] for key in keepers) < max(ours[key] for key in keepers) < 76
    assert found["witnesses"]["cells"] == len(keepers) == 8
    assert found["witnesses"]["mean"] == pytest.approx(fmean(cells[key] for key in keepers), abs=1e-4)
    assert found["witnesses"]["largest"] == pytest.approx(max(abs(cells[key]) for key in keepers), abs=1e-4)
    forgetful = [("lwf", None), ("agem", 200), ("agem", 500)]
    assert all(round(ours[*key, "accuracy"]) == 20 for key in forgetful)
    assert [round(cells["icarl", size, "accuracy"]) for size in (200, 500)] == [4, 12]
    others = {key[:2] for key in cells if key[2] == "accuracy"} - {key[:2] for key in keepers}
    assert others == {*forgetful, *((method, size) for method in ("er", "icarl") for size in (200, 500))}
    assert all(cells["er", size, "accuracy"] > 5 for size in (200, 500)), "er lies over"
    assert round(cells["lwf", None, "task_il_accuracy"]) == 26
    assert round(cells["agem", 200, "task_il_accuracy"]) == 4
    assert {table.count(f"| {key[0]} | {key[1]} |") for key in keepers} == {1}
    paper = {each.cell.config.buffer_size: each for each in SCRIPT["_paper_cells"]() if each.cell.row == "er"}
    for size, each in paper.items():
        assert each.difference > 0, "over both papers"
        assert round(cells["er", size, "accuracy"] - each.difference) == 3, "which differ by three points"


def test_what_the_page_says_of_runs_on_a_cpu_is_so(found):
    runs = [json.loads(line) for line in (ROOT / "results/second-opinion/cpu.jsonl").read_text("utf-8").splitlines()]
    for method, compared in found["cpu"].items():
        accuracy = compared["accuracy"]
        assert accuracy["interval90"][0] < 0 < accuracy["interval90"][1] < 4, "not higher by four points"
        for measure in compared.values():
            assert measure["difference"] < 0, "a little lower"
            assert measure["welch_p"] > 0.1, "by less than chance gives"
        seeds = {
            code: [run["seed"] for run in runs if (run["code"], run["method"]) == (code, method)]
            for code in ("holdfast", "second-opinion")
        }
        for code, name in (("holdfast", "holdfast"), ("second-opinion", "second")):
            assert seeds[code] == list(range(accuracy[name]["n"]))
    assert found["cpu"]["er"]["accuracy"]["holdfast"]["n"] == found["cpu"]["er"]["accuracy"]["second"]["n"] == 12


def test_what_the_page_says_of_complete_runs_on_a_cpu_is_so(found):
    lines = (ROOT / "results/second-opinion/long.jsonl").read_text("utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    assert {(run["epochs"], run["width"], run["images"], run["buffer_size"]) for run in runs} == {(50, 8, 500, 200)}
    for code in CODES:
        for method in ("linf", "mse"):
            seeds = [run["seed"] for run in runs if (run["code"], run["method"]) == (code, method)]
            assert len(seeds) == len(set(seeds))
    tail, task = (found["long"]["linf"][name] for name in ("mean_of_last_10_steps", "task_il_accuracy"))
    assert abs(tail["difference"]) < 1, "agrees"
    assert tail["welch_p"] > 0.5
    assert task["difference"] < 0, "a little lower in every comparison"
    mse = found["long"]["mse"]["mean_of_last_10_steps"]
    assert mse["holdfast"]["n"] == mse["second"]["n"] == 3
    assert mse["interval90"][0] < 0 < mse["interval90"][1]


def test_what_the_page_says_of_all_comparisons_of_task_il_is_so(found):
    parts = [found["cpu"]["er"], found["cpu"]["linf"], found["long"]["linf"]]
    parts = [found["measures"]["task_tail"], *(each["task_il_accuracy"] for each in parts)]
    assert all(each["difference"] < 0 for each in parts), "in every comparison"
    weights = [1 / each["error"] ** 2 for each in parts]
    expected = sum(w * each["difference"] for w, each in zip(weights, parts, strict=True)) / sum(weights)
    assert found["task_il"]["difference"] == pytest.approx(expected, abs=1e-3)
    assert found["task_il"]["error"] == pytest.approx(sum(weights) ** -0.5, abs=1e-3)
    assert found["task_il"]["p"] < 0.05


def test_what_the_page_says_of_the_first_task_is_so(found):
    runs = [json.loads(line) for line in (ROOT / "results/second-opinion/runs.jsonl").read_text("utf-8").splitlines()]
    low = {code: [run["accuracy_matrix"][0][0] < 95 for run in runs if run["code"] == code] for code in CODES}
    assert [(sum(each), len(each)) for each in low.values()] == [(7, 32), (0, 18)]
    first = found["first"]
    assert first["welch_p"] > 0.5
    assert abs(first["low_runs"]["holdfast"] - first["low_runs"]["second"]) <= 1, "no more frequent"


def test_the_best_of_more_runs_by_tables():
    """Expected order statistics of ten normal draws are printed in tables: 1.5388, 1.0014 and 0.6561 for the best."""
    cell = SimpleNamespace(values=(1.0, 2.0, 3.0), n=3, published=SimpleNamespace(std=1.0))
    found = SCRIPT["chosen_seeds"]([cell] * 4)
    assert (found["ours"], found["published"], found["freedom"]) == (1.0, 1.0, 8)
    assert found["best"]["10"]["gain"] == pytest.approx((1.5388 + 1.0014 + 0.6561) / 3, abs=0.01)
    three = SCRIPT["chosen_seeds"]([cell] * 4, (3,))["best"]["3"]
    assert (three["gain"], three["spread"]) == pytest.approx((0.0, 1.0), abs=0.02), "nothing is chosen"
    assert three["p"] == pytest.approx(0.5, abs=0.1)


def test_what_the_page_says_of_several_gpus_is_so():
    runs = parallel_runs()
    counts = {key: {gpus: len(each) for gpus, each in cells.items()} for key, cells in runs.items()}
    narrow, whole = ("resnet18-8", 1), ("resnet18", 5)
    assert counts == {(*narrow, method): {1: 3, 2: 3, 4: 3} for method in ("er", "linf")} | {
        (*whole, method): {1: 2, 2: 2} for method in ("er", "linf")
    }
    means = {key: {gpus: fmean(each) for gpus, each in cells.items()} for key, cells in runs.items()}
    er, linf = (means[*whole, method] for method in ("er", "linf"))
    assert er[2] < 25 < 50 < er[1], "hardly anything but the newest task"
    assert 0 < linf[2] - linf[1] < 2
    apart = max(max(each) - min(each) for each in runs[*whole, "linf"].values())
    assert linf[2] - linf[1] < apart, "no more than seeds differ"
    page = (ROOT / "docs" / "concepts" / "how-sure.md").read_text("utf-8")
    table1 = EXPERIMENTS["table1"].select(["benchmark=seq-cifar10", "buffer_size=500", "method=er", "metric=accuracy"])
    (cell,) = table1.cells
    assert f"{cell.published.mean:.2f} for er at full length" in page.replace("\n", " ")
    assert f"| narrow network, 1 epoch, er | {means[*narrow, 'er'][1]:.1f} ± " in parallel()


def test_what_the_page_says_of_lwf_is_so(found):
    small, digits, published = (found["lwf"][name] for name in ("seq-cifar10-3", "seq-mnist-1", "published"))
    lines = [line for line in SCRIPT["read"]("lwf.jsonl") if line["code"] == "holdfast"]
    runs = {}
    for line in lines:
        runs.setdefault((line["benchmark"], line["variant"]), {})[line["seed"]] = line
    # Published LwF is no better than sgd, and ours is.
    for methods in published.values():
        assert methods["lwf"]["task_il_accuracy"] < methods["sgd"]["task_il_accuracy"] + 3
    full = found["lwf"]["full"]
    assert full["lwf"]["task_il_accuracy"] > full["sgd"]["task_il_accuracy"] + 15
    assert round(full["sgd"]["task_il_accuracy"] - published["seq-cifar10"]["sgd"]["task_il_accuracy"]) == 9
    field = EXPERIMENTS["field"].select(["method=lwf", "metric=task_il_accuracy"]).cells
    for cell in (cell for cell in field if cell.published is not None):
        assert published[cell.config.benchmark]["lwf"]["task_il_accuracy"] == cell.published.mean
    # S-MNIST: the published number is that of runs without a teacher, and of no others.
    target = published["seq-mnist"]["lwf"]["task_il_accuracy"]
    for variant, taught in {"ours": True, "warmed": True, "untaught": False, "uncalled": False}.items():
        each = runs["seq-mnist", variant]
        assert list(each) == list(range(400, 410))
        reached = [run["task_il_accuracy"] for run in each.values()]
        if taught:
            assert min(reached) > 97 > target
        elif variant == "uncalled":
            assert abs(fmean(reached) - target) < 1.833 * stdev(reached) / 10**0.5, "t(0.95), 9 degrees of freedom"
        assert digits[variant]["task_il_accuracy"]["mean"] == pytest.approx(fmean(reached), abs=1e-4)
    # S-CIFAR-10
    for variant in ("pixels", "together"):
        for run in runs["seq-cifar10", variant].values():
            assert all(abs(each - 50) < 3 for each in run["task_il"][:3]), "chance"
        assert small[variant]["beside"]["difference"] < 0
    assert small["pixels"]["beside"]["interval90"][1] < 0
    assert small["image"]["beside"]["difference"] > 0, "costs nothing"
    by_hand = [
        run["task_il_accuracy"] - runs["seq-cifar10", "ours"][seed]["task_il_accuracy"]
        for seed, run in runs["seq-cifar10", "uncalled"].items()
    ]
    assert small["uncalled"]["beside"]["difference"] == pytest.approx(fmean(by_hand), abs=1e-3)
    assert min(by_hand) < fmean(by_hand) < 0 < max(by_hand), "seeds differ much"
    assert all(line["accuracy"] < 23 for line in lines), "Class-IL: the newest task only"
