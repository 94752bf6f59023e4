"""The engine: the samples that were asked for reach the learner, and losses are watched."""

import functools
import itertools
import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from holdfast.augment import CropFlip, Normalize
from holdfast.buffer import Reservoir
from holdfast.data import ImageSet
from holdfast.engine import BfloatTwin, CapturedEngine, Engine, LossLog
from holdfast.errors import TrainingError, UsageError
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Learner, Losses, PlainSgd
from holdfast.models import group_batchnorm
from holdfast.pure import compiled_calls, pure
from holdfast.rng import generator, seeded_globally

CPU = torch.device("cpu")


class Notebook(Learner):
    """Writes down what it observes; its loss is the mean label, or what `losses` says for the step."""

    def __init__(self, losses=()):
        model = torch.nn.Linear(1, 1)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self.seen, self.losses = [], list(losses)

    def observe(self, x, y):
        self.seen.append((x.clone(), y.clone()))
        total = torch.tensor(self.losses[len(self.seen) - 1]) if self.losses else y.float().mean()
        return Losses(total, current=total / 2, replay=total / 4)


def data(count: int = 20) -> ImageSet:
    numbers = torch.arange(count)
    return ImageSet(numbers.to(torch.uint8).view(-1, 1, 1, 1), numbers % 10)


def test_each_step_is_on_the_samples_asked_for():
    learner = Notebook()
    engine = Engine(learner, CPU)
    engine.load(data(), classes=10)
    batches = [torch.tensor(batch) for batch in ([3, 1, 4], [15, 9], [2])]
    for batch in batches:
        engine.step(batch)
    assert len(learner.seen) == 3
    for (x, y), batch in zip(learner.seen, batches, strict=True):
        assert x.flatten().tolist() == batch.tolist()
        assert y.tolist() == (batch % 10).tolist()
        assert x.dtype == torch.uint8


