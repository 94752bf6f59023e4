"""The command line: parses, calls, prints."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import holdfast
from holdfast import bench as benching
from holdfast import data as datasets
from holdfast import demo as demonstration
from holdfast import results
from holdfast.benchmarks import BENCHMARKS, build
from holdfast.config import RunConfig
from holdfast.display import RunDisplay, data_progress, errors, output, table
from holdfast.errors import HoldfastError
from holdfast.learners import LEARNERS, method_names
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS
from holdfast.training import choose_device, run

__all__ = ["app", "main"]

app = typer.Typer(
    help="Networks that keep what they learned: experience replay with consistency regularization.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

DataRoot = Annotated[Path | None, typer.Option("--data", help="Data root; else $HOLDFAST_DATA, else the user's cache.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]


@app.command("run")
def run_command(
    benchmark: Annotated[str, typer.Argument(help="A benchmark; see 'holdfast list benchmarks'.")],
    method: Annotated[str, typer.Argument(help="A method; see 'holdfast list methods'.")],
    buffer_size: Annotated[int, typer.Option(help="Samples the buffer holds.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides everything random.")] = 0,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs per task.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, any setting; repeatable.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default 1 for the MLP.")] = None,
    data: DataRoot = None,
    out: Out = Path("runs"),
    force: Annotated[bool, typer.Option(help="Run even if the result is there already.")] = False,
    plugin: Annotated[list[str] | None, typer.Option(help="Python module that registers things; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Train one method on one benchmark and keep the result."""
    _import_plugins(plugin or [])
    BENCHMARKS[benchmark]
    if method not in method_names():
        raise unknown_name("method", method, method_names())
    given = {"tasks": tasks, "epochs": epochs, "precision": precision}
    changes = {key: value for key, value in given.items() if value is not None}
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size, seed=seed, **changes).parse(set_ or [])
    choose_device(device)
    results.check_writable(out)
    found = None if force else results.find(out, config)
    if found is None:
        with data_progress():
            tasks_to_learn = build(config, datasets.data_root(data))
        with RunDisplay() as display:
            found = run(config, tasks_to_learn, device=device, threads=threads, on_step=display.watch(config.title))
        folder = results.save(found, out)
        errors.print(f"saved to {folder}", highlight=False)
    else:
        errors.print(f"already in {out / config.fingerprint}; --force runs it again", highlight=False)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        output.print(_summary(found))


def _summary(result: results.RunResult) -> object:
    rows = [
        ("accuracy (%)", result.accuracy),
        ("Task-IL accuracy (%)", result.task_il_accuracy),
        ("forward transfer", result.forward_transfer),
        ("backward transfer", result.backward_transfer),
        ("forgetting", result.forgetting),
        ("steps/s", result.timing["steps_per_second"]),
        ("seconds", result.seconds),
    ]
    return table(result.config.title, ("", ""), rows)


@app.command("demo")
def demo_command(
    out: Out = Path("holdfast-demo"),
    seed: Annotated[int, typer.Option(help="Decides everything random.")] = 0,
    tasks: Annotated[int, typer.Option(help="Number of tasks.")] = 10,
    train_limit: Annotated[int, typer.Option(help="Training images per task.")] = 25_600,
) -> None:
    """Compare four methods on a short stream of turning digits, in about a minute."""
    results.check_writable(out)
    errors.print(f"{tasks} tasks, each MNIST turned by another angle; the network sees each once.", highlight=False)
    finished = []
    with RunDisplay() as display:
        for config in demonstration.configs(tasks=tasks, train_limit=train_limit, seed=seed):
            result = run(config, device="cpu", on_step=display.watch(f"{config.method:>4}"))
            results.save(result, out)
            finished.append(result)
    rows = [
        (r.config.method, r.accuracy, float(r.matrix[-1, 0]), r.forgetting, r.timing["steps_per_second"], r.seconds)
        for r in finished
    ]
    columns = ("method", "all tasks (%)", "first task (%)", "forgetting", "steps/s", "seconds")
    output.print(table("Accuracy after the last task", columns, rows))
    output.print("sgd forgets; er replays 200 stored samples; l2 and mse also keep its answers on them consistent.")
    picture = demonstration.draw(finished, out)
    output.print(f"picture: {picture}", highlight=False)


