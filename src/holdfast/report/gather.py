"""Folders -> the results in them that can be drawn. What cannot is named and left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.analysis.kept import ANALYSIS, read_findings
from holdfast.analysis.runs import Findings
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments.stored import Results, Skipped, load_results
from holdfast.results import RunResult

__all__ = ["gather", "gather_analyses"]


def gather(folders: Sequence[Path]) -> Results:
    """All results below the folders. Nothing is changed; what is damaged or foreign is among the skipped."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give the one that holds the results.")
    found = load_results(*folders)
    for fingerprint, stored in list(found.by_fingerprint.items()):
        if not _is_sound(stored.result):
            del found.by_fingerprint[fingerprint]
            found.skipped.append(Skipped(stored.path, "damaged: its accuracy matrix is not a table of percentages"))
    return found


def gather_analyses(folders: Sequence[Path], results: Results) -> list[Findings]:
    """What `holdfast analyze` wrote below the folders; damaged files join those that `results` skipped."""
    found: list[Findings] = []
    for path in sorted(path for folder in folders for path in folder.rglob(ANALYSIS)):
        try:
            found += read_findings(path)
        except HoldfastError as error:
            results.skipped.append(Skipped(path, str(error)))
    return found


def _is_sound(result: RunResult) -> bool:
    """Whether the matrices hold percentages: a file from elsewhere may hold any numbers."""
    return all(
        bool(((matrix >= 0) & (matrix <= 100) | matrix.isnan()).all()) for matrix in (result.matrix, result.task_matrix)
    )
