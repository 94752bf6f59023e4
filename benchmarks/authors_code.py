"""The code that the authors published and Holdfast, side by side through whole runs, with the same random numbers.

    git clone https://github.com/NeurAI-Lab/ConsistencyCL
    python benchmarks/authors_code.py ConsistencyCL --method er linf mse

S-CIFAR-10 on a CPU, in float32 on one thread, with a narrow ResNet-18. After each step of the authors' program,
Holdfast's loop makes the same one: from the same initial weights, it is told in which order samples come, how images
are cropped and flipped, which samples are stored and which are drawn. All else is its own: tasks, views, buffer,
losses, updates, tests.

Holdfast trains the authors' network here, with three passes a step, PyTorch's SGD, and pixels normalised by the same
operations in the same order. Then nothing is rounded otherwise: weights must be equal in every bit to the last step.

With --own it trains its own network as in any run, with its own SGD and normalisation. Rounding then differs, and what
differs grows from step to step; so its weights are set to the authors' after each, and the updates are compared.

With --alone, the authors' program runs by itself. A line of JSON per run. Needs torchvision.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import training
from holdfast.augment import CropFlip
from holdfast.benchmarks import make_benchmark
from holdfast.buffer import reservoir
from holdfast.config import RunConfig
from holdfast.data import data_root
from holdfast.devices import cpu_threads
from holdfast.models import ResNet18, group_batchnorm
from holdfast.results import RunResult, environment
from holdfast.run_state import Progress, RunState

CPU = torch.device("cpu")
CHANGED = {"barlow": "barlow_twins"}
"""Regularizers that have another name in the authors' code."""
UNUSED = ("prediction.", "classifier.", "_features.")
"""Layers of their network that no loss depends on, and second names of layers."""
WEIGHTS = {"barlow_on_weight": 0.5, "barlow_off_weight": 0.05, "dino_weight": 1, "byol_weight": 1, "mi_weight": 1}
WEIGHTS |= {"simclr_weight": 0.05}
"""The defaults of their command line."""


class Drawn:
    """What the authors' program drew and Holdfast has not used yet."""

    def __init__(self) -> None:
        self.order: list[int] = []
        """Of the epoch's samples."""
        self.views: deque[list[int]] = deque()
        """Of each image shown: rows from the top, columns from the left, 1 if it was flipped."""
        self.samples: deque[Tensor] = deque()
        """Slots that were drawn."""
        self.slots: deque[int] = deque()
        """The slot of each sample of the stream; -1 for none."""


