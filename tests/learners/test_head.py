"""Heads that grow: as if the new outputs had always been there, without a gradient until now."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import holdfast as hf
from holdfast.buffer import Reservoir
from holdfast.errors import StorageError, UsageError
from holdfast.learners import PlainSgd, Sgd
from holdfast.learners.head import Head
from holdfast.rng import generator

OPTIMIZERS = {
    "plain": lambda p: PlainSgd(p, 0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    # These mix rows, so that rows without a gradient are not the same as none.
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
if hasattr(torch.optim, "Muon"):  # of the newer torches
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon((each for each in p if each.dim() == 2), lr=0.1)
MIXING = ("adafactor", "muon")


def descend(model, optimizer, targets, seed):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    optimizer.zero_grad()
    (model(x)[:, :targets] - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_go_on_as_if_the_outputs_had_always_been_there(name, bias):
    small, large = (nn.Linear(4, outputs, bias=bias).double() for outputs in (2, 5))
    with torch.no_grad():
        for mine, theirs in zip(small.parameters(), large.parameters(), strict=True):
            theirs.zero_()[:2] = mine
    ours, reference = OPTIMIZERS[name](small.parameters()), OPTIMIZERS[name](large.parameters())
    for step in range(4):
        descend(small, ours, 2, step)
        descend(large, reference, 2, step)
    before = [parameter.detach().clone() for parameter in small.parameters()]
    Head(small, "", ours).growth(5, ours, torch.Generator().manual_seed(0))()
    assert small.out_features == 5
    for old, new, theirs in zip(before, small.parameters(), large.parameters(), strict=True):
        assert torch.equal(old, new[:2])
        assert new.shape == theirs.shape
        with torch.no_grad():
            theirs[2:] = new[2:]
    held = ours.parameters if name == "plain" else [p for group in ours.param_groups for p in group["params"]]
    assert all(any(each is parameter for parameter in small.parameters()) for each in held)
    for step in range(4, 8):
        descend(small, ours, 5, step)
        descend(large, reference, 5, step)
    if name not in MIXING:
        for mine, theirs in zip(small.parameters(), large.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert not torch.equal(small.weight[2:], before[0].new_zeros(3, 4))
    assert all(parameter.isfinite().all() for parameter in small.parameters())


def test_a_scheduler_and_hooks_of_the_optimiser_notice_nothing():
    model, steps = nn.Linear(4, 2).double(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    descend(model, optimizer, 2, 0)
    scheduler.step()
    Head(model, "", optimizer).growth(3, optimizer, torch.Generator())()
    assert len(steps) == 1
    descend(model, optimizer, 3, 1)
    scheduler.step()
    assert len(steps) == 2
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert optimizer.state[model.weight]["step"] == 2


def test_new_rows_are_as_in_a_new_layer():
    """Uniform within 1/sqrt(inputs), as torch's own; weights and biases."""
    ours = nn.Linear(25, 1)
    optimizer = PlainSgd(ours.parameters(), 0.1)
    Head(ours, "", optimizer).growth(4001, optimizer, generator(0, "head"))()
    theirs = nn.Linear(25, 4000)
    for mine, torchs in ((ours.weight[1:], theirs.weight), (ours.bias[1:], theirs.bias)):
        assert mine.abs().max() <= 0.2
        assert mine.abs().max() > 0.199
        torch.testing.assert_close(mine.std(), torchs.std(), rtol=0.03, atol=0)
        assert abs(mine.mean()) < 0.01


class Net(nn.Module):
    def __init__(self, outputs, seed=0, between=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(4, 8), between or nn.BatchNorm1d(8), nn.ReLU())
            self.classifier = nn.Linear(8, outputs)

    def forward(self, x):
        return self.classifier(self.body(x))


def make(kind=hf.ConsistencyReplay, outputs=2, make_optimizer=torch.optim.Adam, **options):
    model = Net(outputs)
    if kind is not Sgd:
        options = {"buffer_size": 20} | options
    return kind(model, make_optimizer(model.parameters(), lr=0.01), **{"head": "classifier"} | options)


def stream(steps=12, classes=5):
    """Class after class."""
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        newest = step * classes // steps
        y = torch.randint(max(0, newest - 1), newest + 1, (8,), generator=draw)
        yield torch.randn(8, 4, generator=draw) + y[:, None], y


@pytest.mark.parametrize("kind", [Sgd, hf.ExperienceReplay, hf.ConsistencyReplay])
def test_labels_make_the_head_grow(kind):
    learner, largest = make(kind), 1
    before = torch.get_rng_state()
    for x, y in stream():
        losses = learner.observe(x, y)
        largest = max(largest, int(y.max()))
        assert learner.head.outputs == learner.model.classifier.out_features == largest + 1
        assert learner.model(x).shape == (8, largest + 1)
        assert losses.total.isfinite()
    assert largest == 4
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("validate", [True, False])
def test_a_grown_learner_is_one_that_was_larger_from_the_start(validate):
    """With plain SGD and no step before: the same rows, the same learning."""

    def small():
        learner = make(make_optimizer=torch.optim.SGD, validate=validate, seed=3)
        learner.grow(5)
        return learner

    learner, grown = make(outputs=5, make_optimizer=torch.optim.SGD, seed=3), small()
    learner.model.load_state_dict(grown.model.state_dict())
    for x, y in stream():
        assert learner.observe(x, y) == grown.observe(x, y)


