"""holdfast bench: how fast this machine is."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast import bench
from holdfast.cli.app import DataRoot, Device, Json, app
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.display import errors, output, table, tell
from holdfast.errors import UsageError
from holdfast.registry import unknown_name

GPU_CASES = (
    ("rot-mnist", "mse"),
    ("seq-cifar10", "er"),
    ("seq-cifar10", "mse"),
    ("seq-cifar100", "mse"),
    ("seq-tinyimagenet", "mse"),
)
CPU_METHODS = ("sgd", "er", "mse", "simclr")


@app.command("bench")
def bench_command(
    device: Device = "auto",
    data: DataRoot = None,
    tasks: Annotated[int, typer.Option(help="Tasks of the complete rot-mnist run (CPU).", min=1)] = 20,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure this benchmark only (GPU); may be repeated.", metavar="BENCHMARK"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speed of this machine.

    On a CPU: a complete run, compared with the bare matrix products of its steps, and steps per second. On a GPU: steps
    per second of one run and of several at a time, compared with a large matrix product.
    """
    if choose_device(device).type == "cuda":
        _bench_gpu(only or [], as_json)
    elif only:
        raise UsageError("--only chooses among the benchmarks measured on a GPU; leave it out on a CPU.")
    else:
        _bench_cpu(data_root(data), tasks, as_json)


def _bench_cpu(root: Path, tasks: int, as_json: bool) -> None:
    with errors.status("a complete rot-mnist mse run, and its bare matrix products ..."):
        whole = bench.complete_run(root=root, tasks=tasks)
    with errors.status("steps per second ..."):
        rates = {method: bench.steps_per_second("rot-mnist", method, steps=1000) for method in CPU_METHODS}
    with errors.status("two runs at a time ..."):
        alone, together = bench.side_by_side()
    if as_json:
        beside = {"alone": alone, "two_at_once": together}
        print(json.dumps({"complete_run": whole.to_json(), "steps_per_second": rates, "side_by_side": beside}))
        return
    times = {
        "bare matrix products of its steps": whole.floor_seconds,
        "complete run": whole.seconds,
        "  training steps": whole.training,
        "  evaluation": whole.evaluation,
        "  making the tasks": whole.data,
        "  setup": whole.setup,
    }
    rows = [(name, seconds, seconds / whole.floor_seconds) for name, seconds in times.items()]
    output.print(table(f"rot-mnist mse, {whole.steps:,} steps, one thread", ("", "seconds", "x products"), rows))
    speeds = [(method, f"{rate:,.0f}") for method, rate in rates.items()]
    output.print(table("steps per second, rot-mnist", ("method", "steps/s"), speeds))
    tell(f"peak memory {whole.peak_memory_mb:,.0f} MB", output)
    tell(_beside(alone, together), output)


def _beside(alone: float, together: float) -> str:
    """How fast two runs at a time are, in words; the difference may have either sign."""
    change = round(100 * (together / alone - 1))
    compared = f"{abs(change)} % {'more' if change > 0 else 'less'} than" if change else "as many as"
    return f"two runs at a time: {together:,.0f} steps/s each, {compared} one alone ({alone:,.0f})"


def _bench_gpu(only: list[str], as_json: bool) -> None:
    known = list(dict.fromkeys(benchmark for benchmark, _ in GPU_CASES))
    if unknown := [name for name in only if name not in known]:
        raise unknown_name("benchmark measured here", unknown[0], known)
    rates: list[bench.DeviceRate] = []
    try:
        for benchmark, method in GPU_CASES:
            if not only or benchmark in only:
                with errors.status(f"{benchmark} {method}: compiling, then one run and several ..."):
                    rates.extend(bench.device_rates(benchmark, method))
    finally:  # a failure, or Ctrl-C, does not lose the numbers so far
        _show_rates(rates, as_json)


def _show_rates(rates: list[bench.DeviceRate], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"device_rates": [asdict(rate) for rate in rates]}))
        return
    columns = ("benchmark, method", "runs", "steps/s", "TFLOP/s", "% peak", "ready s", "MB/run")
    rows = []
    for rate in rates:
        speed, work = f"{rate.steps_per_second:,.0f}", (f"{rate.tflops:,.0f}", f"{100 * rate.peak_share:.1f}")
        costs = f"{rate.ready_seconds:.1f}", f"{rate.memory_mb:,.0f}"
        rows.append((f"{rate.benchmark} {rate.method}", rate.runs, speed, *work, *costs))
    output.print(table("runs at a time on one GPU", columns, rows))
    if rates:
        peaks = [rate.peak_tflops for rate in rates]
        tell(f"peak: a large bfloat16 matrix product, {min(peaks):,.0f} to {max(peaks):,.0f} TFLOP/s", output)
