"""holdfast reproduce: a table or figure of the paper, our numbers beside the published ones."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast import data as datasets
from holdfast import experiments
from holdfast.analysis import CorruptedImages
from holdfast.benchmarks import required_data
from holdfast.cli.app import DataRoot, Device, Json, Plugins, app, import_plugins
from holdfast.cli.screen import SweepScreen
from holdfast.cli.verdicts import show_table
from holdfast.config import RunConfig
from holdfast.devices import choose_device, lacks_bfloat16
from holdfast.display import data_progress, errors, output, table, tell, tell_skipped
from holdfast.errors import DataError, HoldfastError, UsageError
from holdfast.experiments import Experiment, Results, Stored, Table, find_experiment, load_results
from holdfast.experiments.measures import unmeasured
from holdfast.registry import unknown_name
from holdfast.report import write_table_figures
from holdfast.report.tables import table_json
from holdfast.report.text import count, duration
from holdfast.sweep import Rates, Runner, SweepSummary, cores, forecast, local_runner, sweep
from holdfast.sweep.forecast import Forecast

ENGINES = ("local", "ray")
NAMED = 5
"""Skipped files and failed runs that are named one by one."""


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A name or the paper's number: see 'holdfast list experiments'.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Choose cells, e.g. method=er,buffer_size=200; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per cell, with seeds 0, 1, ...", min=1)] = len(experiments.SEEDS),
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. Default: one per core.", min=1)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; the same command continues.", min=0)
    ] = None,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to use. Default: a new one on this machine.", metavar="HOST:PORT")
    ] = None,
    out: Annotated[
        str,
        typer.Option(
            "--out", help="Folder for results, figures in it. With ray also an address: s3://...", metavar="DIR"
        ),
    ] = "runs",
    results: Annotated[
        list[Path] | None, typer.Option(help="A further folder of results to use; may be repeated.", metavar="DIR")
    ] = None,
    data: DataRoot = None,
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, how long, and which data is missing. Run nothing.")
    ] = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper.

    Runs that have no result yet are carried out. Then the table is shown with the published numbers, and the figure is
    written to the folder 'figures' of --out, as SVG and PNG, with its numbers as CSV.
    """
    import_plugins(plugin)
    experiment = find_experiment(name).select(only or [])
    if engine not in ENGINES:
        raise unknown_name("engine", engine, list(ENGINES))
    if address is not None and engine != "ray":
        raise UsageError("--address is for --engine ray.")
    for folder in results or []:
        if not folder.is_dir():
            raise UsageError(f"--results {folder} is not a folder.")
    configs = experiment.configs(range(seeds))
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with _folder_and_runner(out, engine, address, jobs, device, until) as (folder, runner):
        sources = (folder, *(results or []))
        there = load_results(*sources)
        tell_skipped(there.skipped, NAMED)
        missing = _missing_data(experiment, configs, there, data) if engine == "local" else {}
        if engine == "local":  # on a cluster, other machines compute
            _warn_of_bfloat16([config for config in configs if config not in there], device)
        if dry_run:
            _forecast(experiment, configs, there, jobs, device, missing, as_json=as_json)
            return
        _fetch(missing, data)
        summary = SweepSummary(there=configs)
        if not all(config in there for config in configs):
            options: dict[str, Any] = {"device": device, "data": data, "plugins": plugin or [], "until": until}
            with SweepScreen(experiment.name, configs, folder, there, Rates(there, device)) as screen:
                summary = sweep(configs, folder, runner=runner, there=there, watch=screen.watch, **options)
            there = load_results(*sources)
        if not summary.interrupted and not summary.out_of_time:
            _measure(unmeasured(experiment, configs, there), data, device)
        made = experiments.assess(experiment, there, range(seeds))
        figures: list[Path] = []
        try:
            figures += [] if "://" in out else _draw(made, folder)
        finally:  # a folder that cannot be written to does not hide the table
            tell_skipped(there.skipped[len(there.unread) :], NAMED)  # what was found damaged since
            _show(made, summary, figures, as_json)
    _conclude(summary)


def _warn_of_bfloat16(missing: list[RunConfig], device: str) -> None:
    """Say so if runs will be slower than any forecast knows."""
    slow = sum(config.precision == "bfloat16" for config in missing)
    if slow and lacks_bfloat16(choose_device(device)):
        tell(
            f"this processor has no instructions for bfloat16, in which {count(slow, 'run')} would compute: a step of "
            "a ResNet may take ten times as long as elsewhere"
        )


def _measure(runs: list[Stored], data: Path | None, device: str) -> None:
    """Test finished runs on corrupted images."""
    corrupted = CorruptedImages()
    for run in runs:
        with errors.status(f"{run.config.title}: corruptions ..."):
            experiments.measure_robustness(run, data=data, device=device, made=corrupted)


def _show(made: Table, summary: SweepSummary, figures: list[Path], as_json: bool) -> None:
    if as_json:
        counts = {"done": len(summary.done), "there": len(summary.there), "failed": len(summary.failed)}
        told = {**table_json(made), "runs": {**counts, "left": summary.left}, "figures": list(map(str, figures))}
        print(json.dumps(told))
    else:
        show_table(made)
    if figures:
        tell(f"figures: {', '.join(path.name for path in figures)} in {figures[0].parent}")


