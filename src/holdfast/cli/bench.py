"""holdfast bench: how fast this machine is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast import bench
from holdfast.cli.app import DataRoot, Device, Json, app
from holdfast.data import data_root
from holdfast.display import errors, output, table
from holdfast.errors import UsageError
from holdfast.registry import unknown_name
from holdfast.training import choose_device

__all__: list[str] = []


@app.command("bench")
def bench_command(
    device: Device = "auto",
    data: DataRoot = None,
    tasks: Annotated[int, typer.Option(help="Tasks of the complete rot-mnist run (CPU).", min=1)] = 20,
    only: Annotated[list[str] | None, typer.Option(help="Measure only this benchmark (GPU); repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: steps per second, against the floor of the bare matrix products."""
    if choose_device(device).type == "cuda":
        _bench_gpu(only or [], as_json)
    elif only:
        raise UsageError("--only chooses among what is measured on a GPU; leave it out on a CPU.")
    else:
        _bench_cpu(data_root(data), tasks, as_json)


def _bench_cpu(root: Path, tasks: int, as_json: bool) -> None:
    with errors.status("a complete rot-mnist mse run beside its bare matrix products ..."):
        whole = bench.complete_run(root=root, tasks=tasks)
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
    loss = 100 * (1 - together / alone)
    output.print(f"two runs at once: {together:,.0f} steps/s each, {loss:.0f} % less than alone")


GPU_CASES = (
    ("rot-mnist", "mse"),
    ("seq-cifar10", "er"),
    ("seq-cifar10", "mse"),
    ("seq-cifar100", "mse"),
    ("seq-tinyimagenet", "mse"),
)


def _bench_gpu(only: list[str], as_json: bool) -> None:
    known = list(dict.fromkeys(benchmark for benchmark, _ in GPU_CASES))
    for name in only:
        if name not in known:
            raise unknown_name("benchmark measured here", name, known)
    rates: list[bench.DeviceRate] = []
    try:
        for benchmark, method in GPU_CASES:
            if not only or benchmark in only:
                with errors.status(f"{benchmark} {method}: compiling, then alone and in fleets ..."):
                    for rate in bench.device_rates(benchmark, method):
                        rates.append(rate)
    finally:  # what has been measured is shown even if the rest fails or somebody has seen enough
        _show_rates(rates, as_json)


def _show_rates(rates: list[bench.DeviceRate], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"device_rates": [asdict(rate) for rate in rates]}))
        return
    columns = ("benchmark", "method", "runs", "steps/s", "TFLOP/s", "% of peak", "ready (s)", "MB a run")
    rows = [
        (r.benchmark, r.method, r.runs, r.steps_per_second, r.tflops, 100 * r.peak_share, r.ready_seconds, r.memory_mb)
        for r in rates
    ]
    output.print(table("runs together on one GPU", columns, rows, left=2))