class Authors:
    """Their program, imported from a folder, for networks of another width and fewer images a task."""

    def __init__(self, code: Path, data: Path, width: int, images: int | None) -> None:
        self.width, self.images = width, images
        sys.path.insert(0, str(code))
        os.chdir(code)  # it looks for its methods in the current folder
        home = Path(tempfile.mkdtemp())
        (home / "CIFAR10").symlink_to(data)
        self.conf = importlib.import_module("utils.conf")
        self.conf.base_data_path, self.conf.get_device = lambda: f"{home}/", lambda: CPU
        self.training, self.buffer = (importlib.import_module(f"utils.{name}") for name in ("training", "buffer"))
        self.cifar = importlib.import_module("datasets.seq_cifar10")
        self.loaders = importlib.import_module("datasets.utils.continual_dataset")
        self.transforms = importlib.import_module("torchvision.transforms")

    def run(self, config: RunConfig, on_step: Callable[[nn.Module], None], drawn: Drawn | None = None) -> list[Any]:
        """One run; the accuracies (Class-IL, Task-IL) of each task seen, after each task.

        `on_step` is called with the network before the first step and after each. What is drawn is noted in `drawn`.
        """
        settings = importlib.import_module("utils.best_args").best_args["seq-cifar10"]
        method = "er" if config.method == "er" else "cr"
        arguments = Namespace(**settings[method][config.buffer_size], **WEIGHTS)
        arguments.pretext_task = CHANGED.get(config.method, config.method)
        arguments.dataset, arguments.model, arguments.buffer_size = "seq-cifar10", method, config.buffer_size
        arguments.n_epochs, arguments.n_classes = config.epochs, 10
        arguments.validation = arguments.tensorboard = False
        self.conf.set_random_seed(config.seed)
        dataset = self.cifar.SequentialCIFAR10(arguments)
        network = importlib.import_module("backbone.ResNet18").resnet18(10, self.width)
        for parameter in network.parameters():  # as Holdfast has them in memory; that is no arithmetic
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        kind = importlib.import_module("models").names[method]
        model = kind(network, dataset.get_loss(), arguments, dataset.get_transform())
        found: list[Any] = []
        with ExitStack() as stack:

            def put(where: Any, name: str, what: Any) -> None:
                stack.enter_context(patch.object(where, name, what))

            put(self.training, "evaluate", self._reading(found))
            put(self.loaders, "DataLoader", partial(self._loader, drawn))
            put(self.training, "progress_bar", lambda *_: None)
            put(self.training, "print_mean_accuracy", lambda *_: None)
            if drawn is not None:
                self._note(put, drawn)
            on_step(network)
            step = model.observe

            def observe(*minibatch: Tensor) -> Any:
                losses = step(*minibatch)
                on_step(network)
                return losses

            object.__setattr__(model, "observe", observe)
            try:
                self.training.train(model, dataset, arguments)
            except UnboundLocalError as error:  # so it ends without TensorBoard, where it would save the network
                if "tb_logger" not in str(error):
                    raise
        return found[1:]  # the first were of the untrained network

    def _reading(self, found: list[Any]) -> Callable[..., Any]:
        """Their `evaluate`, which notes accuracies of all tasks seen."""
        evaluate = self.training.evaluate

        @torch.no_grad()
        def read(model: Any, dataset: Any, last: bool = False) -> Any:
            accuracies = evaluate(model, dataset, last)
            if not last:
                found.append(accuracies)
            return accuracies

        return read

    def _loader(self, drawn: Drawn | None, dataset: Any, shuffle: bool, num_workers: int, **options: Any) -> Any:
        """Their loader, of fewer images; in this process if draws are to be noted."""
        if shuffle and self.images is not None:
            dataset.data, dataset.targets = dataset.data[: self.images], dataset.targets[: self.images]
        if drawn is None:
            return torch.utils.data.DataLoader(dataset, shuffle=shuffle, num_workers=num_workers, **options)
        sampler = _Noted(dataset, drawn) if shuffle else None
        return torch.utils.data.DataLoader(dataset, sampler=sampler, **options)

    def _note(self, put: Callable[[Any, str, Any], None], drawn: Drawn) -> None:
        """Have crops, flips, draws and slots noted."""
        corner, store = self.transforms.RandomCrop.get_params, self.buffer.reservoir

        def crop(image: Any, size: Any) -> Any:
            found = corner(image, size)
            drawn.views.append([found[0], found[1], 0])
            return found

        def flip(self: Any, image: Any) -> Any:
            if torch.rand(1) >= self.p:
                return image
            drawn.views[-1][2] = 1
            return hflip(image)

        def stored(seen: int, size: int) -> int:
            drawn.slots.append(store(seen, size))
            return drawn.slots[-1]

        def choice(*given: Any, **options: Any) -> Any:
            chosen = np.random.choice(*given, **options)
            drawn.samples.append(torch.from_numpy(chosen))
            return chosen

        hflip = self.transforms.functional.hflip
        put(self.transforms.RandomCrop, "get_params", staticmethod(crop))
        put(self.transforms.RandomHorizontalFlip, "forward", flip)
        put(self.buffer, "reservoir", stored)
        put(self.buffer, "np", SimpleNamespace(random=SimpleNamespace(choice=choice, randint=np.random.randint)))


class _Noted(torch.utils.data.RandomSampler):
    """PyTorch's random order, noted when an epoch begins."""

    def __init__(self, dataset: Any, drawn: Drawn) -> None:
        super().__init__(dataset)
        self.drawn = drawn

    def __iter__(self) -> Any:
        self.drawn.order = list(super().__iter__())
        return iter(self.drawn.order)


