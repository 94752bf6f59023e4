"""Folders -> the results in them that can be drawn. What cannot is named and left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.analysis.findings import Findings
from holdfast.analysis.store import ANALYSIS, read_findings
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments.stored import Results, load_results

__all__ = ["gather", "gather_analyses"]


def gather(folders: Sequence[Path]) -> Results:
    """All results below the folders. Nothing is changed; what is damaged or foreign is among the skipped."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give the one that holds the results.")
    return load_results(*folders)


def gather_analyses(folders: Sequence[Path], results: Results) -> list[Findings]:
    """What `holdfast analyze` wrote below the folders; damaged files join those that `results` skipped."""
    found: list[Findings] = []
    for path in sorted(path for folder in folders for path in folder.rglob(ANALYSIS)):
        try:
            found += read_findings(path)
        except HoldfastError as error:
            results.skip(path, error)
    return found
