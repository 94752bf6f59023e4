"""holdfast list and holdfast data: what there is, and where."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from holdfast import data as datasets
from holdfast.benchmarks import BENCHMARKS
from holdfast.cli.app import DataRoot, Json, Plugins, app, import_plugins
from holdfast.display import data_progress, output, table
from holdfast.experiments import EXPERIMENTS
from holdfast.learners import LEARNERS, method_names
from holdfast.methods import ALIASES, canonical
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS


@app.command("list")
def list_command(
    what: Annotated[str | None, typer.Argument(help="benchmarks, methods or experiments. Default: all.")] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show the benchmarks, methods and experiments there are."""
    import_plugins(plugin)
    kinds = {
        "benchmarks": {name: BENCHMARKS.describe(name) for name in BENCHMARKS},
        "methods": {name: _describe(name) for name in dict.fromkeys([*method_names(), *ALIASES])},
        "experiments": {name: EXPERIMENTS.describe(name) for name in EXPERIMENTS},
    }
    if what is not None and what not in kinds:
        raise unknown_name("list", what, list(kinds))
    also = {name: list(experiment.numbers) for name, experiment in EXPERIMENTS.items()}
    kinds = {kind: names for kind, names in kinds.items() if what in (None, kind)}
    if as_json:
        print(json.dumps({kind: [_entry(name, names[name], also) for name in names] for kind, names in kinds.items()}))
        return
    for kind, names in kinds.items():
        if kind == "experiments":
            rows = [(name, ", ".join(also[name]), EXPERIMENTS[name].title) for name in names]
            output.print(table(kind, ("name", "in the paper", "what it is"), rows, left=3))
        else:
            output.print(table(kind, ("name", "what it is"), list(names.items()), left=2))


def _entry(name: str, about: str, also: Mapping[str, Sequence[str]]) -> dict[str, object]:
    return {"name": name, "about": about} | ({"also": also[name]} if name in also else {})


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
    as_json: Json = False,
) -> None:
    """Show where each data set is, and fetch those named."""
    with data_progress():
        for name in names or []:
            datasets.fetch(name, data)
    found = {name: datasets.status(name, data, verify=name in (names or [])) for name in datasets.DATASETS}
    if as_json:
        states = {name: {**status._asdict(), "path": str(status.path)} for name, status in found.items()}
        print(json.dumps({"root": str(datasets.data_root(data)), "datasets": states}))
    else:
        rows = [(name, status.state, status.detail) for name, status in found.items()]
        output.print(table(f"data root: {datasets.data_root(data)}", ("data set", "state", "where"), rows, left=3))
    if any(found[name].state in ("missing", "damaged") for name in names or []):
        raise typer.Exit(1)
