"""Experiments: the right runs, each once, and a choice among them."""

import pytest

from holdfast.benchmarks import BENCHMARKS
from holdfast.errors import UsageError
from holdfast.experiments import EXPERIMENTS, MEASURES, Experiment, find_experiment, register
from holdfast.learners import method_names


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_contract(name):
    experiment = EXPERIMENTS[name]
    assert experiment.title
    assert experiment.shows.endswith(".")
    kinds = ("differences", "lines", "matrices", "gains", "reliability", "recency", "robustness")
    assert experiment.figure in kinds
    places = [(cell.group, cell.row, cell.column) for cell in experiment.cells]
    assert len(places) == len(set(places))
    for cell in experiment.cells:
        assert cell.metric in MEASURES
        assert cell.config.benchmark in BENCHMARKS
        assert cell.config.method in method_names()
    configs = experiment.configs()
    assert len(configs) == len(set(configs))
    assert {config.seed for config in configs} == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "cells", "runs"),
    [
        ("table1", 5 * (2 + 2 * 11), 360),
        ("long-sequences", 3 * 11, 99),
        ("low-buffer", 4 * 11, 132),
        ("forward-transfer", 2 * 11, 66),
        ("alpha", 4 * 3, 12),
        ("beta", 9 * 3, 81),
        ("task-performance", 11, 33),
        ("overview", 3 * 11, 33),
        ("calibration", 2 * 11, 66),
        ("recency", (6 + 11) * 11, 66),
        ("robustness", 5 * 11, 33),
        ("field", 188, 429),
    ],
)
def test_size(name, cells, runs):
    assert (len(EXPERIMENTS[name].cells), len(EXPERIMENTS[name].configs())) == (cells, runs)


def test_experiments_share_runs():
    """The same computation has one fingerprint wherever it is shown."""
    table1 = set(EXPERIMENTS["table1"].configs())
    assert set(EXPERIMENTS["forward-transfer"].configs()) < table1
    assert set(EXPERIMENTS["robustness"].configs()) < table1
    assert len(table1 & set(EXPERIMENTS["alpha"].configs())) == 3


def test_settings_of_the_variants():
    alpha = {cell.row: cell.config for cell in EXPERIMENTS["alpha"].cells}
    assert alpha["alpha 5"].alpha == 5
    assert alpha["alpha 5"].lr == alpha["alpha 1"].lr
    assert {cell.config.tasks for cell in EXPERIMENTS["long-sequences"].cells} == {5, 10, 20}
    assert {cell.config.buffer_size for cell in EXPERIMENTS["low-buffer"].cells} == {10, 20, 50, 100}
    assert {cell.config.beta for cell in EXPERIMENTS["beta"].cells if cell.row == "beta 0.05"} == {0.05}


@pytest.mark.parametrize(
    ("only", "count"),
    [
        ([], 120),
        (["benchmark=rot-mnist"], 24),
        (["benchmark=rot-mnist,method=linf,buffer_size=200"], 1),
        (["benchmark=rot-mnist", "method=linf", "buffer_size=200"], 1),
        (["benchmark=rot-mnist,benchmark=mnist-360"], 48),
        (["benchmark = rot-mnist , buffer_size=none"], 2),
        (["buffer_size=2e2,method=er"], 5),
        (["column=rot-mnist,row=er"], 2),
        (["benchmark=rot-mnist,method=derpp"], 2),
    ],
)
def test_select(only, count):
    assert len(EXPERIMENTS["table1"].select(only).cells) == count


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("method=lmao", r"no cell of table1 has method=lmao; there is joint, sgd, er, l1"),
        ("buffer_size=300", r"buffer_size=300; there is none, 200, 500"),
        ("buffer=200", "unknown key of --only 'buffer': did you mean 'buffer_size'"),
        ("linf", r"--only takes key=value, not 'linf'. There is benchmark = seq-cifar10"),
        ("method=sgd,buffer_size=200", r"method=sgd, buffer_size=200 at once. There is .*buffer_size = none, 200, 500"),
    ],
)
def test_select_that_selects_nothing(only, message):
    with pytest.raises(UsageError, match=message):
        EXPERIMENTS["table1"].select([only])


def test_the_papers_numbers():
    """As LaTeX counts the captions of the paper: wraptables and figures in figures count, algorithms do not."""
    found = {number: (name, condition) for name, e in EXPERIMENTS.items() for number, condition in e.numbers.items()}
    cifar, tiny = "benchmark=seq-cifar10", "benchmark=seq-tinyimagenet"
    assert found == {
        "table2": ("table1", ""),
        "table3": ("long-sequences", ""),
        "table4": ("low-buffer", ""),
        "table5": ("forward-transfer", ""),
        "table6": ("alpha", ""),
        "table7": ("beta", ""),
        "figure1": ("overview", ""),
        "figure3": ("robustness", ""),
        "figure4": ("calibration", cifar),
        "figure5": ("recency", cifar),
        "figure6": ("task-performance", ""),
        "figure7": ("calibration", tiny),
        "figure8": ("recency", tiny),
    }
    for number, (name, condition) in found.items():
        assert find_experiment(number) == EXPERIMENTS[name].select([condition])
        kind, count = number[:-1], number[-1]
        assert f"{count}" in EXPERIMENTS[name].source
        assert find_experiment(f"{kind.capitalize()} {count}") == find_experiment(f"{kind}-{count}")
    assert {cell.config.benchmark for cell in find_experiment("figure7").cells} == {"seq-tinyimagenet"}


def test_table1_keeps_its_meaning_and_a_drawing_cannot_be_run():
    assert find_experiment("table1") is find_experiment("table-1") is EXPERIMENTS["table1"]
    with pytest.raises(UsageError, match="Figure 2 is a drawing of the method"):
        find_experiment("figure2")
    with pytest.raises(UsageError, match="unknown experiment 'figure9': did you mean 'figure"):
        find_experiment("figure9")


def test_names():
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        EXPERIMENTS["tabel1"]
    with pytest.raises(UsageError, match="registered already"):
        register(Experiment("table1", "again", "nowhere", "nothing.", EXPERIMENTS["table1"].cells))


def test_a_figure_that_nobody_draws_is_refused():
    """A slip of the finger was drawn as differences."""
    with pytest.raises(UsageError, match="did you mean 'lines'"):
        Experiment("typo", "Typo", "nowhere", "Nothing.", (), figure="linse")


def test_an_experiment_without_cells_is_refused():
    with pytest.raises(UsageError, match="the experiment bare has no cells"):
        register(Experiment("bare", "Bare", "nowhere", "Nothing.", ()))
