"""Folders of results -> results by fingerprint. What is not a result is named and left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from holdfast import results
from holdfast.analysis.findings import ANALYSIS
from holdfast.analysis.runs import RunAnalysis, analyze_run
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.files import walked
from holdfast.results import RunResult
from holdfast.schema import read_json, validated, write_json

__all__ = ["MEASURES_FILE", "Results", "Skipped", "Stored", "load_results"]

MEASURES_FILE = "measures.json"
"""Beside a result.json: numbers of analyses that take long, by name of the measure."""

OWN_FILES = (MEASURES_FILE, ANALYSIS, results.LOGITS, results.WEIGHTS)
OWN_FOLDERS = ("failed", "figures")
NOT_OURS_TO_READ = (".html", ".md", ".csv", ".tex", ".svg", ".png", ".jsonl", ".toml", ".db")
"""Reports and studies may be written beside the results they show, and measurements of other kinds as JSON lines."""


class Skipped(NamedTuple):
    """A file that was left out, and why."""

    path: Path
    reason: str

    @classmethod
    def made(cls, path: Path, reason: object) -> Skipped:
        """With unprintable characters spelled out: names of files may hold any bytes."""
        return cls(Path(_visible(path)), _visible(reason))


@dataclass(frozen=True)
class Stored:
    """A result as it lies on disk; its logits and the numbers of its analyses are read when they are asked for."""

    result: RunResult
    path: Path
    """The JSON file it was read from."""
    embedded: dict[str, float] = field(default_factory=dict)
    """Measures inside the JSON itself, where `condensed` puts them."""
    damage: list[Skipped] = field(default_factory=list, compare=False)
    """Files beside it that turned out to be unreadable when they were asked for. They count as not there."""

    @property
    def config(self) -> RunConfig:
        """The run this is the result of."""
        return self.result.config

    @property
    def folder(self) -> Path | None:
        """The result folder with its logits and weights; None for a single file."""
        return self.path.parent if self.path.name == results.RESULT else None

    @property
    def has_logits(self) -> bool:
        """Whether the logits of the test sets are beside the result."""
        return self.folder is not None and (self.folder / results.LOGITS).exists()

    @cached_property
    def analysis(self) -> RunAnalysis | None:
        """What its logits say; None where there are none, or where they are damaged."""
        try:
            return analyze_run(self.path.parent) if self.has_logits else None
        except HoldfastError as error:
            self.note(results.LOGITS, error)
        return None

    @cached_property
    def measures(self) -> dict[str, float]:
        """Numbers of analyses carried out before, by name of the measure, as far as they can be read."""
        beside = self.path.with_name(MEASURES_FILE)
        if self.folder is not None and beside.exists():
            try:
                return {**self.embedded, **validated(dict[str, float], read_json(beside), "measures")}
            except (OSError, ValueError) as error:
                told = f"{beside} is not readable: {error}. Remove it to have it computed again."
                self.note(MEASURES_FILE, told)
        return dict(self.embedded)

    def note(self, name: str, reason: object) -> None:
        """Say that the file `name` beside the result is unreadable, and why."""
        self.damage.append(Skipped.made(self.path.with_name(name), reason))

    def check(self) -> None:
        """Raise if a file beside it turned out to be unreadable."""
        if self.damage:
            raise HoldfastError(self.damage[0].reason)

    def add_measures(self, measures: dict[str, float]) -> None:
        """Add numbers of an analysis, and store them beside the result, whole or not at all.

        Raises where numbers are there already that cannot be read.
        """
        self.measures.update(measures)
        self.check()
        with suppress(OSError):  # the folder may be read-only; the numbers can be computed again
            write_json(self.path.with_name(MEASURES_FILE), self.measures)


@dataclass(frozen=True)
class Results:
    """Results by fingerprint, and what was skipped on the way."""

    by_fingerprint: dict[str, Stored] = field(default_factory=dict)
    unread: list[Skipped] = field(default_factory=list)
    """Files that were left out as the results were read."""

    @property
    def skipped(self) -> list[Skipped]:
        """The files left out so far: those `unread`, and logits and measures found to be damaged when asked for."""
        return [*self.unread, *(skipped for stored in self for skipped in stored.damage)]

    def skip(self, path: Path, reason: object) -> None:
        """Add a file to those that were left out."""
        self.unread.append(Skipped.made(path, reason))

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
            found.skip(path, "not a result")
            continue
        try:
            stored = _read(path)
        except HoldfastError as error:
            found.skip(path, error)
        else:
            found.by_fingerprint.setdefault(stored.config.fingerprint, stored)
    return found


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    """Files worth a look, in the same order on every machine."""
    for place, inside, names in walked(folders):
        inside[:] = sorted(name for name in inside if not name.startswith(".") and name not in OWN_FOLDERS)
        of_figures = {f"{name.removesuffix('.svg')}.json" for name in names if name.endswith(".svg")}
        for name in sorted(names):
            ignored = name in OWN_FILES or name in of_figures or name.endswith(NOT_OURS_TO_READ)
            if not (name.startswith(".") or ignored):
                yield place / name


def _read(path: Path) -> Stored:
    try:
        values = read_json(path)
        if not isinstance(values, dict) or "config" not in values or "accuracy_matrix" not in values:
            raise HoldfastError("not a result")
        measures = validated(dict[str, float], values.get("measures", {}), "measures")
        return Stored(RunResult.from_json(values), path, measures)
    except (OSError, ValueError) as error:
        raise HoldfastError(f"damaged: {error}") from None


def _visible(text: object) -> str:
    """The text with control characters and what is no UTF-8 spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