class Told(CropFlip):
    """The view that the authors' program had of the same images."""

    def __init__(self, drawn: Drawn, normalize: Any, generator: torch.Generator) -> None:
        super().__init__(normalize, generator)
        self.drawn = drawn

    def __call__(self, images: Tensor) -> Tensor:
        """(B, 3, 32, 32) float32."""
        shown = torch.tensor([self.drawn.views.popleft() for _ in images]).T[..., None]
        size = torch.tensor([9, 9, 2])[:, None, None]
        uniforms = (shown + 0.5) / size  # so that they are cut to the same integers
        uniforms[2] = 1 - uniforms[2]  # one under a half flips
        return self.render(images, uniforms)


class Onlooker:
    """Stands in for a checkpointer, as that is shown the state of a run; saves nothing."""

    def resume(self, state: RunState) -> bool:
        self.state = state
        return False

    def due(self) -> bool:
        return False


class Beside:
    """Holdfast's loop, one step after each of the authors'."""

    def __init__(self, config: RunConfig, root: Path, drawn: Drawn, *, own: bool, width: int) -> None:
        self.config, self.root, self.drawn, self.own, self.width = config, root, drawn, own, width
        self.steps = self.equal = 0
        """How many steps were made, and how many until the first after which weights differed."""
        self.errors: list[float] = []
        """With `own`: of each update, its distance from theirs as a share of its length."""

    def __call__(self, theirs: nn.Module) -> None:
        """Make the step that they made, and compare."""
        state = {name: each for name, each in theirs.state_dict().items() if not name.startswith(UNUSED)}
        if not self.steps and not hasattr(self, "running"):
            self.running = self._begin(theirs, state)
            return
        while next(self.running).step == self.steps:  # the end of a task is reported as well, with no new step
            pass
        self.steps += 1
        ours = self._weights()
        if self.own:
            self._compare_updates(ours, state)
        elif self.equal == self.steps - 1:
            self.equal += all(torch.equal(mine, each) for mine, each in zip(ours, state.values(), strict=True))

    def end(self) -> RunResult:
        """The run's result, when all steps were made."""
        while True:
            try:
                next(self.running)
            except StopIteration as end:
                result: RunResult = end.value
                return result

    def _weights(self) -> list[Tensor]:
        state = self.onlooker.state.engine.learner.model.state_dict()
        return [each for name, each in state.items() if self.own or not name.startswith(UNUSED)]

    def _compare_updates(self, ours: list[Tensor], theirs: dict[str, Tensor]) -> None:
        moved = [each for each in theirs.values() if each.is_floating_point()]
        mine = [each for each in ours if each.is_floating_point()]
        distance = sum((a - b).square().sum().item() for a, b in zip(mine, moved, strict=True))
        length = sum((a - b).square().sum().item() for a, b in zip(moved, self.before, strict=True))
        self.errors.append((distance / length) ** 0.5)
        self.before = [each.clone() for each in moved]
        with torch.no_grad():
            for a, b in zip(ours, theirs.values(), strict=True):
                a.copy_(b)

    def _begin(self, theirs: nn.Module, state: dict[str, Tensor]) -> Generator[Progress, None, RunResult]:
        """The loop, with the authors' random numbers in place of its own."""
        benchmark, self.onlooker = make_benchmark(self.config, self.root), Onlooker()
        changes: dict[str, Any] = {
            "batches": lambda count, size, generator: torch.tensor(self.drawn.order).split(size),
            "random_view": partial(Told, self.drawn),
        }
        if self.own:
            network = group_batchnorm(ResNet18(benchmark.shape, benchmark.classes, self.width))
            network.load_state_dict(dict(zip(network.state_dict(), state.values(), strict=True)))
            self.before = [each.clone() for each in state.values() if each.is_floating_point()]
        else:
            network = deepcopy(theirs)
            changes["normalize"] = _in_their_order(benchmark.normalize)
        training.build_model = lambda config, benchmark: network
        if not self.own:
            training.make_optimizer = lambda config, model, device: (
                torch.optim.SGD(model.parameters(), lr=config.lr),
                None,
            )
        reservoir.distinct = lambda count, n, generator: self._drawn(count, n)
        reservoir.place = self._placed
        return training.train(self.config, replace(benchmark, **changes), CPU, self.onlooker)  # type: ignore[arg-type]

    def _drawn(self, count: int, n: int) -> Tensor:
        chosen = self.drawn.samples.popleft()
        assert len(chosen) == min(n, count), f"{len(chosen)} were drawn, not {min(n, count)}"
        return chosen

    def _placed(self, uniforms: Tensor, seen: Tensor, capacity: int) -> Tensor:
        """Their slots; of samples with one slot the last one gets it, as they write one after the other."""
        slots = [self.drawn.slots.popleft() for _ in uniforms]
        last = {slot: at for at, slot in enumerate(slots)}
        return torch.tensor([slot if slot >= 0 and last[slot] == at else capacity for at, slot in enumerate(slots)])


