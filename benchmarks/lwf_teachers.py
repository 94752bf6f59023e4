"""LwF between ours and the DER paper's: what the teacher is asked, how a task begins, and whether there is a teacher.

    python benchmarks/lwf_teachers.py --data data --seeds 400 401 402 > cifar.jsonl
    python benchmarks/lwf_teachers.py --benchmark seq-mnist --variant ours warmed untaught uncalled --seeds 400 401 402

On S-CIFAR-10 the Task-IL accuracy of our LwF lies far over the published one. The framework of the DER paper (Mammoth)
differs from ours in what the variants change here, one at a time and then together:

- ours: the learner `lwf`.
- image: the teacher is asked about the image as it is, and not about the view that the network sees. The framework
  notes its answers once per image; a frozen network in evaluation mode gives the same answers in every step.
- pixels: the same with pixels from 0 to 1 that are not normalised, as the framework has it.
- warmed: before a task, the last layer is trained alone on the task's own classes, for as many epochs as the task has.
- together: pixels and warmed, as the framework computes it since its training loop calls LwF when a task begins. (Until
  January 2021 the features in its warm-up lacked the network's first ReLU; that is left out.)
- untaught: ours with a weight of 0 for the teacher's answers.
- uncalled: as the framework's first release computes it. Its training loop did not call LwF when a task began, so there
  was no teacher and no warm-up, and cross-entropy had all ten classes: sgd with LwF's settings.

S-CIFAR-10: three epochs with an eighth of the channels, 1,000 images of each task and 500 to test it on. S-MNIST: the
preset as it is, with all images. In float32 on one thread, on a CPU. A line of JSON per run, when it has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.augment import Normalize
from holdfast.benchmarks import make_benchmark
from holdfast.benchmarks.base import Benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet, data_root
from holdfast.devices import cpu_threads
from holdfast.learners import Losses, WithoutForgetting
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import Options
from holdfast.methods import LEARNERS
from holdfast.models import evaluating, features, last_layer
from holdfast.nested import Nested
from holdfast.rng import generator
from holdfast.run_state import RunState
from holdfast.training import train

sys.path.insert(0, str(Path(__file__).resolve().parent))
from long_runs import CPU  # and its network

SMALL: dict[str, Any] = {"model": "narrow", "epochs": 3, "train_limit": 1_000, "precision": "float32"}
"""Of the preset of S-CIFAR-10, what differs here."""
TESTED = 500
"""Test images of each of its tasks."""
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "uncalled": {},
    "pixels": {"asked": "pixels"},
    "together": {"asked": "pixels", "warmed": True},
    "image": {"asked": "image"},
    "warmed": {"warmed": True},
    "untaught": {"distillation": 0.0},
}
"""Settings of the learner below; those that a variant leaves out are ours."""


@LEARNERS.register("lwf-variant", "LwF as benchmarks/lwf_teachers.py varies it")
class Variant(WithoutForgetting):
    """The learner `lwf`, whose teacher may be asked something else, and whose tasks may begin with a warm-up.

    Options of this learner:

    - asked: what the teacher is shown: the network's view, the image as it is, or its pixels, not normalised.
    - warmed: whether the outputs of new classes are trained alone before a task.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        asked: str = "view",
        warmed: bool = False,
        distillation: float = 1.0,
        temperature: float = 2.0,
        **shared: Unpack[Options],
    ) -> None:
        super().__init__(model, optimizer, distillation=distillation, temperature=temperature, **shared)
        self.asked, self.warmed = asked, warmed
        self.config: RunConfig | None = None
        """The run's, whose batch size, epochs, learning rate and seed the warm-up has."""
        self.images_of: Mapping[tuple[int, ...], Callable[[], ImageSet]] = {}
        """The training images of a task, by its classes."""

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Those of `lwf`."""
        self.minibatch = x
        return super().compute_losses(x, y)

    def forward(self, view: Nested, network: Callable[[Any], Any] | None = None) -> Tensor:
        """The outputs for a view; of the teacher, for what it is asked in place of the view."""
        if network is self.teacher and self.asked != "view":
            view = (Normalize() if self.asked == "pixels" else self.augment.normalize)(self.minibatch)
        return super().forward(view, network)

    def begin_task(self, classes: tuple[int, ...]) -> None:
        """Let the outputs of these classes take part, after a warm-up if an earlier task has ended."""
        super().begin_task(classes)
        if self.warmed and self.old.any():
            self.warm_up(self.images_of[classes](), list(classes))

    def warm_up(self, samples: ImageSet, classes: list[int]) -> None:
        """Train the last layer alone on a task, with cross-entropy over its own classes and plain SGD."""
        config, head = self.config, last_layer(self.model)
        optimizer = torch.optim.SGD(head.parameters(), lr=config.lr)
        order = generator(config.seed, f"warm-up {classes}", self.device)
        with evaluating(self.model):
            for _ in range(config.epochs):
                for batch in torch.randperm(len(samples.labels), generator=order).split(config.batch_size):
                    with torch.no_grad():
                        seen = features(self.model, self.view(samples.images[batch]))
                    labels = samples.labels[batch] - min(classes)
                    optimizer.zero_grad()
                    F.cross_entropy(head(seen)[:, classes], labels).backward()
                    optimizer.step()


class Prompter:
    """Stands in for a checkpointer, as that is shown the state of a run: tells the learner of the run and its tasks."""

    def __init__(self, config: RunConfig, benchmark: Benchmark) -> None:
        self.config, self.images_of = config, {task.classes: task.train for task in benchmark.tasks}

    def resume(self, state: RunState) -> bool:
        state.engine.learner.config, state.engine.learner.images_of = self.config, self.images_of
        return False

    def due(self) -> bool:
        return False


def config_of(benchmark: str, variant: str, seed: int, epochs: int | None = None) -> RunConfig:
    """The run of a variant: the preset of LwF; on S-CIFAR-10 a small one."""
    config = RunConfig.preset(benchmark, "lwf", seed=seed).change(**SMALL if benchmark == "seq-cifar10" else {})
    config = config.change(epochs=epochs or config.epochs)
    if variant == "uncalled":
        return config.change(method="sgd", settings=())
    if variant == "ours":
        return config
    return config.change(method="lwf-variant", settings=tuple((dict(config.settings) | VARIANTS[variant]).items()))


def small(benchmark: Benchmark) -> Benchmark:
    """The benchmark with fewer test images."""
    tasks = [replace(task, test=ImageSet(*(part[:TESTED] for part in task.test))) for task in benchmark.tasks]
    return replace(benchmark, tasks=tuple(tasks))


def teach(config: RunConfig, benchmark: Benchmark) -> dict[str, Any]:
    """Carries out the run; accuracies in percent, `task_il` for each task at the end."""
    running = train(config, benchmark, CPU, Prompter(config, benchmark))  # type: ignore[arg-type]
    while True:
        try:
            next(running)
        except StopIteration as end:
            result = end.value
            break
    return {
        "benchmark": config.benchmark,
        "seed": config.seed,
        "epochs": config.epochs,
        "images": config.train_limit,
        "model": config.model,
        "accuracy": round(result.accuracy, 3),
        "task_il_accuracy": round(result.task_il_accuracy, 3),
        "task_il": [round(each, 2) for each in result.task_matrix[-1].tolist()],
        "fingerprint": config.fingerprint,
        "seconds": round(result.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--benchmark", choices=("seq-cifar10", "seq-mnist"), default="seq-cifar10")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, help="other than three, or than the preset's of S-MNIST")
    options = parser.parse_args()
    for seed in options.seeds:
        for variant in options.variant:
            config = config_of(options.benchmark, variant, seed, options.epochs)
            with cpu_threads(1):
                benchmark = make_benchmark(config, data_root(options.data), CPU)
                found = teach(config, small(benchmark) if config.benchmark == "seq-cifar10" else benchmark)
            print(json.dumps({"variant": variant, **found}), flush=True)


if __name__ == "__main__":
    main()