def test_new_rows_follow_from_the_seed_alone():
    def rows(seed):
        learner = make(seed=seed)
        for x, y in stream():
            learner.observe(x, y)
        return learner.model.classifier.weight

    assert torch.equal(rows(0), rows(0))
    assert not torch.equal(rows(0), rows(1))


def test_stored_logits_are_widened():
    learner = make()
    batches = list(stream())
    for x, y in batches[:3]:
        learner.observe(x, y)
    before = learner.buffer.contents().logits.clone()
    learner.grow(5)
    after = learner.buffer.contents().logits
    assert after.shape == (20, 5)
    assert torch.equal(after[:, :2], before)
    # None of the new classes was the answer: each is less likely than the least likely then.
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[2:], (old.min() - 1).expand(3))
    for x, y in batches[3:]:
        assert learner.observe(x, y).consistency > 0


def test_widening_without_logits_is_nothing():
    buffer = Reservoir(3)
    buffer.widen(4)
    buffer.add(torch.ones(2, 4), torch.ones(2))
    buffer.widen(4)
    assert buffer.contents().logits is None


@pytest.mark.parametrize("make_optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("kind", [Sgd, hf.ExperienceReplay, hf.ConsistencyReplay])
def test_a_grown_learner_is_restored_into_one_whose_head_is_small(kind, make_optimizer, tmp_path):
    learner, other = (make(kind, make_optimizer=make_optimizer) for _ in range(2))
    batches = list(stream(20))
    for x, y in batches[:12]:
        learner.observe(x, y)
    assert learner.head.outputs == 3
    learner.save(tmp_path / "file")
    other.load(tmp_path / "file")
    for x, y in batches[12:]:
        assert learner.observe(x, y) == other.observe(x, y)
    assert other.head.outputs == 5
    for mine, theirs in zip(learner.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_grown_learner_does_not_fit_a_fixed_or_larger_one():
    learner = make()
    for x, y in stream():
        learner.observe(x, y)
    fixed, larger = make(head=None), make(outputs=7)
    before = [value.clone() for value in larger.model.state_dict().values()]
    for other in (fixed, larger):
        with pytest.raises(
            UsageError, match=r"classifier.bias is \(5,\).*Build the model as it was when saved; .* head="
        ):
            other.load_state_dict(learner.state_dict())
    assert all(map(torch.equal, before, larger.model.state_dict().values()))


@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay])
def test_a_loss_of_ones_own_with_labels_that_make_the_head_grow(kind):
    """Label smoothing, for instance."""
    learner = make(kind, loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    for x, y in stream():
        learner.observe(x, y.int())
    assert learner.head.outputs == 5
    assert learner.buffer.contents().y.dtype == torch.int64
    with pytest.raises(UsageError, match="whole numbers that name classes"):
        learner.observe(x, y.float())


def test_whoever_averages_the_model_is_told_when_it_grows(tmp_path):
    def follow(learner):
        told.append(learner.head.outputs)
        weight = nn.functional.pad(copy["weight"], (0, 0, 0, learner.head.outputs - len(copy["weight"])))
        copy["weight"] = weight

    told, copy = [], {"weight": torch.zeros(2, 8)}
    learner = make(on_grow=follow)
    for x, y in stream():
        learner.observe(x, y)
    assert told == [3, 4, 5]
    assert len(copy["weight"]) == 5
    learner.save(tmp_path / "learner")
    told.clear()
    make(on_grow=follow).load(tmp_path / "learner")
    assert told == [5]


def test_class_weights_grow_with_ones():
    learner = make(class_weights=[0.5, 3.0])
    for x, y in stream():
        learner.observe(x, y)
    assert learner.class_weights.tolist() == [0.5, 3.0, 1.0, 1.0, 1.0]


def test_a_wrong_minibatch_does_not_make_the_head_grow():
    learner = make()
    x, y = next(stream(1))
    learner.observe(x, y)
    for inputs, labels in ((x[:, :3], y + 4), (x, y.float() + 4), (x[:5], y + 4), (x, y - 1)):
        with pytest.raises(UsageError):
            learner.observe(inputs, labels)
    assert learner.head.outputs == 2
    with pytest.raises(UsageError, match=r"label 2000 would make the head grow from 2 to 2001 .* call grow\(2001\)"):
        learner.observe(x, torch.full((8,), 2000))
    learner.grow(2001)
    learner.observe(x, torch.full((8,), 2000))


def test_growing_to_less_is_nothing():
    learner = make(outputs=4)
    weight = learner.model.classifier.weight
    learner.grow(3)
    learner.grow(4)
    assert learner.model.classifier.weight is weight


def test_a_fixed_head_says_how_to_let_it_grow():
    learner = make(head=None)
    with pytest.raises(UsageError, match="head of this learner is fixed: name the last"):
        learner.grow(5)
    with pytest.raises(UsageError, match=r"labels up to 4 do not fit .*0\.\.1\. Name its last layer, as in head="):
        learner.observe(torch.zeros(8, 4), torch.full((8,), 4))


def test_what_cannot_be_a_head():
    with pytest.raises(UsageError, match=r"unknown head .* 'clasifier': did you mean 'classifier'"):
        make(head="clasifier")
    with pytest.raises(UsageError, match=r"'body.0' is not the last layer: it has 8 outputs, the model 2"):
        make(head="body.0").observe(*next(stream(1)))
    for part, parametrize in (("weight", weight_norm), ("bias", partial(weight_norm, name="bias"))):
        model = Net(2)
        parametrize(model.classifier)
        with pytest.raises(UsageError, match=f"the {part} of 'classifier' is computed from other parameters"):
            Head(model, "classifier", PlainSgd(model.parameters(), 0.1))


def test_a_head_that_shares_its_weight_cannot_grow():
    """It would be given one of its own, and the embedding would learn nothing more."""
    model = nn.ModuleDict({"body": nn.Embedding(2, 4), "classifier": nn.Linear(4, 2)})
    model["classifier"].weight = model["body"].weight
    with pytest.raises(UsageError, match=r"'classifier' shares its weight with 'body', .* weights of its own"):
        Head(model, "classifier", PlainSgd(model.parameters(), 0.1))


class Bare:
    """The least that can be an optimiser."""

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)

    def zero_grad(self):
        for each in self.parameters:
            each.grad = None

    def step(self):
        pass


