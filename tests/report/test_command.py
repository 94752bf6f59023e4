import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from holdfast.cli import main
from holdfast.results import save

from .conftest import PAPER, run


@pytest.fixture
def report(monkeypatch, capfd, tmp_path):
    """Call `holdfast report` in an empty folder; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for result in PAPER:
        save(result, tmp_path / "runs")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["holdfast", "report", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


def test_html_goes_to_a_file(report, tmp_path):
    code, out, err = report("runs")
    assert (code, out) == (0, "")
    assert "10 results -> report.html" in err
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    save(PAPER[0], tmp_path / "one")
    assert "1 result -> report.html" in report("one")[2]


def test_the_results_of_this_repository_make_a_page(report, tmp_path):
    """They have runs with settings of their own, more than any made-up results."""
    code, _, err = report(str(Path(__file__).parents[2] / "results"))
    assert code == 0, err
    assert "ballast, weight decay 0.0005, hold_features=5" in (tmp_path / "report.html").read_text()


def test_analyses_are_there_unless_they_would_take_long(report, tmp_path, monkeypatch):
    for result in with_logits(*PAPER[:2]):
        save(result, tmp_path / "runs")

    def page(*options):
        code, _, err = report("runs", *options)
        assert code == 0
        return "analyses-" in (tmp_path / "report.html").read_text(), err

    assert page() == (True, ANY)
    assert page("--no-analyses") == (False, ANY)
    monkeypatch.setattr("holdfast.cli.report.ANALYZED", 1)
    there, err = page()
    assert not there
    assert "of 2 runs left out; --analyses adds them" in err
    assert page("--analyses") == (True, ANY)


def with_logits(*results):
    """The results with random answers."""
    generator = torch.Generator().manual_seed(0)
    for result in results:
        logits = {}
        for task in range(result.matrix.shape[1]):
            logits[f"logits.{task}"] = torch.randn(20, 10, generator=generator)
            logits[f"labels.{task}"] = torch.randint(0, 10, (20,), generator=generator)
        yield replace(result, logits=logits)


def test_a_run_with_damaged_logits_stays_in_the_tables_and_is_named(report, tmp_path):
    """It vanished from them, and without a word from those of the HTML page."""
    one, other = (run(method, tasks=2) for method in ("er", "l2"))
    for result in with_logits(one, other):
        save(result, tmp_path / "own")
    damaged = tmp_path / "own" / one.config.fingerprint / "logits.safetensors"
    os.truncate(damaged, 100)
    code, _, err = report("own")
    assert code == 0
    assert f"skipped own/{one.config.fingerprint}/logits.safetensors: " in err
    assert "2 results -> report.html" in err
    code, out, err = report("own", "--format", "csv")
    assert (code, err) == (0, "")  # which needs no logits
    assert one.config.fingerprint in out


def test_damaged_logits_do_not_end_a_page_without_analyses(report, tmp_path):
    """Its tables read calibration from them."""
    for result in with_logits(*PAPER):
        save(result, tmp_path / "paper")
    os.truncate(tmp_path / "paper" / PAPER[0].config.fingerprint / "logits.safetensors", 100)
    code, _, err = report("paper", "--no-analyses", "--experiment", "table1")
    assert code == 0, err
    assert "logits.safetensors is not readable" in err


def test_tables_go_to_standard_output_or_a_file(report, tmp_path):
    code, out, _ = report("runs", "--format", "markdown", "--experiment", "table1")
    assert code == 0
    assert "| er | 52.00 ± 1.00 (3) ? | 51.76 ± 2.19 |" in out
    code, out, _ = report("runs", "--format", "csv", "--out", "cells.csv")
    assert (code, out) == (0, "")
    assert (tmp_path / "cells.csv").read_text().startswith("experiment,")


def test_skipped_files_are_named(report, tmp_path):
    (tmp_path / "runs" / "[red]cut.json").write_text("{")
    code, _, err = report("runs")
    assert code == 0
    assert "skipped runs/[red]cut.json: damaged" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "nowhere is not a folder"),
        (["empty"], 1, "no results in empty"),
        (["runs", "--format", "csv", "--analyses"], 2, "no place for them in --format csv"),
        (["runs", "--format", "pdf"], 2, "unknown format 'pdf'"),
        (["runs", "--experiment", "tabel1"], 2, "did you mean 'table1'"),
        (["runs", "--out", "runs"], 1, "could not be written"),
    ],
)
def test_bad_requests_are_answered_in_a_sentence(report, tmp_path, arguments, code, message):
    (tmp_path / "empty").mkdir()
    got, _, err = report(*arguments)
    assert got == code
    assert message in err
    assert "Traceback" not in err


def test_figures_on_request(report, tmp_path):
    code, _, err = report("runs", "--figures", "figures")
    assert code == 0
    assert "figures -> figures" in err
    assert list((tmp_path / "figures").glob("*.svg"))
