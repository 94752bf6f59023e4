"""The loop: what it yields, what it returns, and that one config has one result."""

import math
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

import holdfast as hf
from holdfast.benchmarks import make_benchmark
from holdfast.data import Dataset, ImageSet, data_root, load
from holdfast.devices import choose_device
from holdfast.errors import UsageError
from holdfast.learners import LEARNERS
from holdfast.regularizers import REGULARIZERS
from holdfast.rng import own_generators
from holdfast.run_state import Checkpointer
from holdfast.training import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mnist() -> Dataset:
    return load("mnist")


@pytest.fixture
def small(mnist, monkeypatch) -> Dataset:
    """The first digits of MNIST in place of all of them."""
    data = Dataset(
        ImageSet(mnist.train.images[:2000], mnist.train.labels[:2000]),
        ImageSet(mnist.test.images[:500], mnist.test.labels[:500]),
        10,
    )
    for file in ("class_incremental", "domain_incremental", "mnist360"):
        monkeypatch.setattr(f"holdfast.benchmarks.{file}.shared_dataset", lambda name, root: data)
    return data


@pytest.fixture
def whole(mnist, monkeypatch) -> None:
    """All of MNIST, read from its files once for this module."""
    monkeypatch.setattr("holdfast.benchmarks.domain_incremental.shared_dataset", lambda name, root: mnist)


def config(method: str = "mse", benchmark: str = "rot-mnist", **changes) -> hf.RunConfig:
    return hf.RunConfig.preset(benchmark, method, **{"tasks": 2, "train_limit": 500, **changes})


def run(config: hf.RunConfig, **options) -> hf.RunResult:
    return hf.run(config, device="cpu", **options)


def assert_identical(one: hf.RunResult, other: hf.RunResult) -> None:
    """Bit for bit."""
    for name in ("weights", "logits"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.keys() == theirs.keys()
        assert mine
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
    for name in ("matrix", "task_matrix", "untrained"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)


def differ(one: hf.RunResult, other: hf.RunResult) -> bool:
    return any(not torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("method", ["sgd", "er", "mse"])
def test_one_config_one_result(whole, method):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = run(config(method))
        torch.manual_seed(2)  # nothing global has a say
        torch.rand(17)
        assert_identical(first, run(config(method)))


@pytest.mark.parametrize("method", ["joint", "linf", "simclr"])
def test_one_config_one_result_on_few_digits(small, method):
    assert_identical(run(config(method)), run(config(method)))


@pytest.mark.parametrize("benchmark", ["seq-mnist", "perm-mnist", "mnist-360"])
def test_every_small_benchmark_runs_and_repeats(small, benchmark):
    tasks = {"seq-mnist": 5, "perm-mnist": 2, "mnist-360": 1}[benchmark]
    first, second = (run(config("er", benchmark, tasks=tasks)) for _ in range(2))
    assert_identical(first, second)
    assert first.matrix.shape == (tasks, tasks)
    assert first.timing["steps"] > 0


def test_seeds_differ(small):
    first, second = run(config(seed=0)), run(config(seed=1))
    assert differ(first, second)
    assert not torch.equal(first.untrained, second.untrained)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.05},
        {"alpha": 0.25},
        {"beta": 0.25},
        {"batch_size": 64},
        {"replay_size": 64},
        {"buffer_size": 100},
        {"epochs": 2},
        {"method": "l2"},
        {"train_limit": 400},
        {"seed": 1},
        {"precision": "bfloat16"},
        {"method": "simclr", "options": (("temperature", 0.1),)},
    ],
    ids=str,
)
def test_every_setting_has_an_effect(small, change):
    plain = config(train_limit=300)
    if "options" in change:
        plain = plain.change(method=change["method"])
    assert differ(run(plain), run(plain.change(**change)))


def test_matrix_holds_what_was_seen_and_the_next_task(small):
    result = run(config("er", tasks=4, train_limit=200))
    for matrix in (result.matrix, result.task_matrix):
        assert matrix.shape == (4, 4)
        assert matrix.dtype == torch.float64
        for i in range(4):
            for j in range(4):
                assert math.isnan(matrix[i, j]) == (j > i + 1)
    measured = result.matrix[~result.matrix.isnan()]
    assert ((measured >= 0) & (measured <= 100)).all()
    assert not result.untrained.isnan().any()
    for value in (result.accuracy, result.forward_transfer, result.backward_transfer, result.forgetting):
        assert math.isfinite(value)