def _draw(made: Table, folder: Path) -> list[Path]:
    """The paper's figure as files, in a folder named after the experiment; nothing without results."""
    if made.count("missing") == len(made.verdicts):
        return []
    with errors.status("figures ..."):
        return write_table_figures(made, folder / "figures" / made.experiment.name)


def _missing_data(
    experiment: Experiment, configs: list[RunConfig], there: Results, data: Path | None
) -> dict[str, list[str]]:
    """Data sets that are not there and would be needed, each with the benchmarks that read it."""
    wanted = [config for config in configs if config not in there]
    wanted += [stored.config for stored in unmeasured(experiment, configs, there)]
    found: dict[str, list[str]] = {}
    for benchmark in dict.fromkeys(config.benchmark for config in wanted):
        for name in required_data(benchmark):
            found.setdefault(name, []).append(benchmark)
    absent = [name for name in found if datasets.status(name, data).state in ("missing", "damaged")]
    return {name: found[name] for name in absent}


def _fetch(missing: dict[str, list[str]], data: Path | None) -> None:
    """Fetch what is missing before the first run. What cannot be had is told once, all of it."""
    failed = {}
    with data_progress():
        for name in missing:
            try:
                datasets.fetch(name, data)
            except HoldfastError as error:
                failed[name] = error
    if failed:
        users = dict.fromkeys(user for name in failed for user in missing[name])
        raise DataError(
            f"nothing was run, as data is missing for {', '.join(users)}. "
            + " ".join(f"{name}: {error}" for name, error in failed.items())
            + " To run the rest, choose its benchmarks with --only benchmark=NAME."
        )


@contextmanager
def _folder_and_runner(
    out: str, engine: str, address: str | None, jobs: int | None, device: str, until: float | None
) -> Iterator[tuple[Path, Runner]]:
    """The folder that results are read from, and what carries out runs."""
    if engine == "local":
        if "://" in out:
            raise UsageError("--out can be an address only with --engine ray.")
        yield Path(out), local_runner(device, jobs, until)
        return
    from holdfast.sweep.cluster import RayRunner
    from holdfast.sweep.remote import Remote

    if "://" not in out:
        yield Path(out), RayRunner(address, jobs=jobs, device=device)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-") as mirror:
        remote = Remote(out, Path(mirror))
        remote.fetch()
        yield Path(mirror), RayRunner(address, jobs=jobs, device=device, remote=remote)


def _forecast(
    experiment: Experiment,
    configs: list[RunConfig],
    there: Results,
    jobs: int | None,
    device: str,
    missing: dict[str, list[str]],
    *,
    as_json: bool,
) -> None:
    """Show what would run, what is there, how long it would take, and which data would be fetched first."""
    # How many runs a GPU takes is found by trying. One at a time is the longest it can take.
    at_once = jobs or (cores() if choose_device(device).type == "cpu" else 1)
    benchmarks = dict.fromkeys(config.benchmark for config in configs)
    parts = {name: [config for config in configs if config.benchmark == name] for name in benchmarks}
    rows, plans = [], dict[str, dict[str, Any]]()
    for name, wanted in {**(parts if len(parts) > 1 else {}), "all": configs}.items():
        left = [config for config in wanted if config not in there]
        told = forecast(left, there, jobs=at_once, device=device)
        found, lacking = len(wanted) - len(left), [each for each in missing if name in ("all", *missing[each])]
        state = "missing" if lacking else "there"  # which are missing is told below
        rows.append((name, len(wanted), found, len(left), _span(told, left), state))
        plans[name] = {"runs": len(wanted), "there": found, "to_run": len(left), "seconds": told.seconds}
        plans[name] |= {"not_measured": len(told.unknown), "missing_data": lacking}
    if as_json:
        print(json.dumps({"experiment": experiment.name, "at_once": at_once, "plan": plans}))
        return
    columns = ("benchmark", "runs", "there", "to run", f"time, {at_once} at once", "data")
    output.print(table(f"{experiment.name}: {experiment.title}", columns, rows))
    for name, users in missing.items():
        tell(f"missing: {name} (for {', '.join(users)}); 'holdfast data {name}' fetches it, and so does the first run")


def _span(told: Forecast, left: list[RunConfig]) -> str:
    if not left:
        return "nothing to do"
    if len(told.unknown) == len(left):
        return "not known"
    guess = "about " if told.guessed else ""
    return guess + duration(told.seconds) + (f" + {len(told.unknown)} runs not known" if told.unknown else "")


def _conclude(summary: SweepSummary) -> None:
    """Say how the sweep ended, and exit with the code for it."""
    for config, error in list(summary.failed.items())[:NAMED]:
        tell(f"failed: {config.title}: {error}")
    parts = [f"{len(summary.done)} runs done", f"{len(summary.there)} were there"]
    parts += [f"{len(summary.failed)} failed (see failed/ in the folder of results)"] if summary.failed else []
    parts += [f"{summary.left} left; the same command continues"] if summary.left else []
    tell(", ".join(parts))
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.failed or (summary.left and not summary.out_of_time):
        raise typer.Exit(1)
