"""Seconds until an S-CIFAR-10 run has its full speed, by stages: with nothing compiled, and afterwards.

    python benchmarks/start.py > docs/bench-h200-start.json

Three processes, one after the other, on made-up images: mse with an empty folder for compiled code, mse once more, then
er. A stage ends when the device has done it; "of it" is a part of the stage behind it. On a machine where Python has
not compiled its own modules yet, call it twice: they count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STEPS = 20
"""So many, until a step repeats the graph that it will repeat from then on."""


def stages(method: str, device: str) -> dict[str, float]:
    """The seconds of each stage of this process."""
    found: dict[str, float] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        found[name] = round(time.perf_counter() - began, 3)

    with stage("import torch"):
        import torch
    with stage("import holdfast"):
        from holdfast import training
        from holdfast.bench import made_up
        from holdfast.config import RunConfig
        from holdfast.engine import prepare_cuda
        from holdfast.sweep.fleets import Member
    target = torch.device(device)
    with stage("CUDA context"):
        if device == "cuda":
            prepare_cuda()
        torch.zeros(1, device=target)
    with stage("data made up"):
        config = RunConfig.preset("seq-cifar10", method, buffer_size=200).change(epochs=10_000, tasks=1)
        data = made_up(config)
    evaluate = training.evaluate

    def tested(*arguments: Any) -> Any:
        """The test of the untrained network, timed."""
        training.evaluate = evaluate
        with stage("of it: untrained network tested"):
            return evaluate(*arguments)

    training.evaluate = tested
    member: Member | None = None
    for number in range(1, STEPS + 1):
        with stage(f"step {number}"):
            member = member or Member(config, data, target)
            member.step()
            if device == "cuda":
                torch.cuda.synchronize()
    return found


def timed(method: str, device: str, folder: str) -> dict[str, Any]:
    """What a process of its own finds; compiled code is kept in `folder`."""
    command = [sys.executable, __file__, "--stages", method, "--device", device]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | {"HOLDFAST_DATA": folder})
    found: dict[str, float] = json.loads(made.stdout)
    seconds = sum(time for name, time in found.items() if not name.startswith("of it"))
    imports = found["import torch"] + found["import holdfast"]
    return {"seconds": round(seconds, 2), "without_imports": round(seconds - imports, 2), "stages": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", metavar="METHOD", help="one process: its stages only")
    options = parser.parse_args()
    if options.stages:
        print(json.dumps(stages(options.stages, options.device)))
        return
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"cold": "mse", "warm": "mse", "other": "er"}
        print(json.dumps({kind: timed(method, options.device, folder) for kind, method in kinds.items()}, indent=1))


if __name__ == "__main__":
    main()
