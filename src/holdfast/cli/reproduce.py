"""holdfast reproduce: a table or figure of the paper, our numbers beside the published ones."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast import experiments
from holdfast.cli.app import DataRoot, Device, Jobs, Json, Plugins, app, import_plugins
from holdfast.cli.screen import SweepScreen
from holdfast.cli.verdicts import show_table
from holdfast.display import data_progress, errors, output, table, tell, tell_skipped
from holdfast.errors import UsageError
from holdfast.experiments import Experiment, Results, Table, find_experiment, load_results
from holdfast.experiments.measures import measure_missing
from holdfast.report import write_table_figures
from holdfast.report.tables import table_json
from holdfast.report.text import count, duration
from holdfast.sweep import Plan, Rates, Runner, SweepSummary, fetch_missing, make_plan, open_engine, sweep
from holdfast.sweep.plan import Part

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
    seeds: Annotated[int, typer.Option(help="Runs per cell, with seeds 0, 1, ...; the paper has 3.", min=1)] = len(
        experiments.SEEDS
    ),
    jobs: Jobs = None,
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
    for folder in results or []:
        if not folder.is_dir():
            raise UsageError(f"--results {folder} is not a folder.")
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with open_engine(engine, out, address=address, jobs=jobs, device=device, until=until) as (folder, runner):
        sources = (folder, *(results or []))
        there = load_results(*sources)
        tell_skipped(there.skipped, NAMED)
        here = engine == "local"  # on a cluster, other machines compute
        plan = make_plan(experiment, range(seeds), there, jobs=jobs, device=device, data=data, here=here)
        _tell_slow(plan)
        if dry_run:
            _show_plan(plan, as_json)
            return
        with data_progress():
            fetch_missing(plan, data)
        where: dict[str, Any] = {"data": data, "device": device}
        summary = _carry_out(plan, folder, runner, plugins=plugin or [], until=until, **where)
        there = load_results(*sources) if plan.missing else there
        if not summary.stopped:
            _measure(plan, there, **where)
        made = experiments.assess(experiment, there, range(seeds))
        figures: list[Path] = []
        try:
            figures += [] if "://" in out else _draw(made, folder)
        finally:  # a folder that cannot be written to does not hide the table
            tell_skipped(there.skipped[len(there.unread) :], NAMED)  # what was found damaged since
            _show(made, summary, figures, as_json)
        _tell_further_seeds(experiment, there, seeds)
    _conclude(summary)


def _tell_slow(plan: Plan) -> None:
    """Say so if runs will be slower than any forecast knows."""
    if plan.slow:
        tell(
            f"this processor has no instructions for bfloat16, in which {count(len(plan.slow), 'run')} would compute: "
            "a step of a ResNet may take ten times as long as elsewhere"
        )


def _span(part: Part) -> str:
    seconds, unknown, guessed = part.time
    if not part.to_run:
        return "nothing to do"
    if len(unknown) == part.to_run:
        return "not known"
    guess = "about " if guessed else ""
    return guess + duration(seconds) + (f" + {count(len(unknown), 'run')} not known" if unknown else "")


def _show_plan(plan: Plan, as_json: bool) -> None:
    """Show what would run, what is there, how long it would take, and which data would be fetched first."""
    if as_json:
        print(json.dumps(plan.to_json()))
        return
    columns = ("benchmark", "runs", "there", "to run", f"time, {plan.at_once} at once", "data")
    rows = [
        # Which data are missing is told below.
        (name, part.runs, part.there, part.to_run, _span(part), "missing" if part.missing_data else "there")
        for name, part in plan.parts.items()
    ]
    output.print(table(f"{plan.experiment.name}: {plan.experiment.title}", columns, rows))
    for name, readers in plan.missing_data.items():
        tell(
            f"missing: {name} (for {', '.join(readers)}); 'holdfast data {name}' fetches it, and so does the first run"
        )


def _carry_out(plan: Plan, folder: Path, runner: Runner, device: str, **options: Any) -> SweepSummary:
    """Carry out the runs that are missing, and show how they get on."""
    if not plan.missing:
        return SweepSummary(there=plan.configs)  # the folder may be one that cannot be written to
    with SweepScreen(plan.experiment.name, plan.missing, folder, Rates(plan.there, device)) as screen:
        return sweep(
            plan.configs, folder, runner=runner, there=plan.there, watch=screen.watch, device=device, **options
        )


def _measure(plan: Plan, there: Results, **where: Any) -> None:
    """Test the final networks on corrupted images, where the experiment asks for that."""
    with errors.status("corruptions ...") as status:
        measure_missing(
            plan.experiment,
            plan.configs,
            there,
            watch=lambda run: status.update(f"{run.config.title}: corruptions ..."),
            **where,
        )


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


def _tell_further_seeds(experiment: Experiment, there: Results, shown: int) -> None:
    """Say so if there are results of more seeds than the table shows."""
    last = max((seed for cell in experiment.cells for seed in there.seeds_of(cell.config)), default=0)
    if last >= shown:
        tell(f"results of further seeds are there: --seeds {last + 1} shows them, and runs those that are missing")


def _conclude(summary: SweepSummary) -> None:
    """Say how the sweep ended, and exit with the code for it."""
    for config, error in list(summary.failed.items())[:NAMED]:
        tell(f"failed: {config.title}: {error}")
    parts = [f"{count(len(summary.done), 'run')} done", f"{len(summary.there)} were there"]
    parts += [f"{len(summary.failed)} failed (see failed/ in the folder of results)"] if summary.failed else []
    parts += [f"{summary.left} left; the same command continues"] if summary.left else []
    tell(", ".join(parts))
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.failed or (summary.left and not summary.out_of_time):
        raise typer.Exit(1)
