"""One look at an image or four: what runs of ballast with looks=angles would have scored with either.

    python benchmarks/looks.py --data data runs/* > results/beyond/looks.jsonl

Each folder is a finished run with its weights. Its network is tested twice: as it answers by itself, with the mean over
four right angles, and with its average alone, which looks once. Training does not depend on how a network is tested, so
the latter is what the same run without looks=angles ends with. A line of JSON per run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from holdfast import results
from holdfast.analysis.runs import final_model
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.errors import HoldfastError, UsageError
from holdfast.evaluation import Exam, evaluate
from holdfast.learners.turned import AtAllAngles


def both(folder: Path, root: Path, device: torch.device) -> dict[str, Any]:
    """The accuracies of a run with four looks and with one, in percent."""
    run = results.read(folder)
    model, benchmark = final_model(folder, run.config, results.read_tensors(folder, results.WEIGHTS), root)
    if not isinstance(model, AtAllAngles):
        raise UsageError(f"{folder} looks once: give runs of ballast with looks=angles.")
    exams = [Exam.of(task.test, task.classes, benchmark.classes, device) for task in benchmark.tasks]
    found: dict[str, Any] = {}
    for looks, network in (("angles", model), ("once", model.network)):
        network = network.to(device, memory_format=torch.channels_last)
        tested = evaluate(network, exams, benchmark.normalize, run.config.precision)
        found[looks] = {
            "accuracy": fmean(tested.class_il),
            "task_il_accuracy": fmean(tested.task_il),
            "tasks": tested.class_il,
        }
    config = run.config
    about = {"benchmark": config.benchmark, "buffer_size": config.buffer_size, "seed": config.seed}
    return about | {"fingerprint": config.fingerprint, "settings": dict(config.settings)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="result folders with weights")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    for folder in options.runs:
        print(json.dumps(both(folder, data_root(options.data), choose_device(options.device))), flush=True)


if __name__ == "__main__":
    try:
        main()
    except HoldfastError as error:
        raise SystemExit(f"error: {error}") from error
