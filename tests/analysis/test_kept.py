"""Analyses read back from their file: the same numbers, or a clear error."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.analysis import Robustness
from holdfast.analysis.kept import ANALYSIS, read_findings
from holdfast.analysis.runs import Findings, RunAnalysis, analyze_run
from holdfast.errors import DataError, HoldfastError
from holdfast.report import gather, gather_analyses, render_report
from holdfast.report.comparisons import compare

from .test_runs import stored

COMMITTED = Path(__file__).parents[2] / "results" / "seq-cifar10" / "analysis" / ANALYSIS


def some(folder: Path) -> list[Findings]:
    """Findings of two methods, one of them with robustness."""
    plain, robust = (analyze_run(stored(folder, method=method)) for method in ("er", "l2"))
    found = Robustness("generated", (1, 5), 60.0, {"fog": [50.0, 40.0]}, {"fog": 45.0}, {"weather": 45.0}, None)
    return compare([plain, RunAnalysis(robust.folder, robust.result, robust.calibration, robust.recency, found)])


def write(path: Path, findings: list[Findings]) -> Path:
    path.write_text(json.dumps({"comparisons": [one.to_json() for one in findings]}))
    return path


def test_what_was_written_is_read_back(tmp_path):
    written = some(tmp_path)
    read = read_findings(write(tmp_path / ANALYSIS, written))
    assert json.dumps([one.to_json() for one in read]) == json.dumps([one.to_json() for one in written])


def test_a_report_shows_what_was_analyzed_before(tmp_path):
    findings = some(tmp_path)
    results = gather([tmp_path])
    there = "Calibration, recency and transfer, robustness to corrupted images"
    assert there not in render_report(results)
    assert there in render_report(results, kept=findings)


def test_the_committed_analysis_has_the_claims(tmp_path):
    (found,) = read_findings(COMMITTED)
    assert {claim.text for claim in found.claims} == {
        "er is the most miscalibrated",
        "er is the most biased towards the last task",
        "er is the least robust",
    }


def test_damaged_files_are_named_among_the_skipped(tmp_path):
    write(tmp_path / ANALYSIS, some(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ANALYSIS).write_text("{")
    results = gather([tmp_path])
    assert not results.skipped
    assert len(gather_analyses([tmp_path], results)) == 1
    (skipped,) = results.skipped
    assert skipped.path == tmp_path / "other" / ANALYSIS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"comparisons": [{}]}', '{"comparisons": 3}', "[" * 100_000])
def test_something_else_gives_a_clear_error(tmp_path, text):
    (tmp_path / ANALYSIS).write_text(text)
    with pytest.raises(DataError, match="is not an analysis"):
        read_findings(tmp_path / ANALYSIS)
    with pytest.raises(DataError, match="cannot be read"):
        read_findings(tmp_path)


def test_words_in_place_of_numbers_are_refused(tmp_path):
    values = json.loads(COMMITTED.read_text())
    values["comparisons"][0]["methods"][0]["robustness"]["accuracy"]["fog"][0] = "forty"
    (tmp_path / ANALYSIS).write_text(json.dumps(values))
    with pytest.raises(DataError, match="'forty' is not a number"):
        read_findings(tmp_path / ANALYSIS)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_changed_bytes_are_read_or_refused(tmp_path_factory, data):
    content = bytearray(COMMITTED.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / ANALYSIS
    path.write_bytes(content)
    with suppress(HoldfastError):
        assert all(isinstance(one, Findings) for one in read_findings(path))
