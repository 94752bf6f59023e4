"""Natural mistakes: each has its sentence, and nothing has moved."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import Sgd
from holdfast.models import group_batchnorm

X, Y = torch.arange(12.0).reshape(4, 3) / 12, torch.arange(4)


def network(*, batchnorm=True, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(4)] if batchnorm else []
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(4, 5))


def descent(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def learner(model=None, kind=hf.ConsistencyReplay, **options):
    model = model or network()
    return kind(model, descent(model), **({} if kind is Sgd else {"buffer_size": 10} | options))


def state(made):
    """All that a step may move, as numbers."""
    buffer = () if made.buffer is None else (made.buffer.generator.get_state(), torch.tensor(made.buffer.offered))
    return [each.clone() for each in (*made.model.state_dict().values(), *buffer, torch.get_rng_state())]


def assert_refused(made, minibatch, says):
    before = state(made)
    with pytest.raises(hf.UsageError, match=re.escape(says)):
        made.observe(*minibatch)
    assert all(torch.equal(*pair) for pair in zip(before, state(made), strict=True))


# --- one sample, and BatchNorm


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay, Sgd])
def test_a_minibatch_of_one_moves_nothing(kind, grouped):
    model = network(dropout=0.5)
    made = learner(group_batchnorm(model) if grouped else model, kind)
    assert_refused(made, (X[:1], Y[:1]), "BatchNorm cannot learn from a single sample")
    made.observe(X, Y)
    if kind is not hf.ExperienceReplay:  # which shows it together with what it drew
        assert_refused(made, (X[:1], Y[:1]), "drop_last=True")


@pytest.mark.parametrize("few", [{"buffer_size": 1}, {"replay_size": 1}, {"consistency_size": 1}])
def test_draws_of_one_move_nothing(few):
    made = learner(network(dropout=0.5), **few)
    made.observe(X, Y)
    assert_refused(made, (X, Y), "let the buffer, and every draw from it, have at least two samples")


@pytest.mark.parametrize(
    ("few", "count"), [({"buffer_size": 1}, 4), ({"replay_size": 1}, 4), ({"consistency_size": 1}, 4), ({}, 1), ({}, 4)]
)
def test_on_a_gpu_the_way_back_is_kept_where_one_sample_may_be_seen(few, count):
    """There, a copy before every step would take too long."""
    made = learner(network(batchnorm=False), **few)
    made.observe(X, Y)
    assert made._transaction._may_show_one(X[:count]) == bool(few or count == 1)


def test_one_sample_is_enough_where_it_has_many_values():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 5))
    made = learner(model, buffer_size=1)
    for _ in range(3):
        made.observe(torch.ones(1, 1, 8, 8), Y[:1])
    assert made.model[1].num_batches_tracked == 1 + 3 * 2


def test_whatever_fails_in_a_step_moves_nothing():
    class Sick(nn.Module):
        def forward(self, x):
            torch.rand(3)
            raise KeyError("sick")

    made = learner()
    made.observe(X, Y)
    made.model.append(Sick())
    before = state(made)
    with pytest.raises(KeyError, match="sick"):
        made.observe(X, Y)
    assert all(torch.equal(*pair) for pair in zip(before, state(made), strict=True))


class SickBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise KeyError("sick")


def test_a_backward_pass_that_fails_moves_nothing_and_the_next_step_has_another_way_back():
    made = learner(network(dropout=0.5))
    made.observe(X, Y)
    before, handle = state(made), made.model.register_forward_hook(lambda *parts: SickBackwards.apply(parts[2]))
    with pytest.raises(KeyError, match="sick"):
        made.observe(X, Y)
    assert all(torch.equal(*pair) for pair in zip(before, state(made), strict=True))
    handle.remove()
    made.observe(X, Y)
    after = state(made)
    with pytest.raises(hf.UsageError, match="cannot compute"):
        made.forward(torch.ones(4, 7))  # outside of a step, there is nothing to take back
    assert all(torch.equal(*pair) for pair in zip(after, state(made), strict=True))


# --- minibatches


WRONG = {
    "float64": (X.double(), "x of shape (4, 3), torch.float64"),
    "advice for float64": (X.double(), "convert the inputs, as in x.to(torch.float32)"),
    "uint8": ((X * 255).byte(), "augment=lambda x: x.float() / 255"),
    "width": (torch.ones(4, 7), "x of shape (4, 7), torch.float32"),
    "meta": (X.to("meta"), "x is on the meta device and holds no numbers"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay, Sgd])
def test_inputs_that_the_model_cannot_compute(kind, name):
    x, says = WRONG[name]
    assert_refused(learner(kind=kind), (x, Y), says)


@pytest.mark.parametrize("x", [X.double(), X.half(), (X * 255).byte(), torch.ones(4, 7)], ids=str)
def test_inputs_unlike_the_first_ones(x):
    made = learner()
    made.observe(X, Y)
    assert_refused(made, (x, Y), "do not fit the buffer")


def test_sparse_tensors():
    assert_refused(learner(), (X.to_sparse(), Y), "give x.to_dense()")
    assert_refused(learner(), (X, Y.to_sparse()), "give y.to_dense()")
    assert_refused(learner(), ({"a": X, "b": X.to_sparse()}, Y), "x['b'] is sparse")
    learner(network(batchnorm=False), Sgd).observe(X.to_sparse(), Y)  # it stores nothing


def test_labels_on_the_meta_device():
    assert_refused(learner(), (X, Y.to("meta")), "y is on the meta device")


@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, hf.ExperienceReplay, Sgd])
def test_tensors_of_inference_mode_teach_as_others_do(kind):
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    made, other = learner(kind=kind), learner(kind=kind)
    for _ in range(3):
        made.observe(x, y)
        other.observe(X, Y)
    assert all(torch.equal(*pair) for pair in zip(state(made), state(other), strict=True))


@pytest.mark.parametrize("count", [4, 300])
def test_labels_of_any_whole_type(count):
    x, y = torch.ones(count, 3), torch.arange(count) % 5
    for dtype in (torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
        learner().observe(x, y.to(dtype))
    huge = torch.cat([y[1:].to(torch.uint64), torch.tensor([2**63 + 5], dtype=torch.uint64)])
    assert_refused(learner(), (x, huge), "label 9223372036854775813 names no output")


def test_a_minibatch_in_one_piece():
    made = learner()
    for call in (made.observe, made.losses):
        with pytest.raises(hf.UsageError, match=re.escape("observe(*batch)")):
            call((X, Y))


# --- models and optimisers


@pytest.mark.parametrize(
    ("model", "optimizer", "says"),
    [
        (network(), 0.1, "must be made first, as in torch.optim.SGD(model.parameters(), lr=0.1); this is a float"),
        (network(), torch.optim.SGD, "this is the class SGD"),
        (network(), torch.optim.LBFGS(network().parameters()), "LBFGS computes the loss several times a step"),
        (nn.Linear, None, "the model must be a torch.nn.Module, not the class Linear"),
        (descent(network()), network(), "the model must be a torch.nn.Module, not a SGD"),
        (nn.Linear(3, 5, device="meta"), descent(network()), "weight is on the meta device"),
    ],
)
def test_what_no_learner_can_be_made_of(model, optimizer, says):
    with pytest.raises(hf.UsageError, match=re.escape(says)):
        hf.ConsistencyReplay(model, optimizer, buffer_size=10)


def test_an_optimiser_that_holds_a_part_of_the_model():
    model = network()
    with pytest.warns(UserWarning, match=r"does not hold 4 of the model's parameters.*0\.weight, 0\.bias, 1\.weight"):
        hf.ConsistencyReplay(model, descent(model[-1]), buffer_size=10)
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.ConsistencyReplay(model, descent(model[-1]), buffer_size=10)


def test_a_model_in_eval_mode_is_told_once():
    made = learner()
    made.model.eval()
    with pytest.warns(UserWarning, match=re.escape("call model.train() before learning")):
        made.observe(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.observe(X, Y)
        frozen = learner()
        frozen.model[1].eval()  # one layer is frozen on purpose
        frozen.observe(X, Y)
        plain = nn.Linear(3, 5).eval()  # it makes no difference
        learner(plain).observe(X, Y)


# --- copies


def test_pickle_says_what_to_use_instead():
    with pytest.raises(hf.UsageError, match=re.escape("learner.save(path)")):
        pickle.dumps(learner())


def test_a_deep_copy_learns_the_same_and_rolls_back_by_itself():
    made = learner(network(dropout=0.5))
    made.observe(X, Y)
    twin = copy.deepcopy(made)
    with torch.random.fork_rng():
        made.observe(X, Y)
    twin.observe(X, Y)
    assert all(torch.equal(*pair) for pair in zip(state(made)[:-1], state(twin)[:-1], strict=True))
    assert_refused(twin, (X[:1], Y[:1]), "single sample")


class Drifting(nn.Module):
    """Puts a new tensor into its buffer in every pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