def test_what_was_captured_for_other_addresses_is_captured_anew(monkeypatch):
    """Into a pool of its own: one whose graphs are gone cannot be used again."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    engine = CapturedEngine(Notebook(), CPU, (), batch_size=4, compiled=False)
    engine.load(data(20), classes=10)
    images, pool = engine._images, engine._pool
    engine._graphs[4, 0] = "a graph"
    engine._uses[4, 0] = 4
    engine.load(ImageSet(data(20).images + 100, data(20).labels), classes=10)
    assert engine._images is images
    assert engine._images[3].item() == 103
    assert (engine._graphs, engine._pool) == ({(4, 0): "a graph"}, pool)
    engine.load(data(15), classes=10)
    assert not engine._graphs
    assert not engine._uses
    assert engine._pool != pool


def test_the_next_task_is_not_written_into_what_the_benchmark_handed_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    engine = CapturedEngine(Notebook(), CPU, (), batch_size=4, compiled=False)
    first, second = data(20), ImageSet(data(20).images + 100, data(20).labels)
    engine.load(first, classes=10)
    engine.load(second, classes=10)
    assert torch.equal(first.images, data(20).images)
    engine.load(first, classes=10)
    assert torch.equal(second.images, data(20).images + 100)


def test_what_is_unloaded_stays_only_where_captured_steps_read_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    eager, captured = Engine(Notebook(), CPU), CapturedEngine(Notebook(), CPU, (), batch_size=4, compiled=False)
    for engine in (eager, captured):
        engine.load(data(20), classes=10)
        engine.unload()
    assert not len(eager._images)
    assert not len(eager._labels)
    assert torch.equal(captured._images, data(20).images)


def test_a_task_hook_drops_the_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    engine = CapturedEngine(Notebook(), CPU, (), batch_size=4, compiled=False)
    engine.load(data(20), classes=10)
    engine._graphs[4, 0], engine._uses[4, 0], pool = "a graph", 4, engine._pool
    engine.learner_changed()
    assert not engine._graphs
    assert not engine._uses
    assert engine._pool != pool


def test_a_learner_that_is_not_capturable_runs_eagerly(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    monkeypatch.setattr(Notebook, "capturable", False)
    learner = Notebook()
    engine = CapturedEngine(learner, CPU, (), batch_size=4, compiled=False)
    engine.load(data(), classes=10)
    for _ in range(CapturedEngine.WARMUP + 3):
        engine.step(torch.arange(4))
    assert len(learner.seen) == engine.log.steps == CapturedEngine.WARMUP + 3
    assert not engine._graphs
    assert not caplog.text  # nothing was tried in vain


class OnGpu:
    """A generator on a GPU, as far as its state goes."""

    device = torch.device("cuda")

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state


def test_a_step_that_cannot_be_captured_runs_eagerly_from_then_on(monkeypatch, caplog):
    """Even if earlier ones could: a capture that is given up spoils the generators' states, which are replaced."""

    class Graph:
        replayed = 0

        def register_generator_state(self, generator):
            pass

        def replay(self):
            Graph.replayed += 1

    @contextmanager
    def capture(*_, **__):
        generator.state = "being captured"
        yield
        generator.state = "before"
        if len(learner.seen[-1][0]) == 2:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    for name in ("graph_pool_handle", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    renewed = []
    monkeypatch.setattr("holdfast.engine.captured.renew", lambda *which: renewed.append(which))
    learner, generator = Notebook(), OnGpu("before")
    engine = CapturedEngine(learner, CPU, [generator], batch_size=4, compiled=False)
    engine.load(data(), classes=10)
    batches = [torch.arange(4), torch.arange(2)]
    for batch in batches * 4:  # the first three of each kind run eagerly, the fourth is captured
        engine.step(batch)
    assert Graph.replayed == 1
    assert renewed == [(generator, "before")]
    assert caplog.text.count("cannot be captured") == 1
    assert "and more" not in caplog.text
    seen = len(learner.seen)
    for batch in batches:
        engine.step(batch)
    assert len(learner.seen) == seen + 2
    assert engine.log.steps == 10


@pytest.mark.parametrize("offers", [True, False])
def test_a_replay_counts_what_its_step_offers_to_the_buffer(monkeypatch, offers):
    """Some methods fill their buffer only when a task ends: for their steps it stays as it is."""

    class Graph:
        def replay(self):
            pass

    class Pupil(Notebook):
        def observe(self, x, y):
            self.buffer.offered += len(y) * offers
            return super().observe(x, y)

    for name in ("graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    learner = Pupil()
    learner.buffer = Reservoir(10)
    before = 10 if offers else 0  # full or empty, and it stays so: all steps are of one kind
    learner.buffer.offered = before
    engine = CapturedEngine(learner, CPU, (), batch_size=4, compiled=False)
    engine.load(data(), classes=10)
    for _ in range(CapturedEngine.WARMUP + 4):
        engine.step(torch.arange(4))
    assert len(learner.seen) == CapturedEngine.WARMUP + 1  # the last of them was captured, the rest are replays
    assert learner.buffer.offered - before == (4 * engine.log.steps if offers else 0)


def test_new_data_replaces_the_old():
    learner = Notebook()
    engine = Engine(learner, CPU)
    engine.load(data(5), classes=10)
    other = ImageSet(data(5).images + 100, data(5).labels)
    engine.load(other, classes=10)
    engine.step(torch.tensor([0]))
    assert learner.seen[0][0].item() == 100


@pytest.mark.parametrize("wrong", [[0, 10], [-1, 3]])
def test_labels_are_checked_when_data_comes_in(wrong):
    engine = Engine(Notebook(), CPU)
    with pytest.raises(UsageError, match=r"labels lie outside the model's outputs 0\.\.9"):
        engine.load(ImageSet(data(2).images, torch.tensor(wrong)), classes=10)


def run_steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step(torch.tensor([0]))


def test_means_of_the_last_steps():
    engine = Engine(Notebook([float(step) for step in range(1, 12)]), CPU, interval=4)
    engine.load(data(), classes=10)
    due = []
    for _ in range(4):
        run_steps(engine, 1)
        due.append(engine.log.due())
    assert due == [False, False, False, True]
    assert engine.log.read() == pytest.approx({"total": 2.5, "current": 1.25, "replay": 0.625, "consistency": 0.0})
    run_steps(engine, 4)
    assert engine.log.read()["total"] == pytest.approx((5 + 6 + 7 + 8) / 4)
    run_steps(engine, 3)
    assert engine.log.read()["total"] == pytest.approx(10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 4, 5, 7, 8])
def test_a_loss_that_is_not_finite_is_named_with_its_step(bad, at):
    losses = [1.0] * 8
    losses[at - 1] = bad
    engine = Engine(Notebook(losses), CPU, interval=4)
    engine.load(data(), classes=10)

    def train():
        for _ in range(8):
            run_steps(engine, 1)
            if engine.log.due():
                engine.log.read()

    with pytest.raises(TrainingError, match=rf"no longer finite at step {at} \(total {bad}, .*consistency 0\)"):
        train()


def test_an_incomplete_interval_is_read_at_the_end_of_a_task():
    engine = Engine(Notebook([1.0, 1.0, math.nan]), CPU, interval=50)
    engine.load(data(), classes=10)
    run_steps(engine, 3)
    assert not engine.log.due()
    with pytest.raises(TrainingError, match="at step 3"):
        engine.log.read()


def test_the_first_bad_step_is_named():
    engine = Engine(Notebook([1.0, math.nan, math.nan, 1.0]), CPU, interval=4)
    engine.load(data(), classes=10)
    run_steps(engine, 4)
    with pytest.raises(TrainingError, match="at step 2 "):
        engine.log.read()


def test_a_log_without_steps_has_nothing_to_tell():
    assert LossLog((), CPU, 4).read() == {}


# --- what a GPU runs, traced and differentiated as there, but with the CPU's own kernels ------------------------------


def conv_learner(method: str, precision: str, fast: bool = False) -> Learner:
    with seeded_globally(0, "network"):
        body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model = group_batchnorm(nn.Sequential(*body, nn.Linear(4, 10)))
    view = CropFlip(Normalize((0.5,) * 3, (0.2,) * 3), generator(0, "augment"), padding=2)
    options = {"buffer_size": 8, "augment": view, "precision": precision, "validate": False, "seed": 1}
    network, optimizer = model, PlainSgd(model.parameters(), 0.1)
    if fast:
        if precision == "bfloat16":
            optimizer = BfloatTwin(model, 0.1)
            network = optimizer.network
        options["network"] = pure(network)
    if method == "er":
        return ExperienceReplay(model, optimizer, **options)
    return ConsistencyReplay(model, optimizer, regularizer=method, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize(
    ("method", "precision"),
    [*((name, "float32") for name in ("er", "l1", "mse", "kl", "mi", "dino")), ("mse", "bfloat16")],
)
def test_compiled_steps_equal_plain_ones(method, precision, monkeypatch):
    """torch has given compiled BatchNorm gradients of 0; accuracy alone hardly shows it on short runs."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, compiled = conv_learner(method, precision), conv_learner(method, precision, fast=True)
    for number in range(4):
        x = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8, generator=generator(number, "images"))
        y = torch.randint(0, 10, (8,), generator=generator(number, "labels"))
        before = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
        with compiled_calls(number > 0):  # from then on the buffer is full, as when a run begins to use them
            losses = compiled.observe(x, y)
        torch.testing.assert_close(losses.as_dict(), plain.observe(x, y).as_dict(), rtol=1e-4, atol=1e-4)
        for name, tensor in plain.model.state_dict().items():
            assert not torch.equal(before[name], tensor), f"{name} has not moved"
            torch.testing.assert_close(compiled.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
