"""Steps per second of runs on one GPU, as members of one process or spread over several.

    python benchmarks/processes.py
    python benchmarks/processes.py --method er --layouts 1x4 2x3 4x2

A layout such as 2x3 is two processes with three runs each, on made-up images of S-CIFAR-10's shape. Kernels of several
processes run at the same time only under NVIDIA's MPS, whose server is started for this measurement and stopped after
it. All processes and runs are ready before the first layout is timed. The layouts take turns, --rounds times; what is
printed, as JSON, is the rate of all runs together in each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

BEHIND = 20
"""Steps of a run that a process may be ahead of the device."""


class Layout(NamedTuple):
    """So many processes with so many runs each."""

    processes: int
    runs: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        try:
            made = cls(*(int(part) for part in text.split("x")))
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(f"{text} is no layout such as 2x3") from None
        if min(made) < 1:
            raise argparse.ArgumentTypeError(f"{text} has no runs")
        return made

    def __str__(self) -> str:
        return f"{self.processes}x{self.runs}"


@contextmanager
def mps() -> Iterator[bool]:
    """Inside the block, new processes share the GPU through an MPS server, where there is one to start."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], check=True)
        try:
            yield True
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False)


def work(method: str, runs: int, device: str, orders: Connection) -> None:
    """A process: makes its runs, then steps as many of them as it is asked to, for as long as it is asked to."""
    import torch

    from holdfast.bench import made_up
    from holdfast.config import RunConfig
    from holdfast.sweep.fleets import Member

    target = torch.device(device)
    config = RunConfig.preset("seq-cifar10", method, buffer_size=200).change(epochs=10_000, tasks=1)
    if device == "cpu":
        config = RunConfig.preset("rot-mnist", method, buffer_size=200).change(epochs=10_000, tasks=1)
    data = made_up(config)
    members = [Member(config.change(seed=seed), data, target) for seed in range(runs)]
    for _ in range(40):  # fills the buffers, compiles, captures
        for member in members:
            member.step()
    orders.send(None)
    while (order := orders.recv()) is not None:
        count, begin, end = order
        orders.send(timed(members[:count], begin, end, target))


def timed(members: list, begin: float, end: float, device) -> int:
    """How many steps these runs make between two moments of time.time()."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    steps = 0
    time.sleep(max(0.0, begin - time.time()))
    while time.time() < end:
        for _ in range(BEHIND):
            for member in members:
                member.step()
        wait()
        steps += BEHIND * len(members)
    return steps


def rate(layout: Layout, crew: list[Connection], seconds: float) -> float:
    """Steps per second of all runs of a layout together."""
    begin = time.time() + 0.5
    for orders in crew[: layout.processes]:
        orders.send((layout.runs, begin, begin + seconds))
    steps = sum(orders.recv() for orders in crew[: layout.processes])
    return steps / (time.time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [Layout.parse(each) for each in ("1x4", "1x6", "2x2", "2x3", "3x2", "4x1", "4x2")]
    parser.add_argument("--layouts", nargs="+", type=Layout.parse, default=usual)
    parser.add_argument("--method", default="mse")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a layout is timed in each turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    context, crew = get_context("spawn"), []
    with mps() as shared:
        for number in range(max(layout.processes for layout in options.layouts)):
            mine, theirs = context.Pipe()
            runs = max(layout.runs for layout in options.layouts if layout.processes > number)
            context.Process(target=work, args=(options.method, runs, options.device, theirs), daemon=True).start()
            crew.append(mine)
        for orders in crew:
            orders.recv()
        print("all runs are ready", file=sys.stderr, flush=True)
        rates: dict[str, list[float]] = {str(layout): [] for layout in options.layouts}
        for _ in range(options.rounds):
            for layout in options.layouts:
                rates[str(layout)].append(round(rate(layout, crew, options.seconds), 1))
                print(f"{layout}: {rates[str(layout)][-1]} steps/s", file=sys.stderr, flush=True)
        for orders in crew:
            orders.send(None)
    print(json.dumps({"method": options.method, "mps": shared, "steps_per_second": rates}, indent=1))


if __name__ == "__main__":
    main()
