"""Complete runs of fifty epochs, small enough for a CPU, with accuracy read after each of the last ten steps.

    python benchmarks/long_runs.py --data data --method linf mse --seeds 200 201 > holdfast.jsonl

S-CIFAR-10 with an eighth of the channels and the first 500 images of each task, in float32 on one thread: what a
program without Holdfast is compared with in results/second-opinion. A line of JSON per run, when it has ended.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from holdfast.benchmarks import make_benchmark
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import cpu_threads
from holdfast.evaluation import Accuracies, Exam, evaluate
from holdfast.learners import settings_for
from holdfast.models import MODELS, ResNet18
from holdfast.run_state import RunState
from holdfast.training import train

WIDTH, IMAGES, TAIL = 8, 500, 10
MODELS.register("narrow", "resnet18 with an eighth of the channels, for CPUs")(partial(ResNet18, width=WIDTH))


class Onlooker:
    """Stands in for a checkpointer, as that is shown the state of a run; saves nothing."""

    def resume(self, state: RunState) -> bool:
        self.state = state
        return False

    def due(self) -> bool:
        return False


def long_run(config: RunConfig, root: Path) -> dict[str, Any]:
    """Carries out the run; accuracies in percent over all tasks."""
    cpu = torch.device("cpu")
    benchmark, onlooker = make_benchmark(config, root), Onlooker()
    exams = [Exam(task.test, _mask(task.classes, benchmark.classes)) for task in benchmark.tasks]
    steps = len(benchmark.tasks) * config.epochs * -(-config.train_limit // config.batch_size)
    read: dict[int, Accuracies] = {}
    running = train(config, benchmark, cpu, onlooker)  # type: ignore[arg-type]
    while True:
        try:
            step = next(running).step
        except StopIteration as end:
            result = end.value
            break
        if step > steps - TAIL and step not in read:  # the end of a task is reported as well, with no new step
            network = onlooker.state.engine.learner.evaluated()
            read[step] = evaluate(network, exams, benchmark.normalize)
    assert len(read) == TAIL, f"read {len(read)} steps"
    tail = [fmean(each.class_il) for each in read.values()]
    assert abs(tail[-1] - result.accuracy) < 1e-9, f"{tail[-1]} and {result.accuracy}"
    return {
        "code": "holdfast",
        "method": config.method,
        "buffer_size": config.buffer_size,
        "replay_size": config.replay_size,
        "seed": config.seed,
        "epochs": config.epochs,
        "width": WIDTH,
        "images": config.train_limit,
        "accuracy": round(result.accuracy, 3),
        "task_il_accuracy": round(result.task_il_accuracy, 3),
        "mean_of_last_10_steps": round(fmean(tail), 3),
        "fingerprint": config.fingerprint,
        "seconds": round(result.seconds),
    }


def _mask(classes: tuple[int, ...], outputs: int) -> torch.Tensor:
    """Which outputs belong to a task."""
    mask = torch.zeros(outputs, dtype=torch.bool)
    mask[list(classes)] = True
    return mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", nargs="+", default=["linf", "mse"])
    parser.add_argument("--buffer-size", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings than the preset's")
    options = parser.parse_args()
    for seed in options.seeds:
        for method in options.method:
            config = RunConfig.preset("seq-cifar10", method, buffer_size=options.buffer_size, seed=seed)
            config = config.change(epochs=options.epochs, model="narrow", train_limit=IMAGES, precision="float32")
            config = config.parse(options.set, settings_for(config))
            with cpu_threads(1):
                print(json.dumps(long_run(config, data_root(options.data))), flush=True)


if __name__ == "__main__":
    main()
