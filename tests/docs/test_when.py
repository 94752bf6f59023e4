"""The table of "When not to replay": what its script computes, and what the page says about it."""

import json
import runpy
import sys

from .blocks import ROOT

KEPT = json.loads((ROOT / "docs" / "when-not-to-replay.json").read_text("utf-8"))


def test_the_first_seed_is_computed_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["when_not_to_replay.py", "--seeds", "1", "--out", str(tmp_path / "found.json")])
    runpy.run_path(str(ROOT / "benchmarks" / "when_not_to_replay.py"), run_name="__main__")
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    for name, (accuracy,) in found["accuracies"].items():
        assert abs(accuracy - KEPT["accuracies"][name][0]) < 5, name


def test_what_the_page_says():
    final = KEPT["final"]
    assert final["default"] < min(final[name] for name in ("none", "emptied", "decay", "window")) - 10
    assert all(3000 < alarm < 3600 for (alarm,) in KEPT["alarms"]["emptied"])
    page = (ROOT / "docs" / "concepts" / "when-not-to-replay.md").read_text("utf-8")
    assert all(f"<!-- when-not-to-replay.final.{name} -->" in page for name in final)