def _in_their_order(normalize: Any) -> Callable[[Tensor], Tensor]:
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (normalize.mean, normalize.std))
    return lambda images: images.float().div(255).sub(mean).div(std)


def beside(authors: Authors, config: RunConfig, root: Path, *, own: bool) -> dict[str, Any]:
    """Both programs through one run."""
    drawn = Drawn()
    ours = Beside(config, root, drawn, own=own, width=authors.width)
    found = authors.run(config, ours, drawn)
    result = ours.end()
    matrices = (result.matrix, result.task_matrix)
    apart = [
        abs(float(matrices[which][task][seen]) - accuracy)
        for task, row in enumerate(found)
        for which in (0, 1)
        for seen, accuracy in enumerate(row[which])
    ]
    told = {"steps": ours.steps, "largest_difference_of_accuracies": round(max(apart), 3)}
    if own:
        told |= {"median_error_of_updates": median(ours.errors), "largest_error_of_updates": max(ours.errors)}
    else:
        told |= {"equal_steps": ours.equal}
    left = [len(each) for each in (drawn.views, drawn.samples, drawn.slots)]
    assert not any(left), f"drawn by them and not used: {left}"
    return {"code": "both", "own": own, **told, "accuracy": round(result.accuracy, 3)}


def alone(authors: Authors, config: RunConfig) -> dict[str, Any]:
    """Their program by itself."""
    class_il, task_il = authors.run(config, lambda network: None)[-1]
    return {"code": "authors", "accuracy": round(fmean(class_il), 3), "task_il_accuracy": round(fmean(task_il), 3)}


def _commit(folder: Path) -> str:
    return (
        subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True)
        .stdout.decode()
        .strip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("code", type=Path, help="a clone of the authors' repository")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--method", nargs="+", default=["er", "linf", "mse"])
    parser.add_argument("--buffer-size", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer; 64 in the paper")
    parser.add_argument("--images", type=int, help="the first so many of each task")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    root = data_root(options.data).absolute()
    versions = {"commit": environment(CPU)["commit"], "authors_commit": _commit(options.code)}
    authors = Authors(options.code.absolute(), root, options.width, options.images)
    for seed in options.seeds:
        for method in options.method:
            config = RunConfig.preset("seq-cifar10", method, buffer_size=options.buffer_size, seed=seed)
            if method != "er":  # their code has one weight for all regularizers, where our preset of l1 has its own
                config = config.change(
                    beta=RunConfig.preset("seq-cifar10", "linf", buffer_size=config.buffer_size).beta
                )
            config = config.change(epochs=options.epochs, train_limit=options.images, precision="float32")
            with cpu_threads(1):
                found = alone(authors, config) if options.alone else beside(authors, config, root, own=options.own)
            about = {"method": method, "buffer_size": options.buffer_size, "epochs": options.epochs}
            about |= {"width": options.width, "images": options.images, "seed": seed, **versions}
            print(json.dumps({"code": found.pop("code"), **about, **found}), flush=True)


if __name__ == "__main__":
    main()
