"""The page "Past the field": its tables are those of the committed runs, and its sentences are so."""

import json
import runpy
from statistics import fmean

import pytest

from .blocks import ROOT

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
PAGE = (ROOT / "docs" / "concepts" / "beyond.md").read_text("utf-8")


def read(name):
    return [json.loads(line) for line in (ROOT / "results" / "beyond" / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def runs():
    return {(row["network"], row["candidate"]): row for row in read("candidates.jsonl")}


def test_the_runs_are_whole(runs):
    for row in runs.values():
        assert row["validation"] == 0.1
        for accuracy, tasks in zip(row["accuracies"], row["last"], strict=True):
            assert accuracy == pytest.approx(fmean(tasks), abs=0.01)
    shares = {(row["share"], row["idea"]) for row in read("lag.jsonl")}
    assert len(read("lag.jsonl")) == 3 * len(shares) == 45


def test_the_tables_have_every_run(runs):
    for network in ("resnet18", "narrow"):
        assert f"<!-- candidates: {network} -->" in PAGE
        table = HOOKS["candidates"](network)
        shown = [row for row in runs.values() if row["network"] == network]
        assert len(table.splitlines()) == 2 + len(shown)
        for row in shown:
            assert f"| {row['candidate']} | {len(row['accuracies'])} | {fmean(row['accuracies']):.1f}" in table
    assert "<!-- lag -->" in PAGE
    first = [row["accuracy"] for row in read("lag.jsonl") if (row["share"], row["idea"]) == (0.7, "")]
    assert f"| 0.7 | {fmean(first):.1f} ± " in HOOKS["lag"]()


def test_what_the_page_says_is_so(runs):
    assert all(len(row["accuracies"]) == 1 for row in runs.values()), "every number is one run"
    of = {key: row["accuracies"][0] for key, row in runs.items()}
    last = {key: row["last"][0][-1] for key, row in runs.items()}
    for network in ("resnet18", "narrow"):
        assert last[network, "plain"] == max(value for (where, _), value in last.items() if where == network)
    for other in ("", ", asymmetric"):
        assert of["resnet18", f"average as target{other}, cutmix"] < of["resnet18", f"average as target{other}"]
    assert max(of, key=of.get) == ("resnet18", "average for evaluation only")
    narrow = {name: value for (where, name), value in of.items() if where == "narrow"}
    assert max(narrow, key=narrow.get) == "average as target, adjusted, fast"
    assert not list((ROOT / "results" / "seq-cifar10").glob("ballast-*")), "the page says that there is none"


def test_a_fairer_network_needs_a_faster_average():
    """The best share of a task falls from neither idea to adjusted to asymmetric."""
    rows, best = read("lag.jsonl"), []
    for idea in ("", "adjusted=True", "asymmetric=True"):
        mean = {
            share: fmean(row["accuracy"] for row in rows if (row["share"], row["idea"]) == (share, idea))
            for share in {row["share"] for row in rows}
        }
        best.append(max(mean, key=mean.get))
    assert best[0] > best[1] > best[2]


def test_readers_of_results_pass_it_over():
    from holdfast.experiments import load_results

    found = load_results(ROOT / "results" / "beyond")
    assert len(found) == 0
    assert found.skipped == []
