"""Short runs of benchmarks/beyond.py with few training images (train_limit), tested on all those that were left out.

    python benchmarks/held_out.py --data data beyond/* > results/beyond/hundred.jsonl

A run with a tenth of so few images held out is tested on a hundred of each task, and chance moves that by points. The
images beyond its limit were never seen either, and there are thousands. A line of JSON per finished run in the folders,
the best first. The test set is not used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from holdfast import results
from holdfast.analysis.runs import final_model
from holdfast.benchmarks import make_benchmark
from holdfast.data import data_root
from holdfast.devices import choose_device, cpu_threads
from holdfast.errors import HoldfastError, UsageError
from holdfast.evaluation import Exam, evaluate

sys.path.insert(0, str(Path(__file__).resolve().parent))
import beyond  # registers the learner and the narrow network  # noqa: F401


def held_out(folder: Path, root: Path, device: torch.device) -> dict[str, Any]:
    """The accuracies of a run on the training images that it left out, in percent."""
    run = results.read(folder)
    config = run.config
    if config.train_limit is None:
        raise UsageError(f"{folder} left no image out: give runs with train_limit.")
    whole = make_benchmark(config.change(train_limit=None, validation=0.0), root, device)
    exams = []
    for task in whole.tasks:
        left_out = task.train().select(slice(config.train_limit, None))
        exams.append(Exam.of(left_out, task.classes, whole.classes, device))
    network, _ = final_model(folder, config, results.read_tensors(folder, results.WEIGHTS), root)
    tested = evaluate(network.to(device), exams, whole.normalize, config.precision)
    return {
        "benchmark": config.benchmark,
        "network": config.model,
        "epochs": config.epochs,
        "buffer_size": config.buffer_size,
        "train_limit": config.train_limit,
        "seed": config.seed,
        "accuracy": round(fmean(tested.class_il), 3),
        "task_il": round(fmean(tested.task_il), 3),
        "last": [round(each, 2) for each in tested.class_il],
        "images": sum(len(exam.images.labels) for exam in exams),
        "settings": dict(config.settings),
        "fingerprint": config.fingerprint,
        "device": run.environment["device"],
        "precision": config.precision,
        "commit": run.environment["commit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="result folders with weights")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device, root = choose_device(options.device), data_root(options.data)
    folders = [folder for folder in options.runs if (folder / results.WEIGHTS).exists()]
    if not folders:
        raise UsageError("none of these folders holds a finished run with weights.")
    with cpu_threads(1):  # these networks are small
        rows = [held_out(each, root, device) for each in folders]
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    try:
        main()
    except HoldfastError as error:
        raise SystemExit(f"error: {error}") from error
