"""On a GPU, a run that was stopped and continued equals the one that was not, up to the order in which kernels add."""

import copy

import pytest
import torch

import holdfast as hf
from fleets import run_fleet
from holdfast.bench import made_up
from holdfast.benchmarks import make_benchmark
from holdfast.data import data_root
from holdfast.engine import BfloatTwin
from holdfast.run_state import Checkpointer
from holdfast.training import _prepare, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler and its watch over synchronisation warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    """Kernels that add in a fixed order, so that the same step gives the same bits."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(autouse=True)
def _stream():
    """Steps are captured in CUDA graphs, which the default stream does not allow."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


class At(Checkpointer):
    """Writes the state once, after a given step of the run."""

    def __init__(self, path, config, step):
        super().__init__(path, config, DEVICE)
        self.step, self.done = step, False

    def due(self):
        return not self.done

    def save(self, state):
        if state.progress.step == self.step:
            super().save(state)
            self.done = True


def finish(config, stream, keeper=None, *, stop=None):
    """The result of a run, or None if it is abandoned after step `stop`."""
    running = train(config, stream, DEVICE, keeper)
    while True:
        try:
            if next(running).step == stop:
                return None
        except StopIteration as end:
            return end.value


def assert_close(got, expected, rtol, atol):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("method", ["sgd", "er", "mse", "simclr", "agem", "clser", "lwf"])
def test_rot_mnist_stopped_twice(tmp_path, method):
    """In the second task too; the last minibatch of each is short, so there are several graphs."""
    config = hf.RunConfig.preset("rot-mnist", method, buffer_size=50, tasks=2, train_limit=3000)
    stream, path = make_benchmark(config, data_root(None), DEVICE), tmp_path / "run.safetensors"
    expected = finish(config, stream)
    steps = int(expected.timing["steps"])
    for stop in (steps // 3, steps * 3 // 4):
        assert finish(config, stream, At(path, config, stop), stop=stop) is None
    result = finish(config, stream, Checkpointer(path, config, DEVICE))
    assert result.timing["steps"] == steps
    assert_close(result.weights, expected.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.matrix, expected.matrix, rtol=0, atol=0.2, equal_nan=True)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["er", "linf", "clser"])
def test_a_convolutional_network_with_random_views(tmp_path, method, precision):
    """Compiled, captured, and in bfloat16 through a twin of the network, which must follow the loaded weights."""
    config = hf.RunConfig.preset("seq-cifar10", method, buffer_size=40).change(
        tasks=1, epochs=3, batch_size=32, precision=precision, lr=0.01
    )
    stream, path = made_up(config, samples=256), tmp_path / "run.safetensors"
    expected = finish(config, stream)
    assert expected.timing["steps"] == 24
    assert finish(config, stream, At(path, config, 17), stop=17) is None  # the buffer is full, its graph captured
    result = finish(config, stream, Checkpointer(path, config, DEVICE))
    assert_close(result.weights, expected.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_state_loaded_into_steps_that_are_already_captured(precision):
    """Everything is put back in place: weights, twin, buffer, generators. Graphs read where they were captured."""
    config = hf.RunConfig.preset("seq-cifar10", "mse", buffer_size=40).change(tasks=1, precision=precision, lr=0.01)
    stream = made_up(config, samples=256)
    order = [torch.randperm(256, device=DEVICE)[: config.batch_size] for _ in range(24)]

    def prepared(seed):
        engine, _ = _prepare(config.change(seed=seed), stream, DEVICE)
        engine.load(stream.tasks[0].train(), stream.classes)
        return engine.learner, engine

    (one, first), (other, second) = prepared(0), prepared(1)
    for indices in order[:16]:
        first.step(indices)
        second.step(indices.flip(0))
    assert DEVICE.type != "cuda" or second._graphs
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    if isinstance(other.optimizer, BfloatTwin):
        for master, twin in zip(one.optimizer.masters, other.optimizer.twins, strict=True):
            assert torch.equal(master.bfloat16(), twin)
    for indices in order[16:]:
        first.step(indices)
        second.step(indices)
    assert_close(other.model.state_dict(), one.model.state_dict(), rtol=1e-2, atol=1e-3)
    for mine, theirs in zip(other.buffer.contents()[:2], one.buffer.contents()[:2], strict=True):
        assert torch.equal(mine, theirs)


def test_dropout_continues(tmp_path):
    """It draws from the GPU's global generator."""

    def forgetful():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).to(DEVICE)
        return hf.ConsistencyReplay(model, torch.optim.Adam(model.parameters()), buffer_size=20)

    batches = [(torch.rand(12, 6, device=DEVICE), torch.arange(12, device=DEVICE) % 3) for _ in range(8)]
    whole = forgetful()
    for x, y in batches[:5]:
        whole.observe(x, y)
    whole.save(tmp_path / "kept")
    losses = [whole.observe(x, y) for x, y in batches[5:]]
    resumed = forgetful()
    resumed.load(tmp_path / "kept")
    assert [resumed.observe(x, y) for x, y in batches[5:]] == losses


@pytest.mark.parametrize("place", ["host", "folder"])
def test_buffers_outside_the_device(tmp_path, place):
    """Samples come back to the device, and are those a buffer on it would give."""
    storage = tmp_path / "buffer" if place == "folder" else place
    one, other = (
        hf.Reservoir(20, generator=torch.Generator(DEVICE).manual_seed(0), storage=each) for each in ("device", storage)
    )
    for step in range(10):
        x = torch.full((8, 3, 4), step, dtype=torch.uint8, device=DEVICE)
        for buffer in (one, other):
            buffer.add(x, torch.arange(8, device=DEVICE), torch.rand(8, 5, device=DEVICE) * 0 + step)
        for mine, theirs in zip(one.sample(5), other.sample(5), strict=True):
            assert theirs.device.type == DEVICE.type
            assert torch.equal(mine, theirs)


def test_a_fleet_that_is_stopped_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.sweep.runner.REPORT", -1.0)  # runs report every step
    methods, steps = ("er", "mse", "clser"), []
    configs = [hf.RunConfig.preset("rot-mnist", m, buffer_size=50, tasks=2, train_limit=3000) for m in methods]

    def stop(runner, event):
        if event.kind == "moved":
            steps.append(event.config)
            if len(steps) == 15 * len(configs):
                runner.request_stop()

    with pytest.raises(KeyboardInterrupt):
        run_fleet(configs, tmp_path, size=3, device="cuda", watch=stop)
    saved = {path.stem for path in (tmp_path / ".checkpoints").iterdir()}
    assert saved == {config.fingerprint for config in configs}
    found = run_fleet(configs, tmp_path, size=3, device="cuda")
    assert found.keys() == set(configs)
    for config, result in found.items():
        alone = hf.run(config, device="cuda")
        assert_close(result.weights, alone.weights, rtol=1e-3, atol=1e-4)