@app.command("list")
def list_command(
    what: Annotated[str | None, typer.Argument(help="benchmarks or methods; both if left out.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="Python module that registers things; repeatable.")] = None,
) -> None:
    """Show what there is."""
    _import_plugins(plugin or [])
    kinds = {
        "benchmarks": [(name, BENCHMARKS.describe(name)) for name in BENCHMARKS],
        "methods": [(name, _describe(name)) for name in method_names()],
    }
    if what is not None and what not in kinds:
        raise unknown_name("list", what, list(kinds))
    for kind, rows in kinds.items():
        if what in (None, kind):
            output.print(table(kind, ("name", "what it is"), rows, left=2))


def _describe(method: str) -> str:
    return LEARNERS.describe(method) if method in LEARNERS else f"er + consistency: {REGULARIZERS.describe(method)}"


@app.command("data")
def data_command(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets to fetch and verify; none only shows.")] = None,
    data: DataRoot = None,
) -> None:
    """Show where each data set is; fetch and verify those named."""
    with data_progress():
        for name in names or []:
            datasets.fetch(name, data)
    found = {name: datasets.status(name, data, verify=name in (names or [])) for name in datasets.DATASETS}
    rows = [(name, status.state, status.detail) for name, status in found.items()]
    output.print(table(f"data root: {datasets.data_root(data)}", ("data set", "state", "where"), rows, left=3))
    if any(found[name].state in ("missing", "damaged") for name in names or []):
        raise typer.Exit(1)


@app.command("bench")
def bench_command(
    data: DataRoot = None,
    tasks: Annotated[int, typer.Option(help="Tasks of the complete rot-mnist run.")] = 20,
    as_json: Json = False,
) -> None:
    """Measure this machine: steps per second, and a complete run against the floor of its matrix products."""
    with errors.status("a complete rot-mnist mse run beside its bare matrix products ..."):
        whole = benching.complete_run(root=datasets.data_root(data), tasks=tasks)
    with errors.status("steps per second ..."):
        rates = {m: benching.steps_per_second("rot-mnist", m, steps=1000) for m in ("sgd", "er", "mse", "simclr")}
    with errors.status("two runs side by side ..."):
        alone, together = benching.side_by_side()
    if as_json:
        beside = {"alone": alone, "two_at_once": together}
        print(json.dumps({"complete_run": whole.to_json(), "steps_per_second": rates, "side_by_side": beside}))
        return
    rows = [
        ("the bare matrix products of its steps", whole.floor_seconds, 1.0),
        ("complete run", whole.seconds, whole.ratio),
        ("  training steps", whole.training, whole.training / whole.floor_seconds),
        ("  evaluation", whole.evaluation, whole.evaluation / whole.floor_seconds),
        ("  making the tasks", whole.data, whole.data / whole.floor_seconds),
        ("  setup", whole.setup, whole.setup / whole.floor_seconds),
    ]
    output.print(table(f"rot-mnist mse, {whole.steps:,} steps, one thread", ("", "seconds", "x floor"), rows))
    output.print(table("steps per second, rot-mnist", ("method", "steps/s"), list(rates.items())))
    output.print(f"peak memory {whole.peak_memory_mb:,.0f} MB")
    output.print(
        f"two runs at once: {together:,.0f} steps/s each, {100 * (1 - together / alone):.0f} % less than alone"
    )


def _import_plugins(names: list[str]) -> None:
    """Import modules that register regularizers, learners or benchmarks; the current folder counts."""
    sys.path.insert(0, "")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise HoldfastError(f"plugin '{name}' could not be imported: {error}.") from error


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(holdfast.__version__)
        raise typer.Exit


def main() -> None:
    """The `holdfast` command: errors become one sentence and an exit code."""
    try:
        app()
    except HoldfastError as error:
        errors.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("stopped.")
        sys.exit(130)
