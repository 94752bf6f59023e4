"""holdfast bench: how fast this machine is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from holdfast import bench
from holdfast.cli.app import DataRoot, Json, app
from holdfast.data import data_root
from holdfast.display import errors, output, table

__all__: list[str] = []


@app.command("bench")
def bench_command(
    data: DataRoot = None,
    tasks: Annotated[int, typer.Option(help="Tasks of the complete rot-mnist run.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """Measure this machine: steps per second, and a complete run against the floor of its matrix products."""
    with errors.status("a complete rot-mnist mse run beside its bare matrix products ..."):
        whole = bench.complete_run(root=data_root(data), tasks=tasks)
    with errors.status("steps per second ..."):
        rates = {m: bench.steps_per_second("rot-mnist", m, steps=1000) for m in ("sgd", "er", "mse", "simclr")}
    with errors.status("two runs side by side ..."):
        alone, together = bench.side_by_side()
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