def test_task_il_is_easier_than_class_il_where_tasks_have_classes_of_their_own(small):
    result = run(config("sgd", "seq-mnist", tasks=5, train_limit=None))
    assert (result.task_matrix[-1] >= result.matrix[-1]).all()
    assert result.task_il_accuracy > result.accuracy + 20
    one = run(config("sgd", "rot-mnist"))  # all classes in every task: the two are one
    assert torch.equal(one.matrix, one.task_matrix)


def test_logits_and_weights_are_those_of_the_final_model(small):
    result = run(config("er"))
    model = hf.MODELS["mlp"]((1, 28, 28), 10)
    model.load_state_dict(result.weights)
    benchmark = make_benchmark(result.config, data_root(None))
    for number, task in enumerate(benchmark.tasks):
        assert torch.equal(result.logits[f"labels.{number}"], task.test.labels)
        logits = result.logits[f"logits.{number}"]
        torch.testing.assert_close(logits, model(task.test.images / 255).detach())
        hits = (logits.argmax(1) == task.test.labels).double().mean()
        assert float(result.matrix[-1, number]) == pytest.approx(100 * float(hits))


def test_first_row_is_a_run_of_one_task(small):
    """Training does not look ahead: a run of one task is the beginning of a longer one."""
    short, long = run(config(tasks=1)), run(config(tasks=3))
    assert short.matrix[0, 0] == long.matrix[0, 0]
    assert short.untrained[0] == long.untrained[0]


def test_joint_has_one_row_and_sees_everything_every_epoch(small, monkeypatch):
    seen = []
    original = LEARNERS["joint"].observe

    def observe(self, x, y):
        seen.append(x.clone())
        return original(self, x, y)

    monkeypatch.setattr(LEARNERS["joint"], "observe", observe)
    settings = config("joint", tasks=3, train_limit=100, epochs=2)
    result = run(settings)
    assert result.matrix.shape == (1, 3)
    assert not result.matrix.isnan().any()
    everything = make_benchmark(settings, data_root(None)).joint().images
    assert result.timing["steps"] == len(seen) == 2 * math.ceil(300 / settings.batch_size)
    half = len(seen) // 2
    for epoch in (seen[:half], seen[half:]):
        assert sorted(x.numpy().tobytes() for x in torch.cat(epoch)) == sorted(x.numpy().tobytes() for x in everything)
    assert math.isfinite(result.accuracy)
    assert math.isnan(result.forward_transfer)
    assert math.isnan(result.backward_transfer)
    assert math.isnan(result.forgetting)


