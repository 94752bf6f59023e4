"""Work off the queue of GPU runs for a while: what is not there yet, in order, several runs at a time.

    python benchmarks/work_off.py --seconds 540 --out runs --small small
    python benchmarks/work_off.py --list

Stops in time. Towards the end only those runs go on that can still end. The others save their state under --out, and
the next call with the same --out continues them. Several processes may work off one queue with the same --out: each
run is carried out by one of them. Results are folders as `holdfast run` writes them. With --small, each is also written
as one JSON file without logits and weights, named as those under results/, as soon as its run has ended. Needs the
packages of Holdfast itself, no extras, and the data sets in place (--data).
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before the slow imports: they count

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tomllib  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import dataclass, field, fields  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated, Any, NamedTuple  # noqa: E402

from holdfast.config import RunConfig  # noqa: E402
from holdfast.errors import HoldfastError, UsageError  # noqa: E402
from holdfast.experiments import EXPERIMENTS, condensed, load_results  # noqa: E402
from holdfast.learners import settings_for  # noqa: E402
from holdfast.schema import validated  # noqa: E402
from holdfast.sweep import Event, SweepSummary, sweep  # noqa: E402
from holdfast.sweep.fleets import FleetRunner  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Table:
    """An entry as queue.toml has it."""

    what: str
    experiment: str
    only: list[str] = field(default_factory=list)
    seeds: Annotated[int, lambda value: 0 < value <= 1000] = 1
    set: list[str] = field(default_factory=list)


class Entry(NamedTuple):
    """An entry of the queue: runs that belong together, in order."""

    what: str
    configs: list[RunConfig]


def read_queue(path: Path) -> list[Entry]:
    """The entries of a queue file, the most important first."""
    try:
        tables = validated(list[dict[str, Any]], tomllib.loads(path.read_text("utf-8"))["runs"], "runs")
        for name in {name for table in tables for name in table} - {each.name for each in fields(Table)}:
            raise UsageError(f"'{name}' is not known; an entry has {', '.join(each.name for each in fields(Table))}")
        return [_entry(validated(Table, table, f"runs[{number}]")) for number, table in enumerate(tables)]
    except (OSError, KeyError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no queue of runs: {error}.") from error


def _entry(table: Table) -> Entry:
    experiment = EXPERIMENTS[table.experiment].select(table.only)
    configs = experiment.configs(range(table.seeds))
    configs = [config.parse(table.set, settings_for(config)) for config in configs]
    return Entry(table.what, list(dict.fromkeys(configs)))


def work_off(
    configs: Sequence[RunConfig],
    out: Path,
    *,
    seconds: float,
    reserve: float = 40.0,
    fleet: int | None = None,
    device: str = "auto",
    data: Path | None = None,
    small: Path | None = None,
    name: Callable[[RunConfig], str] | None = None,
    checkpoint_every: float = 120.0,
) -> SweepSummary:
    """Carry out the runs in order for so many seconds, the last `reserve` of which are for saving states.

    When there is no longer time for all runs in flight, those with the most left to do wait for the others to end.
    Results are written to `small` as they come, as single files, so that nothing is lost with the machine; `name` gives
    their paths in that folder, see `write_small`.
    """
    tell, until = Teller(), time.monotonic() + seconds - reserve

    def watch(event: Event) -> None:
        tell(event)
        if event.kind == "done" and small is not None:
            write_small([event.config], out, small, name or small_name)

    given: dict[str, Any] = {"device": device, "data": data, "watch": watch, "checkpoint_every": checkpoint_every}
    return sweep(configs, out, runner=FleetRunner(fleet, until), until=until, **given)


class Teller:
    """Prints what becomes of runs, and every `often` seconds how far those are that go on."""

    def __init__(self, often: float = 60.0) -> None:
        self._often, self._told = often, time.monotonic()
        self._far: dict[RunConfig, float] = {}

    def __call__(self, event: Event) -> None:
        if event.kind in ("started", "moved"):
            self._far[event.config] = event.fraction
        else:
            self._far.pop(event.config, None)
        if event.kind != "moved":
            self._print(f"{event.kind} {event.config.title} {event.error}".rstrip())
        elif time.monotonic() - self._told >= self._often:
            self._print(", ".join(f"{config.title} {far:.0%}" for config, far in self._far.items()))
            self._told = time.monotonic()

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


def small_name(config: RunConfig) -> str:
    """A path such as seq-cifar10/er-200-seed0.json; settings other than the preset's are named as well."""
    preset = RunConfig.preset(config.benchmark, config.method, buffer_size=config.buffer_size, seed=config.seed)
    ours, usual = _values(config), _values(preset)
    other = "".join(f"-{name}{value}" for name, value in ours.items() if value != usual[name])
    buffer = "" if config.buffer_size is None else f"-{config.buffer_size}"
    return f"{config.benchmark}/{config.method}{buffer}-seed{config.seed}{other}.json"


def _values(config: RunConfig) -> dict[str, Any]:
    """All that decides a run, by name: the config's fields, and the settings of its method."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    settings = settings_for(config) | dict(values.pop("settings"))
    return values | settings


def write_small(
    configs: Sequence[RunConfig], out: Path, folder: Path, name: Callable[[RunConfig], str] = small_name
) -> list[Path]:
    """The results that are there under `out`, one file each, at the path in `folder` that `name` gives."""
    found, written = load_results(out), []
    for config in configs:
        stored = found.get(config)
        if stored is not None:
            path = folder / name(config)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(condensed(stored), separators=(",", ":"), allow_nan=False) + "\n", "utf-8")
            written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=Path, default=ROOT / "benchmarks" / "queue.toml")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="results that are there already")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="new results, and states of runs in flight")
    parser.add_argument("--small", type=Path, help="folder for new results as single files")
    parser.add_argument("--seconds", type=float, default=540, help="time from start to end")
    parser.add_argument("--reserve", type=float, default=40, help="of these, for saving states")
    parser.add_argument("--fleet", type=int, help="runs at a time; default: as many as make it faster")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--list", action="store_true", help="show the queue and run nothing")
    options = parser.parse_args(arguments)
    entries = read_queue(options.queue)
    there = load_results(options.results, options.out)
    for number, entry in enumerate(entries, start=1):
        count = sum(config in there for config in entry.configs)
        print(f"{number}. {entry.what}: {count} of {len(entry.configs)} runs are there", flush=True)
    missing = [config for entry in entries for config in entry.configs if config not in there]
    missing = list(dict.fromkeys(missing))
    if options.list or not missing:
        return 0
    left = options.seconds - (time.monotonic() - BEGAN)
    summary = work_off(
        missing, options.out, seconds=left, reserve=options.reserve, fleet=options.fleet, device=options.device,
        data=options.data, small=options.small,
    )  # fmt: skip
    print(f"{len(summary.done)} runs done, {len(summary.failed)} failed, {summary.left} left", flush=True)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HoldfastError as error:
        sys.exit(f"error: {error}")
