"""holdfast run: one run, and its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from holdfast import checkpoint, results
from holdfast import data as datasets
from holdfast.benchmarks import BENCHMARKS, build
from holdfast.cli.app import DataRoot, Device, Json, Out, Plugins, Seed, app, import_plugins
from holdfast.config import RunConfig
from holdfast.display import RunDisplay, data_progress, errors, output, table
from holdfast.learners import method_names
from holdfast.registry import unknown_name
from holdfast.training import choose_device, run

__all__: list[str] = []


@app.command("run")
def run_command(
    benchmark: Annotated[str, typer.Argument(help="A benchmark; see 'holdfast list benchmarks'.")],
    method: Annotated[str, typer.Argument(help="A method; see 'holdfast list methods'.")],
    buffer_size: Annotated[int, typer.Option(help="Samples the buffer holds.")] = 200,
    seed: Seed = 0,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs per task.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value, any setting; repeatable.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default 1 for the MLP.", min=1)] = None,
    data: DataRoot = None,
    out: Out = Path("runs"),
    force: Annotated[bool, typer.Option(help="Run even if the result is there already.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep checkpoints in OUT/checkpoints, and continue from one.")
    ] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 60.0,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Train one method on one benchmark and keep the result."""
    import_plugins(plugin)
    BENCHMARKS[benchmark]
    if method not in method_names():
        raise unknown_name("method", method, method_names())
    given = {"tasks": tasks, "epochs": epochs, "precision": precision}
    changes = {key: value for key, value in given.items() if value is not None}
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size, seed=seed, **changes).parse(set_ or [])
    target = choose_device(device)
    results.check_writable(out)
    found = None if force else results.find(out, config)
    kept = out / "checkpoints" / f"{config.fingerprint}.safetensors" if resume else None
    if found is None:
        if kept is not None and kept.exists():
            errors.print(f"continuing from {kept}", highlight=False)
        with data_progress():
            stream = build(config, datasets.data_root(data), target)
        try:
            with RunDisplay() as display:
                found = run(
                    config,
                    stream,
                    device=device,
                    threads=threads,
                    on_step=display.watch(config.title),
                    checkpoint=kept,
                    every=checkpoint_every,
                )
        except KeyboardInterrupt as stop:
            errors.print(escape(str(stop) or "stopped."), highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None
        folder = results.save(found, out)
        errors.print(f"saved to {folder}", highlight=False)
    else:
        errors.print(f"already in {out / config.fingerprint}; --force runs it again", highlight=False)
    if kept is not None:
        checkpoint.discard(kept)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        output.print(_summary(found))


def _summary(result: results.RunResult) -> Table:
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
