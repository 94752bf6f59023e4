"""What only a GPU shows: captured steps equal eager ones, a fleet equals its runs alone, no step waits for the host."""

from dataclasses import replace

import pytest
import torch

from fleets import run_fleet
from holdfast.bench import made_up
from holdfast.benchmarks import make_benchmark
from holdfast.config import RunConfig
from holdfast.data import ImageSet
from holdfast.devices import choose_device
from holdfast.engine import BfloatTwin, CapturedEngine, Engine
from holdfast.learners import settings_for
from holdfast.learners.averages import follow
from holdfast.models import MODELS, ResNet18
from holdfast.pure import compiled_calls
from holdfast.regularizers import REGULARIZERS
from holdfast.training import run, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler and its watch over synchronisation warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


FIELD = ["agem", "ballast", "clser", "der", "dualnet", "er-ace", "esmer", "ewc", "fdr", "gem", "icarl", "lwf", "si"]


def short(benchmark: str, method: str, **changes) -> RunConfig:
    return RunConfig.preset(benchmark, method, buffer_size=40).change(**{"tasks": 1, "epochs": 100, **changes})


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """Kernels that add in a fixed order, so that the same step gives the same bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def weights_after(config: RunConfig, engine) -> dict[str, torch.Tensor]:
    """The model's state after a run on 200 made-up samples, executed by the engine `engine` makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.training.make_engine", engine)
        return run(config, benchmark=made_up(config, samples=200), device="cuda").weights


def eager(learner, device, generators, batch_size):
    return Engine(learner, device)


def captured(learner, device, generators, batch_size):
    return CapturedEngine(learner, device, generators, batch_size=batch_size, compiled=False)


@pytest.mark.parametrize("method", ["sgd", "er", "mse", "simclr", *FIELD])
@pytest.mark.parametrize("name", ["rot-mnist", "seq-cifar10"])
def test_captured_steps_equal_eager_ones(name, method):
    # 200 samples in batches of 48: a short last batch every fifth step, so several graphs share the generators.
    config = short(name, method, batch_size=48, replay_size=16, precision="float32", epochs=10)
    expected, got = weights_after(config, eager), weights_after(config, captured)
    for part, tensor in expected.items():
        torch.testing.assert_close(got[part], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, part=part: f"{part}: {m}")


@pytest.mark.parametrize(
    "idea",
    [["hold_features=5", "teacher=0.9"], ["turn=1"], ["turn=1", "looks=angles", "adjusted=true"]],
    ids=str,
)
def test_captured_steps_that_need_features(idea):
    """Passes ask the networks for more than their outputs; turned images have a generator of their own."""
    config = short("seq-cifar10", "ballast", batch_size=48, replay_size=16, precision="float32", epochs=10)
    config = config.parse(idea, settings_for(config))
    expected, got = weights_after(config, eager), weights_after(config, captured)
    for part, tensor in expected.items():
        torch.testing.assert_close(got[part], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, part=part: f"{part}: {m}")


def test_tasks_of_unequal_size():
    """Their samples lie elsewhere, so steps are captured anew."""
    config = RunConfig.preset("seq-mnist", "mse", buffer_size=40, train_limit=None, tasks=3).change(lr=0.01)
    data = made_up(config, samples=200)
    full = data.tasks[0].train()
    sizes = iter((200, 150, 180, 200, 150, 180))

    def train() -> ImageSet:
        count = next(sizes)
        return ImageSet(full.images[:count], full.labels[:count])

    data = replace(data, tasks=tuple(replace(task, train=train) for task in data.tasks))
    found = []
    for engine in (eager, captured):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.training.make_engine", engine)
            found.append(run(config, benchmark=data, device="cuda").weights)
    for name, tensor in found[0].items():
        torch.testing.assert_close(
            found[1][name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("method", ["lwf", "fdr", "icarl"])
def test_task_hooks_drop_the_graphs(method):
    """What the first task leaves behind, a network or samples, is new to the second: steps captured before lack it."""
    size = None if method == "lwf" else 40
    config = RunConfig.preset("seq-mnist", method, buffer_size=size, tasks=2, epochs=4)
    config = config.change(lr=0.01, batch_size=50, train_limit=200)
    expected, got = weights_after(config, eager), weights_after(config, captured)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "changes", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"optimizer": "adam"}, {"schedule": "cosine"}], ids=str
)
def test_optimisers_and_schedules_in_captured_steps(changes):
    config = short("rot-mnist", "er", batch_size=48, lr=0.01, epochs=10, **changes)
    expected, got = weights_after(config, eager), weights_after(config, captured)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_a_learner_that_waits_for_the_device_runs_eagerly(monkeypatch, caplog):
    def curious(current, stored):
        return (current - stored).square().mean() * float(stored.shape[0] > 0 and stored.sum().item() < 1e9)

    monkeypatch.setitem(REGULARIZERS._entries, "curious", curious)
    config = short("rot-mnist", "curious", epochs=8)  # the fourth step of a kind is captured
    expected, got = weights_after(config, eager), weights_after(config, captured)
    assert "cannot be captured" in caplog.text
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def compiled(learner, device, generators, batch_size):
    return CapturedEngine(learner, device, generators, batch_size=batch_size, compiled=True)


