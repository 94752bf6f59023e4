"""holdfast list and holdfast data: what there is, and where."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import data as datasets
from holdfast.benchmarks import BENCHMARKS
from holdfast.cli.app import DataRoot, Plugins, app, import_plugins
from holdfast.display import data_progress, output, table
from holdfast.experiments import EXPERIMENTS
from holdfast.learners import LEARNERS, method_names
from holdfast.methods import ALIASES, canonical
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS

__all__: list[str] = []


@app.command("list")
def list_command(
    what: Annotated[str | None, typer.Argument(help="benchmarks, methods or experiments. Default: all.")] = None,
    plugin: Plugins = None,
) -> None:
    """Show the benchmarks, methods and experiments there are."""
    import_plugins(plugin)
    kinds = {
        "benchmarks": [(name, BENCHMARKS.describe(name)) for name in BENCHMARKS],
        "methods": [(name, _describe(name)) for name in dict.fromkeys([*method_names(), *ALIASES])],
        "experiments": [(name, EXPERIMENTS.describe(name)) for name in EXPERIMENTS],
    }
    if what is not None and what not in kinds:
        raise unknown_name("list", what, list(kinds))
    for kind, rows in kinds.items():
        if what in (None, kind):
            output.print(table(kind, ("name", "what it is"), rows, left=2))


def _describe(method: str) -> str:
    if (name := canonical(method)) != method:
        return f"another name for {name}"
    return LEARNERS.describe(method) if method in LEARNERS else f"er + consistency: {REGULARIZERS.describe(method)}"


@app.command("data")
def data_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets to fetch and verify. Default: none.", metavar="NAME")
    ] = None,
    data: DataRoot = None,
) -> None:
    """Show where each data set is, and fetch those named."""
    with data_progress():
        for name in names or []:
            datasets.fetch(name, data)
    found = {name: datasets.status(name, data, verify=name in (names or [])) for name in datasets.DATASETS}
    rows = [(name, status.state, status.detail) for name, status in found.items()]
    output.print(table(f"data root: {datasets.data_root(data)}", ("data set", "state", "where"), rows, left=3))
    if any(found[name].state in ("missing", "damaged") for name in names or []):
        raise typer.Exit(1)