def test_buffers_that_a_pass_replaces_are_restored():
    model = Drifting()
    made = learner(model)
    made.observe(X, Y)
    before = model.mean.clone()
    with pytest.raises(hf.HoldfastError, match="no step was made"):
        made.observe(X * float("nan"), Y)
    assert torch.equal(model.mean, before)
    assert torch.isfinite(made.observe(X, Y).total)


@pytest.mark.parametrize("name", ["er-ace", "lwf", "icarl"])
def test_a_layer_after_the_last_one(name):
    """Classes are counted at the last nn.Linear; if outputs come from another one, that is told before a step."""

    class WithRotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier, self.rotation = nn.Linear(3, 5), nn.Linear(3, 4)

        def features(self, x):
            return x

        def forward(self, x):
            return self.classifier(x)

    model, kind = WithRotation(), hf.LEARNERS[name]
    made = kind(model, descent(model), **({"buffer_size": 8} if kind.needs_buffer else {}))
    made.begin_task((0, 1, 2, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hf.UsageError, match="the model has 5 outputs, but its last nn"):
        made.observe(X, Y)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("name", ["er-ace", "lwf", "fdr", "ewc"])
def test_losses_of_ones_own_where_classes_are_compared(name):
    model, kind = network(), hf.LEARNERS[name]
    with pytest.raises(hf.UsageError, match="leave out loss="):
        kind(model, descent(model), loss=nn.MSELoss(), **({"buffer_size": 8} if kind.needs_buffer else {}))


@pytest.mark.parametrize("y", [torch.rand(4, 5), {"a": torch.rand(4, 5)}], ids=["tensor", "dict"])
def test_clser_needs_labels_from_the_first_step_on(y):
    model = nn.Linear(3, 5)
    made = hf.LEARNERS["clser"](model, descent(model), buffer_size=8, loss=lambda outputs, _: outputs.square().mean())
    with pytest.raises(hf.UsageError, match="targets must be labels"):
        made.observe(X, y)


@pytest.mark.parametrize("name", ["esmer", "ballast"])
def test_advice_is_given_where_it_can_be_taken(name):
    """Their heads cannot grow."""
    model = network()
    made = hf.LEARNERS[name](model, descent(model), buffer_size=8)
    with pytest.raises(hf.UsageError, match=r"labels up to 9 do not fit the model: its outputs are 0\.\.4\.$"):
        made.observe(X, Y + 6)


@pytest.mark.parametrize("name", ["ballast", "clser", "esmer", "icarl", "lwf"])
def test_a_model_that_cannot_be_copied(name):
    model, room = Featured(), {} if name == "lwf" else {"buffer_size": 8}
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.first)
    with pytest.raises(hf.UsageError, match=r"use torch\.nn\.utils\.parametrizations\.weight_norm\."):
        hf.LEARNERS[name](model, descent(model), **room)
    model.first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
    hf.LEARNERS[name](model, descent(model), **room)


class Featured(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 5)

    def features(self, x):
        return self.first(x).relu()

    def forward(self, x):
        return self.last(self.features(x))


def test_losses_that_a_method_forgot_to_return():
    class Forgetful(Sgd):
        def compute_losses(self, x, y):
            super().compute_losses(x, y)

    model = nn.Linear(2, 3)
    learner = Forgetful(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UsageError, match="compute_losses of Forgetful must return Losses, not a NoneType"):
        learner.observe(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