@pytest.mark.parametrize("network", [False, True], ids=["parts", "all"])
def test_compiled_steps_equal_eager_ones(network, monkeypatch):
    monkeypatch.setattr(ResNet18, "compiles", network)
    # A step moves weights by 2e-4 at this rate, and rounding grows to 3e-5 in eight; at 0.03 it grows to 1e-2.
    config = short("seq-cifar10", "mse", precision="float32", epochs=1, lr=0.001)
    expected, got = weights_after(config, eager), weights_after(config, compiled)
    for name, tensor in expected.items():
        rtol, atol = (1e-2, 1e-3) if "running" in name else (0, 1e-4)
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_compiled_update_of_the_bfloat16_twin(decay):
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        twin = BfloatTwin(ResNet18((3, 8, 8), 10, width=8).cuda(), 0.1, decay)
        for parameter in twin.trained():
            parameter.grad = torch.randn_like(parameter)
        with compiled_calls(compiled):
            twin.step()
        found.append([*twin.masters, *twin.twins])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_move_of_an_average():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        average, model = (ResNet18((3, 8, 8), 10, width=8).cuda() for _ in range(2))
        with compiled_calls(compiled):
            follow(average, model, torch.tensor(0.3, device="cuda"))
        found.append(list(average.parameters()))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("method", ["er", "linf", "agem", "clser", "lwf"])
def test_no_step_waits_for_the_host(method):
    config = short("seq-cifar10", method)
    with torch.cuda.stream(torch.cuda.Stream()):
        running = train(config, made_up(config, samples=3200), torch.device("cuda"))
        for _ in range(30):
            next(running)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(40):  # the log is read at step 250
                next(running)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_fleet_gives_each_run_what_it_gets_alone(tmp_path):
    methods = ("sgd", "er", "mse", "kl")
    configs = [RunConfig.preset("rot-mnist", m, buffer_size=50, tasks=2, train_limit=3000) for m in methods]
    together = run_fleet(configs, tmp_path, size=4, device="cuda")
    for config in configs:
        alone = run(config, device="cuda")
        assert torch.equal(together[config].matrix.nan_to_num(), alone.matrix.nan_to_num())


def test_dropout_in_a_fleet_is_what_it_is_alone(tmp_path, monkeypatch):
    class Dropped(torch.nn.Sequential):
        def __init__(self, shape, classes):
            super().__init__(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(784, classes))

    monkeypatch.setitem(MODELS._entries, "dropped", Dropped)
    first = RunConfig.preset("rot-mnist", "mse", buffer_size=50, tasks=2, train_limit=3000, model="dropped")
    configs = [first, first.change(seed=1), first.change(method="er")]
    together = run_fleet(configs, tmp_path, size=3, device="cuda")
    for config in configs:
        alone = run(config, device="cuda")
        for name, tensor in alone.weights.items():
            torch.testing.assert_close(together[config].weights[name], tensor, msg=lambda m, name=name: f"{name}: {m}")


def test_a_failing_run_leaves_the_others_untouched(tmp_path):
    good = RunConfig.preset("rot-mnist", "er", buffer_size=50, tasks=1, train_limit=3000)
    bad = good.change(lr=1e9, method="mse")
    found = run_fleet([bad, good], tmp_path, size=2, device="cuda")
    assert "no longer finite" in found[bad]
    assert found[good].accuracy == run(good, device="cuda").accuracy


def test_auto_is_the_gpu():
    assert choose_device("auto").type == "cuda"


@pytest.mark.parametrize("name", ["rot-mnist", "perm-mnist", "mnist-360", "seq-mnist"])
def test_tasks_made_on_the_gpu_are_those_made_on_the_cpu(name, tmp_path):
    config = RunConfig.preset(name, "sgd", tasks=None, train_limit=2000)
    here, there = (make_benchmark(config, tmp_path, torch.device(device)) for device in ("cpu", "cuda"))
    for ours, theirs in zip(here.tasks[:3], there.tasks[:3], strict=True):
        assert theirs.test.images.is_cuda
        assert torch.equal(ours.test.images, theirs.test.images.cpu())
        assert torch.equal(ours.train().images, theirs.train().images.cpu())
        assert torch.equal(ours.train().labels, theirs.train().labels.cpu())
