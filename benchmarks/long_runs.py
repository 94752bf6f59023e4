"""Complete runs with accuracy read after each of the last ten steps; by default small enough for a CPU.

    python benchmarks/long_runs.py --data data --method linf mse --seeds 200 201 > holdfast.jsonl
    python benchmarks/long_runs.py --device cuda --whole --epochs 5 --buffer-size 500 --method linf --seeds 0 1 2

S-CIFAR-10: fifty epochs with an eighth of the channels and the first 500 images of each task, in float32 on one thread;
with --whole, ResNet-18, all images and the preset's precision. It is what a program without Holdfast is compared with
in results/second-opinion. A line of JSON per run, when it has ended.
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
from holdfast.devices import choose_device, cpu_threads, own_stream
from holdfast.evaluation import Accuracies, Exam, evaluate
from holdfast.learners import settings_for
from holdfast.models import MODELS, ResNet18
from holdfast.run_state import RunState
from holdfast.training import train

WIDTH, IMAGES, TAIL, CPU = 8, 500, 10, torch.device("cpu")
MODELS.register("narrow", "resnet18 with an eighth of the channels, for CPUs")(partial(ResNet18, width=WIDTH))


class Onlooker:
    """Stands in for a checkpointer, as that is shown the state of a run; saves nothing."""

    def resume(self, state: RunState) -> bool:
        self.state = state
        return False

    def due(self) -> bool:
        return False


def long_run(config: RunConfig, root: Path, device: torch.device = CPU) -> dict[str, Any]:
    """Carries out the run; accuracies in percent over all tasks."""
    benchmark, onlooker = make_benchmark(config, root, device), Onlooker()
    exams = [Exam.of(task.test, task.classes, benchmark.classes, device) for task in benchmark.tasks]
    samples = len(benchmark.tasks[0].train().labels)
    steps = len(benchmark.tasks) * config.epochs * -(-samples // config.batch_size)
    read: dict[int, Accuracies] = {}
    running = train(config, benchmark, device, onlooker)  # type: ignore[arg-type]
    while True:
        try:
            step = next(running).step
        except StopIteration as end:
            result = end.value
            break
        if step > steps - TAIL and step not in read:  # the end of a task is reported as well, with no new step
            network = onlooker.state.engine.learner.evaluated()
            read[step] = evaluate(network, exams, benchmark.normalize, config.precision)
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
        "width": WIDTH if config.model == "narrow" else 64,
        "images": config.train_limit,
        "precision": config.precision,
        "accuracy": round(result.accuracy, 3),
        "task_il_accuracy": round(result.task_il_accuracy, 3),
        "mean_of_last_10_steps": round(fmean(tail), 3),
        "tail": [round(each, 2) for each in tail],
        "fingerprint": config.fingerprint,
        "seconds": round(result.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", nargs="+", default=["linf", "mse"])
    parser.add_argument("--buffer-size", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--whole", action="store_true", help="ResNet-18 and all images, for a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings than the preset's")
    options = parser.parse_args()
    device = choose_device(options.device)
    small = {} if options.whole else {"model": "narrow", "train_limit": IMAGES, "precision": "float32"}
    for seed in options.seeds:
        for method in options.method:
            config = RunConfig.preset("seq-cifar10", method, buffer_size=options.buffer_size, seed=seed)
            config = config.change(epochs=options.epochs, **small)
            config = config.parse(options.set, settings_for(config))
            with cpu_threads(1), own_stream(device):
                print(json.dumps(long_run(config, data_root(options.data), device)), flush=True)


if __name__ == "__main__":
    main()
