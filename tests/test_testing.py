"""The contract checks hold for everything that is registered, and can be broken. (Regularizers: test_regularizers.)"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from holdfast.augment import CropFlip, Normalize
from holdfast.benchmarks import BENCHMARKS, Benchmark, Task
from holdfast.buffer import Reservoir
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.learners import LEARNERS, Losses, Sgd, method_names
from holdfast.rng import generator
from holdfast.testing import check_benchmark, check_learner

# --- learners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_learners_keep_the_contract(name, precision):
    config = RunConfig(benchmark="testing", method="mse", buffer_size=12, replay_size=6, lr=0.05, precision=precision)
    check_learner(LEARNERS[name], config)


@pytest.mark.parametrize("method", [name for name in method_names() if name not in LEARNERS])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_consistency_replay_keeps_the_contract_with_every_regularizer(method, precision):
    config = RunConfig(benchmark="testing", method=method, buffer_size=12, replay_size=6, lr=0.05, precision=precision)
    check_learner(LEARNERS["consistency"], config)


class KeepsGraph(Sgd):
    def observe(self, x, y):
        loss = F.cross_entropy(self.forward(self.augment(x)), y)
        self.descend(loss)
        return Losses(loss, current=loss)


class DoesNotLearn(Sgd):
    def descend(self, losses):
        pass


class Diverges(Sgd):
    def descend(self, losses):
        super().descend(losses.total * float("inf"))


class ReturnsTuple(Sgd):
    def observe(self, x, y):
        return tuple(super().observe(x, y))


class NotOneNumber(Sgd):
    def observe(self, x, y):
        return Losses(super().observe(x, y).total, current=torch.zeros(2))


class NanLoss(Sgd):
    def observe(self, x, y):
        return Losses(super().observe(x, y).total, current=torch.tensor(float("nan")))


class Waits(Sgd):
    def descend(self, losses):
        if losses.total > 0:
            super().descend(losses)


class GlobalNoise(Sgd):
    def observe(self, x, y):
        noise = torch.randint(0, 2, x.shape, dtype=torch.uint8)
        return super().observe(x ^ noise, y)


class OverwritesInputs(Sgd):
    def observe(self, x, y):
        x.bitwise_xor_(1)
        return super().observe(x, y)


class OverwritesLabels(Sgd):
    def observe(self, x, y):
        y.zero_()
        return super().observe(x, y)


class LeavesEvaluationMode(Sgd):
    def observe(self, x, y):
        losses = super().observe(x, y)
        self.model.eval()
        return losses


class AnotherModel(Sgd):
    @classmethod
    def from_config(cls, config, parts):
        learner = super().from_config(config, parts)
        learner.model = torch.nn.Linear(1, 1)
        return learner


class Forgetful(Sgd):
    """A buffer that is never filled."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.buffer = Reservoir(12)


class MixesSamples(Forgetful):
    def observe(self, x, y):
        losses = super().observe(x, y)
        self.buffer.add(x, y.flip(0))
        return losses


class StoresViews(Forgetful):
    def observe(self, x, y):
        losses = super().observe(x, y)
        self.buffer.add(self.augment(x), y)
        return losses


class StoresTooMuch(Forgetful):
    def observe(self, x, y):
        losses = super().observe(x, y)
        self.buffer = Reservoir(100) if self.buffer.capacity == 12 else self.buffer
        self.buffer.add(x, y)
        return losses


class UnnamedTerm(Sgd):
    def observe(self, x, y):
        losses = super().observe(x, y)
        return Losses(losses.total, distillation=losses.total)


class CountsOnTheHost(Sgd):
    steps = 0

    def commit(self, losses):
        self.steps += 1


class CountsInADict(Sgd):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = {"steps": 0}

    def commit(self, losses):
        self.seen["steps"] += 1


class IgnoresASetting(Sgd):
    def __init__(self, model, optimizer, *, decay=0.9, **shared):
        super().__init__(model, optimizer, **shared)


