"""Analyses read back from their file: the same numbers, or a clear error."""

import copy
import json
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.analysis import Robustness
from holdfast.analysis.findings import ANALYSIS, Findings, compare, read_findings, write_findings
from holdfast.analysis.runs import RunAnalysis, analyze_run
from holdfast.errors import DataError, HoldfastError
from holdfast.report import gather, gather_analyses, render_report
from holdfast.report.analyses import analysis_charts

from .test_runs import stored

COMMITTED = Path(__file__).parents[2] / "results" / "seq-cifar10" / "analysis" / ANALYSIS


def some(folder: Path) -> list[Findings]:
    """Findings of two methods, one of them with robustness."""
    plain, robust = (analyze_run(stored(folder, method=method)) for method in ("er", "l2"))
    found = Robustness("generated", (1, 5), 60.0, {"fog": [50.0, 40.0]}, {"fog": 45.0}, {"weather": 45.0}, None)
    return compare([plain, RunAnalysis(robust.folder, robust.result, robust.calibration, robust.recency, found)])


def write(path: Path, findings: list[Findings]) -> Path:
    write_findings(path, findings, bins=15)
    return path


def test_what_was_written_is_read_back(tmp_path):
    written = some(tmp_path)
    read = read_findings(write(tmp_path / ANALYSIS, written))
    assert json.dumps([one.to_json() for one in read]) == json.dumps([one.to_json() for one in written])


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """It was written in place: a full disk left half a file where a whole one had been."""
    path = write(tmp_path / ANALYSIS, some(tmp_path))
    before = path.read_bytes()

    def half(self, text, **_):
        self.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(HoldfastError, match=r"analysis\.json could not be written: No space left on device"):
        write(path, [])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [ANALYSIS]


def test_gains_and_claims_are_computed_from_the_numbers_read(tmp_path):
    values = json.loads(COMMITTED.read_text())
    values["comparisons"][0] |= {"claims": "none", "relative_gains_over_er": [1, 2]}
    (tmp_path / ANALYSIS).write_text(json.dumps(values))
    (found,), (committed,) = read_findings(tmp_path / ANALYSIS), read_findings(COMMITTED)
    assert found == committed
    stored = json.loads(COMMITTED.read_text())["comparisons"][0]["relative_gains_over_er"]
    assert found.gains.keys() == stored.keys()
    for label, expected in stored.items():
        assert found.gains[label] == pytest.approx(expected)


def test_a_report_shows_what_was_analyzed_before(tmp_path):
    findings = some(tmp_path)
    results = gather([tmp_path])
    there = "Calibration, recency and transfer, robustness to corrupted images"
    assert there not in render_report(results)
    assert there in render_report(results, analyses=findings)


def test_the_committed_analysis_has_the_claims(tmp_path):
    (found,) = read_findings(COMMITTED)
    assert {claim.statement for claim in found.claims} == {
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
    with pytest.raises(DataError, match=r"accuracy\.fog\[0\] is 'forty'"):
        read_findings(tmp_path / ANALYSIS)


def mutations():
    """Every place of the file with a value that does not belong there, or with nothing."""
    values = json.loads(COMMITTED.read_text())
    values["comparisons"][0]["methods"] = values["comparisons"][0]["methods"][:3]
    for path in places(values["comparisons"]):
        for strange in (None, "x", -1, 1e300, 10**400, [], {}, "missing"):
            yield values, path, strange


def places(value, path=()):
    yield path
    if len(path) > 1 and path[-1] in ("claims", "relative_gains_over_er", "benchmark", "config"):
        return
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    for key, item in items if isinstance(value, dict) else [*items[:1], *items[-1:]]:
        yield from places(item, (*path, key))


def mutated(values, path, strange):
    made = copy.deepcopy(values)
    *front, last = ("comparisons", *path)
    inner = made
    for key in front:
        inner = inner[key]
    if strange == "missing":
        del inner[last]
    else:
        inner[last] = strange
    return made


@pytest.mark.parametrize("every", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_what_can_be_read_can_be_drawn(tmp_path, every):
    """A quarter of such changes ended in a traceback, most of them when a figure was drawn."""
    read = refused = 0
    for number, change in enumerate(islice(mutations(), 0, None, 23 if every > 1 else 1)):
        (tmp_path / ANALYSIS).write_text(json.dumps(mutated(*change)))
        try:
            found = read_findings(tmp_path / ANALYSIS)
        except DataError:
            refused += 1
            continue
        read += 1
        if read % every == 0:
            for chart in (chart for one in found for chart in analysis_charts(one).values()):
                chart.draw(title=f"{number}")
    assert refused > 200
    assert read > 5


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