def test_an_optimiser_whose_parameters_cannot_be_replaced_is_refused_at_once():
    with pytest.raises(UsageError, match="Bare has no param_groups in which a grown head could"):
        make(make_optimizer=Bare)
    make(make_optimizer=Bare, head=None).observe(*next(stream(1)))


class Scaled(torch.optim.SGD):
    """With an attribute of its own, which copying one of torch.optim leaves out."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.scale = 1.0

    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(self.scale)
        return super().step(closure)


def test_an_optimiser_with_attributes_of_its_own_goes_on():
    scaled, usual = (make(make_optimizer=each) for each in (Scaled, partial(torch.optim.SGD, momentum=0.9)))
    for x, y in stream():
        assert scaled.observe(x, y) == usual.observe(x, y)
    assert scaled.head.outputs == 5


class Wrapping(torch.optim.Optimizer):
    """Leaves the steps to another optimiser, whose step must not be made while a head grows."""

    def __init__(self, parameters, lr):
        self.inner = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        self.inner.step()


class Late(torch.optim.SGD):
    """Keeps something for which a first step has no beginning."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 1:
                    state["mean"] = torch.zeros_like(each)


class Choosy(Scaled):
    """Steps for a parameter it knows only."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.known = [each for group in self.param_groups for each in group["params"]]

    def step(self, closure=None):
        if len(self.param_groups[0]["params"]) != len(self.known):
            raise ArithmeticError("who is this?")
        super().step(closure)


def everything(learner):
    parts = learner.optimizer.param_groups[0]["params"]
    held = [list(map(id, each)) for each in (parts, learner.model.parameters(), learner.optimizer.state)]
    layer = learner.model.classifier
    return held, layer.out_features, layer.weight.shape, learner.class_weights.tolist()


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [(Wrapping, "nothing says how its momentum_buffer begins"), (Late, "its mean begins"), (Choosy, "who is this")],
)
def test_a_learner_that_cannot_grow_stays_as_it_was(optimizer, says, tmp_path):
    learner, other = (make(make_optimizer=optimizer, class_weights=[1, 2]) for _ in range(2))
    small, labels = next(stream(1)), torch.full((8,), 3)
    for each in (learner, other):
        for _ in range(3):
            each.observe(*small)
    before = everything(learner)
    learner.save(tmp_path / "before")
    for _ in range(2):
        with pytest.raises(UsageError, match=f"type {optimizer.__name__} would keep .*{says}.* as many outputs as"):
            learner.observe(small[0], labels)
    assert everything(learner) == before
    learner.save(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    for _ in range(3):
        assert learner.observe(*small) == other.observe(*small)


def test_a_buffer_that_cannot_widen_leaves_the_head_as_it_was(monkeypatch):
    learner = make(make_optimizer=Scaled, class_weights=[1, 2])
    small = next(stream(1))
    learner.observe(*small)
    before = everything(learner)

    def full(self, outputs):
        raise StorageError("no space")

    monkeypatch.setattr(Reservoir, "widen", full)
    with pytest.raises(StorageError):
        learner.grow(5)
    assert everything(learner) == before
    learner.observe(*small)
