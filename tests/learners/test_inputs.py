"""Inputs of several tensors: the same learning as with their concatenation, and no harm from a wrong minibatch."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import DualNet, EpisodicGem, Icarl, Sgd
from holdfast.nested import leaves
from learners.conftest import CLASSES, Convolutions, assert_same_state, network, plain_copy, stream

LEARNERS = {
    "sgd": Sgd,
    "er": lambda *args, **options: hf.ExperienceReplay(*args, buffer_size=20, **options),
    "consistency": lambda *args, **options: hf.ConsistencyReplay(*args, buffer_size=20, **options),
}


class Halves(nn.Module):
    """A network for images that come as a left and a right half, and something that it does not look at."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        assert list(x) == ["right", "left", "ids"]
        assert x["ids"][0].dtype == torch.int64
        return self.inner(torch.cat([x["left"], x["right"]], dim=3))


def halves(x):
    return {"right": x[..., 3:], "left": x[..., :3], "ids": (torch.arange(len(x)), [x.bool()])}


def make(name, model, **options):
    return LEARNERS[name](model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_dict_teaches_what_its_tensors_teach(name, kind):
    plain, inner = network(kind), network(kind)
    learner = make(name, plain, augment=lambda x: x + 1)
    nested = make(name, Halves(inner), augment=lambda x: x | {side: x[side] + 1 for side in ("left", "right")})
    for x, y in stream(8):
        assert learner.observe(x, y) == nested.observe(halves(x), y)
    assert_same_state(plain, inner, rtol=0, atol=0)


def test_saved_and_loaded(tmp_path):
    learners = [make("consistency", Halves(network("mlp"))) for _ in range(2)]
    batches = list(stream(8))
    for x, y in batches[:4]:
        learners[0].observe(halves(x), y)
    learners[0].save(tmp_path / "file")
    learners[1].load(tmp_path / "file")
    for x, y in batches[4:]:
        assert learners[0].observe(halves(x), y) == learners[1].observe(halves(x), y)


@pytest.mark.parametrize("name", ["er", "consistency"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"left": x["left"][..., :2]}, r"x\['left'\] is \(1, 6, 2\) float64, stored is \(1, 6, 3\)"),
        (lambda x: x | {"left": x["left"].float()}, r"x\['left'\] is \(1, 6, 3\) float32, stored is"),
        (lambda x: {side: x[side] for side in ("left", "right")}, r"x\['ids'\]\[0\] is missing"),
        (lambda x: x | {"left": x["left"][:3]}, r"x\['left'\] has 3"),
        (lambda x: x | {"left": None}, r"x\['left'\] is of type NoneType"),
    ],
)
def test_a_wrong_minibatch_changes_nothing(name, change, message):
    inner = network("batchnorm")
    learner = make(name, Halves(inner))
    for x, y in stream(3):
        learner.observe(halves(x), y)
    before, state = plain_copy("batchnorm", inner), learner.buffer.generator.get_state()
    with pytest.raises(UsageError, match=message):
        learner.observe(change(halves(x)), y)
    assert_same_state(inner, before, rtol=0, atol=0)
    assert torch.equal(learner.buffer.generator.get_state(), state)
    assert learner.buffer.offered == 24
    learner.observe(halves(x), y)


# --- what works in place ---------------------------------------------------------------------------------------------


def brighten(x):
    """A view that works in place, on a tensor or on some of several."""
    if isinstance(x, torch.Tensor):
        return x.add_(1)
    for side in ("left", "right"):
        x[side].add_(1)
    return x


def brightened(x):
    """The same view, of new tensors."""
    return x + 1 if isinstance(x, torch.Tensor) else x | {side: x[side] + 1 for side in ("left", "right")}


@pytest.mark.parametrize("form", ["tensor", "dict"])
@pytest.mark.parametrize("name", ["er", "consistency"])
def test_a_view_that_works_in_place_is_as_good_as_any(name, form):
    """From the first step on: what is stored is what came in, and the caller's tensors stay as they were."""
    shape = halves if form == "dict" else lambda x: x
    models = [network("mlp") if form == "tensor" else Halves(network("mlp")) for _ in range(2)]
    learner, other = make(name, models[0], augment=brighten), make(name, models[1], augment=brightened)
    for x, y in stream(4):
        given = x.clone()
        assert learner.observe(shape(given), y).as_dict() == other.observe(shape(x), y).as_dict()
        assert torch.equal(given, x)
    kept, expected = (leaves(each.buffer.contents().x, "x") for each in (learner, other))
    assert all(torch.equal(kept[part], expected[part]) for part in expected)


@pytest.mark.parametrize("name", ["er", "consistency"])
def test_a_model_that_works_in_place_does_not_change_what_is_stored(name):
    learner = make(name, nn.Sequential(nn.Hardtanh(0, 100, inplace=True), network("mlp")))
    given = list(stream(2))
    for x, y in given:
        learner.observe(x, y)
    expected = torch.cat([x for x, _ in stream(2)])
    assert torch.equal(torch.cat([x for x, _ in given]), expected)
    assert torch.equal(learner.buffer.contents().x, expected)


