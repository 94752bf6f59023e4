"""Folders of results -> results by fingerprint. What is not a result is named and left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from holdfast import results
from holdfast.analysis.kept import ANALYSIS
from holdfast.config import PROTOCOL, RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import replacing
from holdfast.results import RunResult

__all__ = ["MEASURES_FILE", "Results", "Skipped", "Stored", "load_results"]

MEASURES_FILE = "measures.json"
"""Beside a result.json: numbers of analyses that take long, by name of the measure."""

OWN_FILES = (MEASURES_FILE, ANALYSIS, results.LOGITS, results.WEIGHTS)
OWN_FOLDERS = ("failed",)
NOT_OURS_TO_READ = (".html", ".md", ".csv", ".tex", ".svg", ".png")
"""Reports may be written beside the results they show."""


@dataclass(frozen=True)
class Stored:
    """A result as it lies on disk; its logits and the numbers of its analyses are read when they are asked for."""

    result: RunResult
    path: Path
    """The JSON file it was read from."""
    kept: dict[str, float] = field(default_factory=dict)
    """Measures written into the JSON itself, as `condensed` does for results kept without their logits."""

    @property
    def config(self) -> RunConfig:
        """The run this is the result of."""
        return self.result.config

    @cached_property
    def logits(self) -> dict[str, Tensor]:
        """Logits and labels of the final model by test set; empty where they were not kept."""
        if not (self.path.parent / results.LOGITS).exists() or self.path.name != results.RESULT:
            return {}
        return results.read(self.path.parent, tensors=True).logits

    @cached_property
    def measures(self) -> dict[str, float]:
        """Numbers of analyses carried out before, by name of the measure."""
        beside = self.path.with_name(MEASURES_FILE)
        if self.path.name != results.RESULT or not beside.exists():
            return dict(self.kept)
        try:
            return {**self.kept, **_numbers(results.parse_json(beside.read_text("utf-8")))}
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise HoldfastError(f"{beside} is not readable: {error}. Remove it to have it computed again.") from error

    def add_measures(self, measures: dict[str, float]) -> None:
        """Add numbers of an analysis, and keep them beside the result, whole or not at all."""
        self.measures.update(measures)
        # Somebody else's folder may be read-only, and they can be computed again.
        with suppress(OSError), replacing(self.path.with_name(MEASURES_FILE)) as scratch:
            scratch.write_text(json.dumps(self.measures, indent=1) + "\n", encoding="utf-8")


class Skipped(NamedTuple):
    """A file that was left out, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Results:
    """Results by fingerprint, and what was skipped on the way."""

    by_fingerprint: dict[str, Stored] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.by_fingerprint)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self.by_fingerprint.values())

    def __contains__(self, config: RunConfig) -> bool:
        return config.fingerprint in self.by_fingerprint

    def get(self, config: RunConfig) -> Stored | None:
        """The result of exactly this run, or None. The fingerprint decides."""
        return self.by_fingerprint.get(config.fingerprint)

    def seeds_of(self, config: RunConfig) -> list[int]:
        """The seeds there are results for, whatever the seed of `config`, in order."""
        return self._seeds.get(config.change(seed=0), [])

    @cached_property
    def _seeds(self) -> dict[RunConfig, list[int]]:
        seeds: dict[RunConfig, list[int]] = {}
        for stored in self:
            seeds.setdefault(stored.config.change(seed=0), []).append(stored.config.seed)
        return {config: sorted(found) for config, found in seeds.items()}


def load_results(*folders: Path) -> Results:
    """Every result below the folders: result folders as a sweep writes them, and single files of the same JSON.

    Where two files hold the same run, the first one counts. Damaged files, results of another protocol and files that
    are nothing of ours are skipped and named; nothing is changed.
    """
    found = Results()
    for path in _files(folders):
        if path.suffix != ".json":
            found.skipped.append(Skipped(path, "not a result"))
            continue
        try:
            stored = _read(path)
        except HoldfastError as error:
            found.skipped.append(Skipped(path, str(error)))
        else:
            found.by_fingerprint.setdefault(stored.config.fingerprint, stored)
    return found


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    """Files worth a look, in the same order on every machine."""
    for folder in folders:
        for place, inside, names in os.walk(folder):
            inside[:] = sorted(name for name in inside if not name.startswith(".") and name not in OWN_FOLDERS)
            for name in sorted(names):
                if not name.startswith(".") and name not in OWN_FILES and not name.endswith(NOT_OURS_TO_READ):
                    yield Path(place, name)


def _read(path: Path) -> Stored:
    try:
        values = results.parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise HoldfastError(f"damaged: {error}") from None
    if not isinstance(values, dict) or "config" not in values or "accuracy_matrix" not in values:
        raise HoldfastError("not a result")
    if values.get("protocol") != PROTOCOL:
        raise HoldfastError(f"of protocol {values.get('protocol')}; this version computes protocol {PROTOCOL}")
    try:
        stored = Stored(RunResult.from_json(values), path, _numbers(values.get("measures", {})))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise HoldfastError(f"damaged: {type(error).__name__}: {error}") from None
    if values.get("fingerprint") != stored.config.fingerprint:
        raise HoldfastError("its settings do not belong to its fingerprint; it was edited or is of another version")
    return stored


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        raise ValueError("measures are not a mapping")
    return {str(name): float(value) for name, value in values.items()}
