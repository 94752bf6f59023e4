"""The field: every number of other papers has its cell and its source, and stays out of the paper's claims."""

import csv
from importlib.resources import files

import pytest

from holdfast.experiments import EXPERIMENTS, Published, Results, assess, claims, published
from holdfast.experiments.field import FIELD, UNBUFFERED
from holdfast.learners import LEARNERS

CELLS = EXPERIMENTS["field"].cells


def rows():
    text = files("holdfast.experiments").joinpath("field.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize(
    ("method", "benchmark", "means"),
    [
        ("er", "seq-cifar10", (44.79, 57.74)),
        ("fdr", "seq-cifar10", (30.91, 28.71)),
        ("der", "seq-cifar10", (61.93, 70.51)),
        ("mse", "seq-cifar10", (64.88, 72.70)),
        ("clser", "seq-cifar10", (66.19, 75.22)),
        ("mse", "rot-mnist", (90.43, 92.77)),
        ("clser", "rot-mnist", (92.26, 94.06)),
        ("mse", "mnist-360", (54.16, 69.62)),
        ("clser", "mnist-360", (66.37, 75.70)),
        ("clser", "seq-cifar100", (43.80, 51.40)),
    ],
)
def test_numbers_that_the_field_agrees_on(method, benchmark, means):
    found = [published("field", benchmark, size, method, "accuracy") for size in (200, 500)]
    assert tuple(number.mean for number in found) == means


def test_every_number_has_a_source_and_a_cell():
    keys = [tuple(row[key] for key in ("benchmark", "buffer_size", "method", "metric")) for row in rows()]
    assert len(keys) == len(set(keys)) == 124
    assert all(row["source"] and row["table"] == "field" for row in rows())
    theirs = [cell for cell in CELLS if cell.published is not None and cell.published.source]
    shown = {(c.config.benchmark, str(c.config.buffer_size or ""), c.config.method, c.metric) for c in theirs}
    assert shown == set(keys)
    assert all(0 < cell.published.mean < 100 for cell in theirs)


def test_where_no_other_paper_has_a_number_the_papers_own_stands():
    at = {(c.config.method, c.config.benchmark, c.config.buffer_size, c.metric): c.published for c in CELLS}
    assert at["linf", "rot-mnist", 200, "accuracy"] == Published(90.01, 0.13)
    assert at["er", "mnist-360", 200, "accuracy"] == Published(51.76, 2.19)
    assert at["er", "rot-mnist", 200, "accuracy"].source.startswith("Buzzega et al. 2020")
    assert at["esmer", "rot-mnist", 200, "accuracy"] is None
    assert at["dualnet", "rot-mnist", 200, "accuracy"] is None
    assert not any(cell.published for cell in CELLS if cell.config.method == "ballast"), "it is our own"


def test_methods_that_need_boundaries_have_no_cell_on_a_stream_without():
    on_360 = {cell.config.method for cell in CELLS if cell.config.benchmark == "mnist-360"}
    assert on_360 == {"er", "agem", "der", "mse", "er-ace", "clser", "esmer", "dualnet", "ballast", "linf"}
    on_digits = {cell.config.method for cell in EXPERIMENTS["field"].select(["benchmark=rot-mnist"]).cells}
    assert on_digits == {*FIELD, *UNBUFFERED}
    assert {name for name in LEARNERS if LEARNERS[name].needs_boundaries} == on_digits - on_360


def test_sources_are_named_once_with_what_they_print():
    table = assess(EXPERIMENTS["field"].select(["benchmark=rot-mnist"]), Results())
    assert [source.partition(": ")[0] for source in table.sources] == [
        "ewc, si, er, agem, gem, fdr, der, mse on rot-mnist",
        "clser on rot-mnist",
    ]
    assert assess(EXPERIMENTS["table1"], Results()).sources == []


def test_numbers_of_other_papers_decide_no_claim_of_the_paper():
    field, table1 = (assess(EXPERIMENTS[name], Results()).verdicts for name in ("field", "table1"))
    assert claims([*table1, *field]) == claims(table1)
    turned = claims([*field, *table1])  # the settings come in another order
    assert [set(claim.published) for claim in turned] == [set(claim.published) for claim in claims(table1)]