class Shifted(Convolutions):
    """Works in place on what it is given, or not; `noticed` if autograd needs the values that change."""

    def __init__(self, in_place, noticed):
        super().__init__()
        self.in_place, self.noticed = in_place, noticed

    def features(self, x):
        x = x.sub_(0.5) if self.in_place else x - 0.5
        return super().features(x if self.noticed else x.clone())


@pytest.mark.parametrize("noticed", [False, True], ids=["unnoticed", "noticed"])
@pytest.mark.parametrize("grouped", [False, True], ids=["batchnorm", "grouped"])
@pytest.mark.parametrize("method", hf.LEARNERS)
def test_a_model_that_works_in_place_learns_what_another_learns(method, grouped, noticed):
    """In two tasks, with whatever copies of it a method has."""
    kind, found = hf.LEARNERS[method], []
    for in_place in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = Shifted(in_place, noticed).double()
        model = hf.group_batchnorm(model) if grouped else model
        given = {"buffer_size": 20} if kind.needs_buffer else {}
        learner = kind(model, torch.optim.SGD(model.parameters(), lr=0.05), **given)
        for step, (x, y) in enumerate(stream(8)):
            if step % 4 == 0:
                learner.begin_task(tuple(range(CLASSES)))
            learner.observe(x.clone(), y)
            if step % 4 == 3:
                learner.end_task(x.clone(), y)
        found.append(nn.ModuleList([model, learner.evaluated()]))
    assert_same_state(*found, rtol=1e-9, atol=1e-11)


def squares(outputs, targets):
    """A loss for labels that are counted from 1."""
    return ((outputs.clamp(-1, 1) - nn.functional.one_hot(targets - 1, CLASSES)) ** 2).mean()


def squares_in_place(outputs, targets):
    return ((outputs.clamp_(-1, 1) - nn.functional.one_hot(targets.sub_(1), CLASSES)) ** 2).mean()


@pytest.mark.parametrize("replay", [None, 0.5])
@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("method", ["er", "consistency", "der"])
def test_a_loss_that_works_in_place_is_as_good_as_any(method, kind, replay):
    learners = []
    for loss in (squares, squares_in_place):
        model = network(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        learners.append(hf.LEARNERS[method](model, optimizer, loss=loss, buffer_size=20, replay=replay))
    for x, y in stream(6):
        labels = y + 1
        results = [learner.observe(x, labels) for learner in learners]
        assert results[0] == results[1]
        assert torch.equal(labels, y + 1)
    assert_same_state(*(learner.model for learner in learners), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_without_a_buffer_a_view_that_works_in_place_leaves_the_minibatch_alone(form):
    shape = halves if form == "dict" else lambda x: x
    learners = [
        make("sgd", network("mlp") if form == "tensor" else Halves(network("mlp")), augment=augment)
        for augment in (brighten, brightened)
    ]
    for x, y in stream(3):
        given = x.clone()
        assert learners[0].observe(shape(given), y).as_dict() == learners[1].observe(shape(x), y).as_dict()
        assert torch.equal(given, x)


def test_tensors_of_inference_mode_are_welcome():
    with torch.inference_mode():
        batches = list(stream(2))
    learner, other = make("sgd", network("mlp"), augment=brightened), make("sgd", network("mlp"), augment=brightened)
    for (x, y), (same, labels) in zip(batches, stream(2), strict=True):
        assert x.is_inference()
        assert learner.observe(x, y.clone()).as_dict() == other.observe(same, labels).as_dict()


class Summing(nn.Module):
    """Rows of numbers -> three classes; zeros at the end of a row add nothing."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.classifier = nn.Linear(1, 6, bias=False), nn.Linear(6, 3)

    def features(self, x):
        return self.body(x[..., None]).relu().sum(1)

    def forward(self, x):
        return self.classifier(self.features(x))


@pytest.mark.parametrize(("kind", "options"), [(EpisodicGem, {}), (Icarl, {}), (DualNet, {"slow_steps": 0})])
def test_lengths_change_nothing(kind, options):
    """Minibatches and tasks of any lengths teach what they teach filled up to the longest beforehand."""
    draw, shared = torch.Generator().manual_seed(0), {"buffer_size": 7, **options}
    models = [Summing().double() for _ in range(2)]
    short, even = (
        kind(model, torch.optim.SGD(model.parameters(), lr=0.1), padding=padding, **shared)
        for model, padding in zip(models, ({"x": 0}, None), strict=True)
    )
    for step, length in enumerate([5, 3, 8, 2, 6, 4]):
        x = 0.1 + torch.rand(4, length, generator=draw, dtype=torch.float64)
        y = torch.randint(3, (4,), generator=draw)
        for learner, inputs in ((short, x), (even, nn.functional.pad(x, (0, 8 - length)))):
            learner.begin_task((0, 1, 2))
            learner.observe(inputs, y)
            if step % 2:
                learner.end_task(inputs, y)
    assert_same_state(short.evaluated(), even.evaluated(), rtol=1e-8, atol=1e-10)
    assert_same_state(*models, rtol=1e-8, atol=1e-10)
    stored, same = short.buffer.contents(), even.buffer.contents()
    assert torch.equal(nn.functional.pad(stored.x, (0, 8 - stored.x.shape[1])), same.x)