class ForgetsItsState(Sgd):
    """An average that is evaluated, but that no checkpoint has."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def commit(self, losses):
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 0.1)

    def evaluated(self):
        return self.average


class SavesItsState(ForgetsItsState):
    def extra_state(self):
        return {"average": self.average}


class ComputesWithTheModel(Sgd):
    """Not with the network, which may be a copy that is trained in its place."""

    def compute_losses(self, x, y):
        with self.autocast():
            loss = self.criterion(self.model(self.view(x)), y)
        return Losses(loss, current=loss)


class UnseededDraws(Sgd):
    generators = iter(range(1000))

    def observe(self, x, y):
        order = torch.randperm(len(x), generator=generator(next(self.generators), "testing"))[: max(1, len(x) // 2)]
        return super().observe(x[order], y[order])


class HasMoreLayers(Sgd):
    """Of the network that is evaluated, nothing says how it is made."""

    def evaluated(self):
        return torch.nn.Sequential(self.model, torch.nn.Linear(3, 3))


def test_a_learner_with_a_state_of_its_own():
    check_learner(SavesItsState)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (KeepsGraph, "'total' holds on to its graph"),
        (DoesNotLearn, "the model does not change"),
        (Diverges, "weights are no longer finite"),
        (ReturnsTuple, "returns tuple, not Losses"),
        (NotOneNumber, r"'current' has shape \(2,\)"),
        (NanLoss, "'current' is nan"),
        (Waits, "asks for the value of a tensor"),
        (UnnamedTerm, "'distillation' is not among its `terms`"),
        (CountsOnTheHost, "`steps` changes from 2 to 3. A captured step would freeze it"),
        (CountsInADict, r"`seen` changes from \{'steps': 2\} to"),
        (IgnoresASetting, "nobody reads the setting decay"),
        (ForgetsItsState, "continued from its state_dict, it has other weights in 0.weight; see `extra_state`"),
        (GlobalNoise, "draws from torch's global generator"),
        (OverwritesInputs, "changes the inputs in place"),
        (OverwritesLabels, "changes the labels in place"),
        (LeavesEvaluationMode, "evaluation mode"),
        (AnotherModel, "must be the one from_config was given"),
        (Forgetful, "the buffer is still empty"),
        (MixesSamples, "not observed together"),
        (StoresViews, "not observed together, as they came"),
        (StoresTooMuch, "holds 16 of at most 12 samples"),
        (ComputesWithTheModel, "must compute its losses with self.network"),
        (UnseededDraws, "the same seeds gave other weights"),
        (HasMoreLayers, r"the weights of evaluated\(\) do not fit wrap\(model\)"),
    ],
)
def test_the_learners_contract_can_be_broken(learner, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_learner(learner)
    assert f"learner '{learner.__name__}'" in str(caught.value)


# --- benchmarks ------------------------------------------------------------------------------------------------------


def image_set(count, classes, seed=0, shape=(1, 10, 10)):
    draw = generator(seed, "images")
    labels = torch.tensor(classes)[torch.arange(count) % len(classes)]
    return ImageSet(torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw), labels)


def two_tasks(config, root):
    """Two tasks of two classes each, of random pictures."""
    sets = [(image_set(20, classes, config.seed), image_set(6, classes, 9)) for classes in ((0, 1), (2, 3))]
    tasks = (Task(tuple(set(train.labels.tolist())), partial(tuple_of, train), test) for train, test in sets)
    return Benchmark(4, (1, 10, 10), tuple(tasks), random_view=CropFlip)


def tuple_of(value):
    return value


def test_a_benchmark_from_elsewhere():
    check_benchmark(two_tasks)
    check_benchmark(two_tasks, RunConfig(benchmark="two", method="mse", buffer_size=5, tasks=2, batch_size=7))


@pytest.mark.parametrize(("name", "tasks"), [("seq-mnist", 5), ("rot-mnist", 1), ("perm-mnist", 1), ("mnist-360", 1)])
def test_the_bundled_benchmarks_keep_the_contract(name, tasks):
    check_benchmark(BENCHMARKS[name], RunConfig.preset(name, "sgd", tasks=tasks, train_limit=540, batch_size=64))


def broken(**changes):
    """`two_tasks` with something wrong in its first task or in the benchmark itself."""

    def benchmark(config, root):
        good = two_tasks(config, root)
        of_task = {key: value for key, value in changes.items() if key in ("classes_of_task", "train", "test")}
        whole = {key: value for key, value in changes.items() if key not in of_task}
        if "classes_of_task" in of_task:
            of_task["classes"] = of_task.pop("classes_of_task")
        tasks = (replace(good.tasks[0], **of_task), *good.tasks[1:]) if of_task else good.tasks
        return replace(good, **{"tasks": tasks, **whole})

    return benchmark


def with_a_generator_of_its_own(config, root):
    """`two_tasks`, but each training set is drawn from a generator that goes on from call to call."""
    good, draw = two_tasks(config, root), generator(config.seed, "stream")
    tasks = [replace(task, train=partial(shuffled_by, task.train(), draw)) for task in good.tasks]
    return replace(good, tasks=tuple(tasks))


def shuffled_by(images, draw):
    return images.select(torch.randperm(len(images.labels), generator=draw))


CALLS = iter(range(1000))
GOOD = image_set(20, (0, 1))


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [
        (lambda config, root: None, "returns NoneType, not a Benchmark"),
        (broken(tasks=()), "has no tasks"),
        (broken(classes=1), "has 1 classes"),
        (broken(classes=2), r"task 2: its classes \(2, 3\) are not all in 0\.\.1"),
        (broken(classes_of_task=()), "it has no classes"),
        (broken(classes_of_task=(0, 1, 1)), "repeat"),
        (broken(classes_of_task=(0,)), r"the training set has labels \[1\] that are not among"),
        (broken(test=image_set(4, (0, 3))), r"the test set has labels \[3\]"),
        (broken(test=image_set(0, (0, 1))), "the test set is empty"),
        (broken(train=lambda: ImageSet(GOOD.images[:5], GOOD.labels)), "5 images and 20 labels"),
        (broken(train=lambda: ImageSet(GOOD.images.float(), GOOD.labels)), "images of torch.float32, not uint8"),
        (broken(train=lambda: ImageSet(GOOD.images, GOOD.labels.int())), "labels of torch.int32, not int64"),
        (broken(train=lambda: ImageSet(GOOD.images, GOOD.labels[:, None])), r"labels of shape \(20, 1\)"),
        (broken(train=lambda: image_set(20, (0, 1), next(CALLS))), "the training set differs when .* made again"),
        (broken(train=lambda: ImageSet(GOOD.images[torch.randperm(20)], GOOD.labels)), "global generator"),
        (with_a_generator_of_its_own, r"task 1: a second call of train\(\) gives another training set"),
        (broken(shape=(100,)), r"training views have shape \(4, 1, 10, 10\), not \(4, 100\)"),
        (broken(normalize=Normalize((0.5,), (0.0,))), "views are not finite"),
        (broken(normalize=lambda x: x.double()), "views are torch.float64, not float32"),
        (broken(normalize=lambda x: x.fill_(1).float(), random_view=None), "changes the images"),
        (broken(batches=lambda n, b, g: []), "no minibatches"),
        (broken(batches=lambda n, b, g: torch.arange(n).split(b + 1)), "empty or over 5"),
        (broken(batches=lambda n, b, g: (torch.arange(n) + 1).split(b)), "samples that are not there"),
        (broken(batches=lambda n, b, g: torch.zeros(n).long().split(b)), "shows a sample twice"),
        (
            broken(batches=lambda n, b, g: torch.randperm(n, generator=generator(next(CALLS), "x")).split(b)),
            "does not follow from its generator",
        ),
    ],
)
def test_the_benchmarks_contract_can_be_broken(benchmark, message):
    config = RunConfig(benchmark="testing", method="sgd", buffer_size=None, batch_size=5)
    with pytest.raises(AssertionError, match=message):
        check_benchmark(benchmark, config)


def test_the_number_of_tasks_asked_for_is_heeded():
    with pytest.raises(AssertionError, match="has 2 tasks, not 3"):
        check_benchmark(two_tasks, RunConfig(benchmark="two", method="sgd", buffer_size=None, tasks=3))