def test_tasks_come_in_order_each_sample_once_an_epoch(small, monkeypatch):
    seen = []
    original = LEARNERS["sgd"].observe

    def observe(self, x, y):
        seen.append(x.clone())
        return original(self, x, y)

    monkeypatch.setattr(LEARNERS["sgd"], "observe", observe)
    settings = config("sgd", train_limit=150, epochs=2, batch_size=40)
    run(settings)
    assert [len(x) for x in seen] == [40, 40, 40, 30] * 4
    tasks = make_benchmark(settings, data_root(None)).tasks
    orders = set()
    for number in range(4):
        epoch = [x.numpy().tobytes() for x in torch.cat(seen[4 * number : 4 * number + 4])]
        expected = [x.numpy().tobytes() for x in tasks[number // 2].train().images]
        assert sorted(epoch) == sorted(expected)
        orders.add(tuple(expected.index(sample) for sample in epoch))
    assert len(orders) == 4  # shuffled anew every epoch


def test_memory_holds_the_training_data_of_one_task_at_a_time(small):
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(make: Callable[[], ImageSet]) -> ImageSet:
        assert all(images() is None for images in made)
        data = make()
        made.append(weakref.ref(data.images))
        return data

    settings = config(tasks=3)
    benchmark = make_benchmark(settings, data_root(None))
    tasks = [replace(task, train=partial(watched, task.train)) for task in benchmark.tasks]
    run(settings, benchmark=replace(benchmark, tasks=tuple(tasks)))
    assert len(made) == 3


@pytest.mark.parametrize("method", ["sgd", "er", "mse"])
def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(small, method):
    settings = config(method, lr=1e6)
    with pytest.raises(hf.TrainingError) as caught:
        run(settings)
    message = str(caught.value)
    assert settings.title in message
    assert re.search(r"task 1\b", message)
    assert re.search(r"step [1-8] \(total \S+, current [^)]+\)", message)
    assert re.search(r"nan|inf", message)
    assert "smaller learning rate" in message


def test_task_of_a_late_failure(small, monkeypatch):
    """The loss breaks at step 6, which is the second step of the second task."""
    original = LEARNERS["sgd"].observe
    steps = []

    def observe(self, x, y):
        steps.append(1)
        losses = original(self, x, y)
        return hf.Losses(losses.total, current=losses.current * (math.nan if len(steps) == 6 else 1))

    monkeypatch.setattr(LEARNERS["sgd"], "observe", observe)
    with pytest.raises(hf.TrainingError, match=r"task 2: .*step 6 \(total [\d.]+, current nan"):
        run(config("sgd"))


def test_progress(small):
    steps, fractions, tasks, rows = [], [], [], []

    def watch(progress):
        steps.append(progress.step)
        fractions.append(progress.fraction)
        tasks.append(progress.task)
        rows.append(progress.row)
        assert progress.stages == 3

    result = run(config("sgd", tasks=3, train_limit=150, batch_size=40, epochs=2), on_step=watch)
    # Eight steps a task, and once more after its evaluation.
    assert steps == [*range(1, 9), 8, *range(9, 17), 16, *range(17, 25), 24]
    assert tasks == [0] * 9 + [1] * 9 + [2] * 9
    assert fractions == sorted(fractions)
    assert fractions[0] > 0
    assert fractions[-1] == pytest.approx(1)
    assert fractions[7] == pytest.approx(1 / 3)
    assert result.timing["steps"] == 24
    assert rows[7] is None
    assert rows[8] == result.matrix[0, :2].tolist()
    assert rows[-1] == result.matrix[2].tolist()


def test_losses_are_told_now_and_then(small):
    told = []
    run(config("mse", batch_size=8), on_step=lambda progress: told.append(progress.losses))
    assert told[48] is None
    assert set(told[-1]) == {"total", "current", "replay", "consistency"}
    assert told[-1]["replay"] > 0
    assert told[-1]["consistency"] > 0
    assert all(math.isfinite(value) for value in told[-1].values())


class Normalised(torch.nn.Sequential):
    """A network other than the MLP, which chooses its number of threads itself."""

    def __init__(self, shape, classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, classes), torch.nn.BatchNorm1d(classes))


@pytest.mark.parametrize("model", ["mlp", "normalised"])
def test_nothing_global_is_disturbed(small, model, monkeypatch):
    monkeypatch.setitem(hf.MODELS._entries, "normalised", Normalised)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            state = torch.get_rng_state()
            run(config(train_limit=100, model=model))
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.get_num_threads() == 2
            assert torch.is_grad_enabled()
            assert torch.get_default_dtype() == torch.float32
            with pytest.raises(hf.TrainingError):
                run(config(train_limit=300, lr=1e6))
            assert torch.get_num_threads() == 2
            assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(before)


class Forgetful(torch.nn.Module):
    """A network that draws from PyTorch's global generator, in layers and in functions."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.2), torch.nn.Linear(784, classes))

    def forward(self, x):
        return torch.nn.functional.dropout(self.layers(x), 0.5, self.training)


@pytest.fixture
def forgetful(monkeypatch):
    monkeypatch.setitem(hf.MODELS._entries, "forgetful", Forgetful)


def disturb(_=None):
    """What else happens in the process draws as well."""
    torch.rand(3)


@pytest.mark.parametrize("method", ["sgd", "er", "mse"])
def test_dropout_is_part_of_what_a_config_says(small, forgetful, method):
    settings = config(method, model="forgetful", epochs=2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = run(settings)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert_identical(first, run(settings, on_step=disturb))
    assert differ(first, run(config(method, model="forgetful", epochs=2, seed=1)))


def test_dropout_is_really_random(small, forgetful, monkeypatch):
    """Another state to begin with would give another result."""
    settings = config("sgd", model="forgetful")
    first = run(settings)
    monkeypatch.setattr("holdfast.run_state.own_generators", lambda seed, *rest: own_generators(seed + 1, *rest))
    assert differ(first, run(settings))


def test_a_network_that_draws_nothing_is_left_alone_after_a_while(small, monkeypatch):
    turns = []
    monkeypatch.setattr("holdfast.run_state.swapped_globally", lambda *_: nullcontext(turns.append(1)))
    assert run(config(batch_size=8)).timing["steps"] > 100
    assert len(turns) == 50


def test_a_run_that_continues_is_left_alone_after_a_while_too(small, monkeypatch, tmp_path):
    """Its checkpoint has the global generators' states of another process, which says nothing about its network."""
    settings, path = config(batch_size=8), tmp_path / "run.safetensors"
    stream = make_benchmark(settings, data_root(None))
    first = train(settings, stream, CPU, Checkpointer(path, settings, CPU, every=0))
    while next(first).step < 60:
        torch.rand(1)  # as anybody may between two steps
    first.close()
    turns = []
    monkeypatch.setattr("holdfast.run_state.swapped_globally", lambda *_: nullcontext(turns.append(1)))
    run(settings, benchmark=stream, checkpoint=path)
    assert len(turns) == 50


def test_runs_in_threads_have_the_results_they_have_alone(small, forgetful):
    settings = [config("mse", model="forgetful", seed=seed) for seed in range(2)] + [config("er")]
    before, alone = torch.get_rng_state(), [run(setting, threads=1) for setting in settings]
    with ThreadPoolExecutor(3) as pool:
        for first, second in zip(alone, pool.map(partial(run, threads=1), settings), strict=True):
            assert_identical(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_nobody_goes_on_with_holds_nobody_up(small, forgetful):
    settings = config("mse", model="forgetful")
    benchmark = make_benchmark(settings, data_root(None))
    with ThreadPoolExecutor(1) as pool, closing(train(settings, benchmark, CPU)) as left:
        for _ in range(3):
            next(left)
        assert_identical(pool.submit(run, settings, threads=1).result(60), run(settings, threads=1))
        assert next(left).step == 4


def test_convolutions_of_any_rank(small, monkeypatch):
    """Those over images compute with channels last; others are as they were."""
    seen = set()

    class Deep(torch.nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.volume, self.image = torch.nn.Conv3d(1, 2, (1, 3, 3)), torch.nn.Conv2d(2, 4, 3)
            self.classifier = torch.nn.Linear(4, classes)

        def forward(self, x):
            seen.add(self.image.weight.is_contiguous(memory_format=torch.channels_last))
            return self.classifier(self.image(self.volume(x[:, None]).squeeze(2)).amax((2, 3)))

    monkeypatch.setitem(hf.MODELS._entries, "deep", Deep)
    config = hf.RunConfig.preset("rot-mnist", "mse", buffer_size=20, tasks=1, train_limit=256, model="deep")
    assert hf.run(config, device="cpu").accuracy > 0
    assert seen == {True}


def test_threads_can_be_chosen(small):
    assert run(config(train_limit=100), threads=2).environment["threads"] == 2
    assert run(config(train_limit=100)).environment["threads"] == 1  # the small network's own choice


@pytest.mark.parametrize("model", ["mlp", "forgetful"])
def test_runs_can_be_interleaved(small, forgetful, model):
    settings = [config("mse"), config("er", seed=1, batch_size=64), config("sgd", seed=2), config("sgd", model=model)]
    settings = [replace(setting, model=model) for setting in settings]

    def start(setting):
        return train(setting, make_benchmark(setting, data_root(None)), CPU)

    def finish(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    alone = [finish(start(setting)) for setting in settings]
    running = {number: start(setting) for number, setting in enumerate(settings)}
    together = {}
    while running:
        for number in list(running):
            try:
                next(running[number])
            except StopIteration as end:
                together[number] = end.value
                del running[number]
    for number, result in enumerate(alone):
        assert_identical(result, together[number])


def test_an_interrupted_run_does_no_harm_to_the_next(small):
    class StopNow(Exception):
        pass

    def stop(progress):
        if progress.step == 3:
            raise StopNow

    expected = run(config())
    threads = torch.get_num_threads()
    with pytest.raises(StopNow):
        run(config(), on_step=stop)
    assert torch.get_num_threads() == threads
    assert_identical(expected, run(config()))


def test_replay_beats_plain_training_on_the_first_task(whole):
    kept, lost = (run(config(method, tasks=3, train_limit=6000)) for method in ("mse", "sgd"))
    assert kept.matrix[-1, 0] > lost.matrix[-1, 0] + 10
    assert kept.accuracy > lost.accuracy
    assert kept.forgetting < lost.forgetting
    assert kept.matrix[0, 0] > 70  # it learned something in the first place


def test_result_tells_how_it_came_about(small):
    result = run(config())
    assert result.config == config()
    assert result.seconds > 0
    assert {"setup", "data", "training", "evaluation", "steps", "steps_per_second"} <= result.timing.keys()
    assert result.environment["torch"] == torch.__version__
    assert result.environment["device_type"] == "cpu"


def test_devices():
    assert choose_device("cpu") == CPU
    with pytest.raises(hf.UsageError, match="unknown device 'tpu'"):
        choose_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device():
    assert choose_device("auto") == CPU
    for name in ("cuda", "cuda:1"):
        with pytest.raises(hf.UsageError, match="no CUDA device"):
            choose_device(name)


def test_unknown_names():
    for change, kind in (
        ({"method": "ms"}, "method"),
        ({"benchmark": "rot-mnits"}, "benchmark"),
        ({"model": "mpl"}, "model"),
    ):
        with pytest.raises(hf.UsageError, match=f"unknown {kind} .*did you mean"):
            run(config(train_limit=100).change(**change))


def test_a_method_is_told_where_tasks_begin_and_end(small, monkeypatch):
    """Once per task, with its classes and its training samples; on a stream without boundaries, never."""
    told = []

    class Told(LEARNERS["sgd"]):
        def begin_task(self, classes):
            told.append(("begin", classes))

        def end_task(self, x, y):
            told.append(("end", len(x), sorted(set(y.tolist()))))

    monkeypatch.setitem(LEARNERS._entries, "told", Told)
    settings = config("told", benchmark="seq-mnist", tasks=5)
    benchmark = make_benchmark(settings, data_root(None))
    run(settings, benchmark=benchmark)
    sizes = [len(task.train().labels) for task in benchmark.tasks]
    expected = []
    for task, size in zip(benchmark.tasks, sizes, strict=True):
        expected += [("begin", task.classes), ("end", size, list(task.classes))]
    assert told == expected
    told.clear()
    run(config("told", benchmark="mnist-360", tasks=1, train_limit=200))
    assert not told


def test_a_method_that_needs_boundaries_says_so():
    with pytest.raises(UsageError, match=r"lwf must be told where tasks begin and end, and mnist-360 has no such"):
        run(hf.RunConfig.preset("mnist-360", "lwf", train_limit=100))


def test_options_that_nobody_reads_are_refused(small, monkeypatch):
    class Mine(LEARNERS["er"]):
        """A plugin's learner."""

    monkeypatch.setitem(LEARNERS._entries, "mine", Mine)
    with pytest.raises(UsageError, match=r"mine has no regularizer, and so no option regularizer\.temperature"):
        run(config("mine", options=(("temperature", 0.1),)))
    with pytest.raises(UsageError, match="unknown setting of mine 'decay'"):
        run(config("mine", settings=(("decay", 0.1),)))


def test_settings_of_a_method_reach_it(small):
    one, other = (run(config("clser", settings=(("stable_decay", value),))) for value in (0.9, 0.5))
    assert one.config.fingerprint != other.config.fingerprint
    assert differ(one, other)


def test_a_learner_cannot_take_the_name_of_a_regularizer():
    with pytest.raises(UsageError, match="mse"):
        LEARNERS.register("mse")(LEARNERS["er"])
    with pytest.raises(UsageError, match="clser"):
        REGULARIZERS.register("clser")(lambda current, stored: current.sum())
