"""Stopped at any step and continued equals never stopped, bit for bit: runs, and learners around any model."""

import copy
import errno
import itertools
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast as hf
from forked import ended, forked, trains_in_a_fork
from holdfast import checkpoint, results
from holdfast.augment import CropFlip, Normalize
from holdfast.benchmarks import make_benchmark
from holdfast.cli import main
from holdfast.data import data_root
from holdfast.engine import BfloatTwin
from holdfast.learners import LEARNERS, Sgd, method_names
from holdfast.regularizers import REGULARIZERS
from holdfast.rng import generator
from holdfast.run_state import Checkpointer
from holdfast.training import train
from killed import killed

CPU = torch.device("cpu")
SIZES = {
    "rot-mnist": {"tasks": 2, "train_limit": 75, "epochs": 2},
    "seq-mnist": {"tasks": 5, "train_limit": 75},
    "mnist-360": {"tasks": 1, "train_limit": 250},
}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run.safetensors"


def config(method: str = "mse", benchmark: str = "rot-mnist", **changes) -> hf.RunConfig:
    sizes = {**SIZES[benchmark], "batch_size": 32, "replay_size": 16}
    return hf.RunConfig.preset(benchmark, method, buffer_size=40, **{**sizes, **changes})


def assert_identical(one: hf.RunResult, other: hf.RunResult) -> None:
    """Bit for bit."""
    for name in ("weights", "logits"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.keys() == theirs.keys()
        assert mine
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
    for name in ("matrix", "task_matrix", "untrained"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)
    assert one.timing["steps"] == other.timing["steps"]


class At(Checkpointer):
    """Keeps the state once, right after a given step of this process."""

    def __init__(self, path, settings, step):
        super().__init__(path, settings, CPU)
        self.left = step

    def due(self):
        self.left -= 1
        return self.left == 0


def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def stop_after(steps, settings, stream, path):
    """Carry out so many steps and abandon the run; gives its progress as others see it."""
    keeper = At(path, settings, steps)
    for progress in train(settings, stream, CPU, keeper):
        if keeper.left == 0:
            return copy.deepcopy(progress)
    raise AssertionError("the run was over before it could be stopped")


def suits(method: str, benchmark: str) -> bool:
    """Whether the benchmark tells the method what it needs to know; terms of the one learner are stopped on one."""
    if method in REGULARIZERS and method != "mse" and benchmark != "rot-mnist":
        return False
    return benchmark != "mnist-360" or not getattr(LEARNERS.get(method), "needs_boundaries", False)


@pytest.mark.parametrize(
    ("method", "benchmark"), [pair for pair in itertools.product(method_names(), SIZES) if suits(*pair)]
)
def test_stopped_three_times_equals_never_stopped(few_digits, path, method, benchmark):
    settings = config(method, benchmark)
    stream = make_benchmark(settings, data_root(None))
    expected = finish(train(settings, stream, CPU))
    total = int(expected.timing["steps"])
    stops = sorted(random.Random(f"{method} {benchmark}").sample(range(1, total + 1), 3))
    for before, after in zip([0, *stops], stops, strict=False):
        assert stop_after(after - before, settings, stream, path).step == after
    assert_identical(finish(train(settings, stream, CPU, Checkpointer(path, settings, CPU))), expected)


def test_a_run_with_a_balanced_buffer_continues(few_digits, path):
    settings = config("er", "seq-mnist", settings=(("balanced", True),))
    stream = make_benchmark(settings, data_root(None))
    expected = finish(train(settings, stream, CPU))
    stop_after(int(expected.timing["steps"]) // 2, settings, stream, path)
    assert_identical(finish(train(settings, stream, CPU, Checkpointer(path, settings, CPU))), expected)


def test_stopped_after_every_single_step(few_digits, path):
    """Also after the last step of an epoch, of a task, and of the run."""
    settings = config()
    stream = make_benchmark(settings, data_root(None))
    seen = [copy.deepcopy(progress) for progress in train(settings, stream, CPU)]
    by_step = {progress.step: progress for progress in reversed(seen)}  # as it was before an evaluation
    expected = finish(train(settings, stream, CPU))
    for step in range(1, len(by_step) + 1):
        progress = stop_after(1, settings, stream, path)
        assert progress == by_step[step]
    result = finish(train(settings, stream, CPU, Checkpointer(path, settings, CPU)))
    assert_identical(result, expected)
    # Done already, it is evaluated again.
    assert_identical(finish(train(settings, stream, CPU, Checkpointer(path, settings, CPU))), expected)


def test_run_continues_and_tells_losses_and_time_of_the_whole_run(few_digits, path):
    settings = config(batch_size=4, epochs=1)
    told, told_again = [], []
    expected = hf.run(settings, device="cpu", on_step=lambda progress: told.append(copy.deepcopy(progress)))

    def stop(progress):
        told_again.append(copy.deepcopy(progress))
        if progress.step == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.run(settings, device="cpu", on_step=stop, checkpoint=path, every=0)
    spent = checkpoint.read(path, "run").state["total"]
    result = hf.run(
        settings,
        device="cpu",
        on_step=lambda progress: told_again.append(copy.deepcopy(progress)),
        checkpoint=str(path),
    )
    assert told_again == told
    assert told[-1].losses is not None
    assert_identical(result, expected)
    assert result.seconds > spent > 0
    assert result.timing["checkpoints"] > 0


def test_nothing_is_written_unless_asked_nor_before_it_is_time(few_digits, tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf.run(config(), device="cpu")
    hf.run(config(), device="cpu", checkpoint=path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(hf.UsageError, match="seconds between checkpoints"):
        hf.run(config(), device="cpu", checkpoint=path, every=-1)


def test_augmented_runs_with_batchnorm(few_digits, path, monkeypatch):
    """Random views, running statistics and dropout continue as well."""

    class Normalised(torch.nn.Sequential):
        def __init__(self, shape, classes):
            layers = torch.nn.Linear(784, classes), torch.nn.BatchNorm1d(classes), torch.nn.Dropout(0.3)
            super().__init__(torch.nn.Flatten(), *layers)

    monkeypatch.setitem(hf.MODELS._entries, "normalised", Normalised)
    settings = config("linf", model="normalised")
    plain = make_benchmark(settings, data_root(None))
    stream = replace(plain, random_view=CropFlip)
    expected = finish(train(settings, stream, CPU))
    for steps in (4, 5):
        stop_after(steps, settings, stream, path)
        torch.rand(steps)  # as if in another process, where dropout's generator is elsewhere
    assert_identical(finish(train(settings, stream, CPU, Checkpointer(path, settings, CPU))), expected)


# Stopped by Ctrl-C


@pytest.fixture
def interrupted(monkeypatch, request):
    """Presses Ctrl-C, or sends another signal, in the middle of the given steps, each counted from the last."""
    waiting, usual, number = [], hf.ExperienceReplay.objective, getattr(request, "param", signal.SIGINT)

    def objective(*arguments):
        if waiting:
            waiting[0] -= 1
            if waiting[0] == 0:
                waiting.pop(0)
                os.kill(os.getpid(), number)
        return usual(*arguments)

    monkeypatch.setattr(hf.ExperienceReplay, "objective", objective)
    return waiting.extend


@pytest.mark.parametrize("interrupted", [signal.SIGINT, signal.SIGTERM], indirect=True)
def test_being_stopped_ends_the_run_after_a_whole_step(few_digits, path, interrupted):
    settings = config("er")
    expected, usual = hf.run(settings, device="cpu"), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    interrupted([3, 4])
    for step in (3, 7):
        with pytest.raises(KeyboardInterrupt, match=f"after step {step}; its state is saved in .* it continues"):
            hf.run(settings, device="cpu", checkpoint=path)
        assert checkpoint.read(path, "run").state["progress"]["step"] == step
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == usual
    assert_identical(hf.run(settings, device="cpu", checkpoint=path), expected)


def test_ctrl_c_pressed_while_nothing_can_be_written(few_digits, tmp_path, interrupted, caplog):
    (tmp_path / "file").touch()
    interrupted([2])
    with pytest.raises(KeyboardInterrupt, match=r"after step 2; but the checkpoint could not be written.*Make room"):
        hf.run(config("er"), device="cpu", checkpoint=tmp_path / "file" / "kept")
    assert not caplog.records


def test_ctrl_c_pressed_twice_does_not_wait_for_the_step(few_digits, path, monkeypatch):
    def objective(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(hf.ExperienceReplay, "objective", objective)
    with pytest.raises(KeyboardInterrupt):
        hf.run(config("er"), device="cpu", checkpoint=path)
    assert not path.exists()


def test_ctrl_c_is_left_alone_without_a_checkpoint_in_other_threads_and_where_it_has_another_meaning(
    few_digits, path, interrupted
):
    interrupted([2])
    with pytest.raises(KeyboardInterrupt) as stopped:
        hf.run(config("er"), device="cpu")
    assert not stopped.value.args

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hf.run, config("er"), device="cpu", checkpoint=path).result().accuracy > 0

    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        interrupted([2])
        hf.run(config("er"), device="cpu", checkpoint=path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [True]


# What can go wrong


def test_another_run_is_not_continued(few_digits, path):
    settings = config()
    stop_after(2, settings, make_benchmark(settings, data_root(None)), path)
    with pytest.raises(hf.CheckpointError, match=r"another run: fingerprint is .* start anew"):
        hf.run(settings.change(lr=0.5), device="cpu", checkpoint=path)
    about, state = checkpoint.read(path, "run")
    about["config"]["lr"] = 0.5  # the name alone does not decide
    checkpoint.write(path, "run", state, about)
    with pytest.raises(hf.CheckpointError, match=r"another run: lr is 0\.5 there and 0\.\d+ here"):
        hf.run(settings, device="cpu", checkpoint=path)
    about["config"]["lr"], about["device"] = settings.lr, "cuda"
    checkpoint.write(path, "run", state, about)
    with pytest.raises(hf.CheckpointError, match=r"device is 'cuda' there and 'cpu' here"):
        hf.run(settings, device="cpu", checkpoint=path)
    about["device"] = "cpu"
    checkpoint.write(path, "run", {**state, "log": {}}, about)
    with pytest.raises(hf.CheckpointError, match=r"does not fit this run.*start anew"):
        hf.run(settings, device="cpu", checkpoint=path)


def test_a_full_disk_does_not_end_the_run(few_digits, path, monkeypatch, caplog):
    settings = config()
    expected = hf.run(settings, device="cpu")
    stop_after(2, settings, make_benchmark(settings, data_root(None)), path)
    kept = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        assert_identical(hf.run(settings, device="cpu", checkpoint=path, every=0), expected)
    (record,) = caplog.records  # once, not for every attempt
    assert "the run goes on, but" in record.getMessage()
    assert "No space left on device" in record.getMessage()
    assert path.read_bytes() == kept


def test_a_state_with_a_broken_loss_is_not_kept(few_digits, path):
    with pytest.raises(hf.TrainingError, match="task 1: the loss is no longer finite at step"):
        hf.run(config(lr=1e6), device="cpu", checkpoint=path, every=0)
    if path.exists():
        model = checkpoint.read(path, "run").state["learner"]["model"]
        assert all(value.isfinite().all() for value in model.values())


# Killed


@trains_in_a_fork
def test_killed_five_times(few_digits, tmp_path, path):
    assert_survives_kills(config("linf", train_limit=400, epochs=1, batch_size=16), tmp_path, path, kills=5)


@trains_in_a_fork
@pytest.mark.slow
@pytest.mark.parametrize("method", method_names())
def test_killed_twenty_times(few_digits, tmp_path, path, method):
    assert_survives_kills(config(method, train_limit=1400, epochs=1, batch_size=16), tmp_path, path, kills=20)


def assert_survives_kills(settings, tmp_path, path, *, kills):
    killed(settings, path, tmp_path / "out", kills)
    result = results.read(tmp_path / "out" / settings.fingerprint, tensors=True)
    assert_identical(result, hf.run(settings, device="cpu"))


RUN = ["run", "rot-mnist", "er", "--tasks", "2", "--device", "cpu", "--resume", "--checkpoint-every", "0"]


@pytest.mark.slow
def test_the_command_killed_twenty_times(tmp_path):
    command = [sys.executable, "-m", "holdfast", *RUN, "--set", "train_limit=8000", "--set", "batch_size=16"]
    chance = random.Random(0)
    checkpoints = tmp_path / "cut" / ".checkpoints"
    for _ in range(20):
        child = subprocess.Popen([*command, "--out", str(tmp_path / "cut")], stderr=subprocess.DEVNULL)
        before, deadline = stamps(checkpoints), time.monotonic() + 60
        while stamps(checkpoints) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
        child.kill()
        assert child.wait() == -9
    for out in ("cut", "whole"):
        subprocess.run([*command, "--out", str(tmp_path / out)], check=True, capture_output=True)
    cut, whole = (read_only_result(tmp_path / out) for out in ("cut", "whole"))
    assert_identical(cut, whole)


def stamps(folder: Path) -> list[int]:
    return [file.stat().st_mtime_ns for file in folder.glob("*.safetensors")]


def read_only_result(out: Path) -> hf.RunResult:
    (folder,) = out.iterdir()  # and no checkpoints
    return results.read(folder, tensors=True)


# The command


@pytest.fixture
def holdfast(monkeypatch, capfd, tmp_path, few_digits):
    """Call the command in an empty folder; gives (exit code, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, capfd.readouterr().err

    return call


def test_resume_on_the_command_line(holdfast, tmp_path):
    command = [*RUN, "--set", "train_limit=300"]
    settings = hf.RunConfig.preset("rot-mnist", "er", tasks=2, train_limit=300)
    kept = tmp_path / "runs" / ".checkpoints" / f"{settings.fingerprint}.safetensors"
    stop_after(2, settings, make_benchmark(settings, data_root(None)), kept)

    whole = kept.read_bytes()
    kept.write_bytes(whole[:-5])
    code, err = holdfast(*command)
    assert code == 1
    assert "is damaged" in err
    assert "Delete it to start anew" in err
    assert "Traceback" not in err

    kept.write_bytes(whole)
    code, err = holdfast(*command)
    assert code == 0
    assert f"continuing from runs/.checkpoints/{kept.name}" in err
    assert [each.name for each in (tmp_path / "runs").iterdir()] == [settings.fingerprint]  # no checkpoints left
    found = results.read(tmp_path / "runs" / settings.fingerprint, tensors=True)
    assert_identical(found, hf.run(settings, device="cpu"))

    checkpoint.write(kept, "run", {})  # killed between saving the result and removing the checkpoint
    code, err = holdfast(*command)
    assert code == 0
    assert "already in" in err
    assert not kept.parent.exists()


def test_ctrl_c_on_the_command_line(holdfast, tmp_path, interrupted):
    command = [*RUN[:-1], "3600", "--set", "train_limit=300"]
    settings = hf.RunConfig.preset("rot-mnist", "er", tasks=2, train_limit=300)
    interrupted([2])
    code, err = holdfast(*command)
    assert code == 130
    assert f"stopped after step 2; its state is saved in runs/.checkpoints/{settings.fingerprint}.safetensors" in err
    assert f"To continue: holdfast {shlex.join(command)}" in err
    interrupted([2])
    code, err = holdfast(*(part for part in command if part != "--resume"))
    assert code == 130
    assert f".checkpoints/{settings.fingerprint}.safetensors has the state of this run: --resume continues it" in err
    code, err = holdfast(*command)
    assert code == 0
    assert "continuing from" in err
    found = results.read(tmp_path / "runs" / settings.fingerprint, tensors=True)
    assert_identical(found, hf.run(settings, device="cpu"))

    interrupted([2])
    command = ["run", "rot-mnist", "er", "--device", "cpu", "--seed", "1", "--set", "train_limit=300"]
    code, err = holdfast(*command)
    assert code == 130
    assert f"Nothing of this run is saved. One that can be continued: holdfast {shlex.join(command)} --resume" in err


@trains_in_a_fork
def test_two_processes_with_one_run_do_each_other_no_harm(few_digits, tmp_path, monkeypatch):
    """They write the same checkpoint and the same result."""
    settings = ["--set", "train_limit=300", "--set", "batch_size=16"]
    monkeypatch.setattr(sys, "argv", ["holdfast", *RUN, *settings, "--out", str(tmp_path / "out")])
    assert ended([forked(main) for _ in range(2)]) == [0, 0]
    config = hf.RunConfig.preset("rot-mnist", "er", tasks=2, train_limit=300, batch_size=16)
    assert_identical(read_only_result(tmp_path / "out"), hf.run(config, device="cpu"))


def test_without_resume_nothing_is_kept(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", None)  # calling it would fail
    assert holdfast("run", "rot-mnist", "er", "--tasks", "2", "--device", "cpu", "--set", "train_limit=300")[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


# Learners around any model


def stream(count: int):
    source = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.rand(12, 6, generator=source), torch.randint(0, 3, (12,), generator=source)


def make(kind: str = "consistency", optimizer=torch.optim.Adam, buffer_size: int = 20, width: int = 8, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    descent = optimizer(model.parameters(), lr=0.01)
    if kind == "sgd":
        return Sgd(model, descent, **options)
    learner = {"er": hf.ExperienceReplay, "consistency": hf.ConsistencyReplay}[kind]
    return learner(model, descent, buffer_size=buffer_size, **options)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop, momentum])
@pytest.mark.parametrize("kind", ["sgd", "er", "consistency"])
def test_a_learner_saved_and_loaded_learns_on_as_if_nothing_had_happened(path, kind, optimizer):
    whole = make(kind, optimizer)
    losses = [whole.observe(x, y) for x, y in stream(12)]
    for stop in (0, 1, 7, 11):
        first, second = make(kind, optimizer), make(kind, optimizer, **({} if kind == "sgd" else {"seed": 5}))
        batches = list(stream(12))
        for x, y in batches[:stop]:
            first.observe(x, y)
        first.save(path, extra={"position": stop})
        extra = second.load(path)
        assert extra == {"position": stop}
        assert [second.observe(x, y) for x, y in batches[extra["position"] :]] == losses[stop:]
        for name, value in whole.model.state_dict().items():
            assert torch.equal(second.model.state_dict()[name], value)
        if whole.buffer is not None:
            assert second.buffer.offered == whole.buffer.offered == int(second.buffer.seen)
            for mine, theirs in zip(second.buffer.contents(), whole.buffer.contents(), strict=True):
                assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD])
def test_an_optimiser_continues_with_numbers_of_another_type_than_the_weights(path, optimizer, dtype):
    """NAdam and ASGD keep some in float32, which torch.optim would load in the type of the weights."""
    learners, batches = [], [(x.to(dtype), y) for x, y in stream(8)]
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(dtype)
        learners.append(hf.ExperienceReplay(model, optimizer(model.parameters(), lr=0.01), buffer_size=20))
    one, other = learners
    for x, y in batches[:4]:
        one.observe(x, y)
    one.save(path)
    other.load(path)
    for x, y in batches[4:]:
        assert one.observe(x, y) == other.observe(x, y)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["sgd", "er", "consistency"])
def test_dropout_continues(path, kind):
    """It draws from PyTorch's global generator, which a new process would find elsewhere."""

    def forgetful():
        learner = make(kind)
        learner.model.append(torch.nn.Dropout(0.5))
        return learner

    torch.manual_seed(3)
    whole, batches = forgetful(), list(stream(8))
    for x, y in batches[:5]:
        whole.observe(x, y)
    whole.save(path)
    losses = [whole.observe(x, y) for x, y in batches[5:]]
    torch.manual_seed(4)
    other = forgetful()
    assert [other.observe(x, y) for x, y in batches[5:]] != losses  # the test would notice
    resumed = forgetful()
    resumed.load(path)
    assert [resumed.observe(x, y) for x, y in batches[5:]] == losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


def test_the_global_generators_of_another_kind_of_device(path):
    one, other = make(), make()
    state = one.state_dict()
    state["global"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    before = repr(other.state_dict())
    with pytest.raises(hf.UsageError, match="of cpu and cuda, here they are of cpu: continue on the kind of device"):
        other.load_state_dict(state)
    assert repr(other.state_dict()) == before


def test_the_generator_of_random_views_continues(path):
    def pictures(seed):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
        with torch.no_grad():
            model[1].weight.fill_(0.1)
            model[1].bias.zero_()
        view = CropFlip(Normalize(), generator(seed, "augment"))
        return hf.ExperienceReplay(model, torch.optim.Adam(model.parameters()), buffer_size=9, augment=view)

    x, y = torch.arange(768).remainder(256).to(torch.uint8).view(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    one, other = pictures(0), pictures(1)
    one.observe(x, y)
    one.save(path)
    other.load(path)
    assert one.observe(x, y) == other.observe(x, y)


def test_loading_copies_in_place_and_shares_nothing():
    one, other = make(), make()
    for x, y in stream(3):
        one.observe(x, y)
        other.observe(y=y, x=x * 2)
    tensors = [*other.model.parameters(), *other.buffer._storage.columns, other.buffer.seen]
    addresses = [value.data_ptr() for value in tensors]
    other.load_state_dict(one.state_dict())
    tensors = [*other.model.parameters(), *other.buffer._storage.columns, other.buffer.seen]
    assert addresses == [value.data_ptr() for value in tensors]
    expected = copy.deepcopy(one.state_dict())
    for x, y in stream(2):
        other.observe(x, y)
    assert repr(one.state_dict()) == repr(expected)


def test_bfloat16_twins_follow():
    models = [hf.MODELS["mlp"]((1, 28, 28), 10) for _ in range(2)]
    one, other = (Sgd(model, BfloatTwin(model, 0.1)) for model in models)
    other.load_state_dict(one.state_dict())
    for master, twin in zip(one.optimizer.masters, other.optimizer.twins, strict=True):
        assert torch.equal(master.bfloat16(), twin)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({"buffer_size": 20}, {"buffer_size": 30}, "has 20 slots, this one 30; make it with a buffer size of 20"),
        ({}, {"width": 9}, r"model does not fit this one: 0\.bias is \(8,\) torch\.float32 in the file and \(9,\) "),
        ({}, {"kind": "er"}, "this is a ExperienceReplay, but the saved learner is a ConsistencyReplay"),
        ({}, {"optimizer": momentum}, "the saved optimiser is Adam, this one SGD"),
    ],
    ids=["buffer", "model", "kind", "optimizer"],
)
def test_a_learner_that_does_not_fit_is_left_as_it_was(path, saved, loaded, message):
    one, other = make(**saved), make(**loaded)
    for x, y in stream(3):
        one.observe(x, y)
        other.observe(x + 1, y)
    one.save(path)
    before = repr(other.state_dict())
    with pytest.raises(hf.UsageError, match=message):
        other.load(path)
    assert repr(other.state_dict()) == before


def test_buffers_that_do_not_fit():
    def filled(width, dtype=torch.float32):
        buffer = hf.Reservoir(5)
        buffer.add(torch.ones(3, width, dtype=dtype), torch.zeros(3))
        return buffer

    for other in (filled(3), filled(2, torch.float64)):
        before = repr(other.state_dict())
        with pytest.raises(hf.UsageError, match="saved samples do not fit the buffer"):
            other.load_state_dict(filled(2).state_dict())
        assert repr(other.state_dict()) == before
    with pytest.raises(hf.UsageError, match="contradicts itself"):
        filled(2).load_state_dict({**filled(2).state_dict(), "offered": 2})
    with pytest.raises(hf.UsageError, match="random state is not one of a generator"):
        filled(2).load_state_dict({**filled(2).state_dict(), "generator": torch.zeros(16, dtype=torch.uint8)})


def test_an_optimiser_of_other_parameters(path):
    one, other = make(), make()
    other.optimizer = torch.optim.Adam(list(other.model.parameters())[:2])
    one.save(path)
    with pytest.raises(hf.UsageError, match=r"optimiser does not fit .* \[6\] parameters, this one \[2\]"):
        other.load(path)


@pytest.mark.parametrize("sizes", [(6, 3), (6, 6)])
def test_an_optimiser_of_the_same_parameters_in_another_order(path, sizes):
    """Also where all shapes fit, so that only the momenta would be those of other parameters."""
    layers = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(*sizes, bias=False))
    one, other = (
        hf.ExperienceReplay(model, torch.optim.Adam(list(model.parameters())[::order]), buffer_size=9)
        for model, order in ((layers, 1), (copy.deepcopy(layers), -1))
    )
    for x, y in stream(3):
        one.observe(x, y)
        other.observe(x + 1, y)
    one.save(path)
    before = repr(other.state_dict())
    with pytest.raises(hf.CheckpointError, match=r"parameter 0 of its group 0 is 0\.weight, of this one 1\.weight"):
        other.load(path)
    assert repr(other.state_dict()) == before


def test_an_optimiser_with_layers_of_the_method_and_parameters_from_elsewhere(path):
    def ballast(shapes):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        others = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = torch.optim.Adam([*model.parameters(), *others])
        return hf.LEARNERS["ballast"](model, optimizer, buffer_size=9, turn=1.0)

    ballast([2, 3]).save(path)
    names = checkpoint.read(path, "learner").state["learner"]["optimizer"]["names"]
    assert names == [["1.weight", "1.bias", "one of shape (2,)", "one of shape (3,)", "turned.weight", "turned.bias"]]
    ballast([2, 3]).load(path)
    with pytest.raises(hf.CheckpointError, match="parameter 2 of its group 0 is one of shape"):
        ballast([3, 2]).load(path)
