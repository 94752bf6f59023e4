"""DualNet against slow loops: its outputs, its loss, its slow steps; and the network that a run tests and saves."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.analysis.runs import final_model
from holdfast.data import data_root
from holdfast.errors import HoldfastError, UsageError
from holdfast.learners import DualNet, Parts, make_learner, make_optimizer
from holdfast.models import MLP, Adapted, ResNet18, group_batchnorm
from holdfast.rng import generator
from learners.conftest import (
    CLASSES,
    Convolutions,
    assert_same_state,
    cross_entropies,
    descend,
    network,
    record,
    stream,
    tiny_run,
)

SETTINGS = {"distillation": 3.0, "temperature": 2.5, "slow_lr": 0.01, "slow_steps": 2, "slow_size": 7, "lookahead": 0.4}


def make(kind):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if kind == "mlp":
            return MLP((1, 6, 6), CLASSES, width=12).double()
        model = (ResNet18((1, 6, 6), CLASSES, width=2) if kind == "resnet" else Convolutions()).double()
    return group_batchnorm(model) if kind == "grouped" else model


def dualnet(model, **options) -> DualNet:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DualNet(model, optimizer, **{"buffer_size": 20, **SETTINGS, **options})


# --- the oracle ------------------------------------------------------------------------------------------------------


def outputs_of(adapted, x):
    """The outputs of the slow network with fast layers. Those of an MLP are computed one sample at a time."""
    slow, fast = adapted.slow, [each[0] for each in adapted.fast]
    if isinstance(slow, MLP):
        rows = []
        for row in x.flatten(1):
            h = m = row
            for layer, gate in zip((slow.hidden1, slow.hidden2), fast, strict=True):
                h = torch.relu(layer.weight @ h + layer.bias)
                m = torch.relu(gate.weight @ m + gate.bias) * h
            rows.append(slow.classifier.weight @ m + slow.classifier.bias)
        return torch.stack(rows)
    if isinstance(slow, ResNet18):
        h, m = torch.relu(slow.bn(slow.conv(x))), x
        for number, layer in enumerate(adapted.fast):
            h = slow.blocks[2 * number + 1](slow.blocks[2 * number](h))
            found = layer[0](m).transpose(0, 1)
            scale = (found.flatten(1).var(1, correction=0) + layer[1].eps).sqrt()
            found = (found - found.flatten(1).mean(1)[:, None, None, None]) / scale[:, None, None, None]
            found = found * layer[1].weight[:, None, None, None] + layer[1].bias[:, None, None, None]
            found = torch.relu(found.transpose(0, 1))
            m = shrunk(found, h.shape[2]) * h
        return slow.classifier(m.flatten(2).mean(2))
    found = slow.features(x)
    return slow.classifier(torch.relu(found @ fast[0].weight.T + fast[0].bias) * found)


def shrunk(maps, size):
    """The largest value in each of size x size windows, which may overlap by a pixel."""
    n = maps.shape[2]
    spans = [slice(i * n // size, -((i + 1) * n // -size)) for i in range(size)]
    return torch.stack([torch.stack([maps[:, :, a, b].amax((2, 3)) for b in spans], 2) for a in spans], 2)


def divergence(now, then, temperature):
    """The mean over samples and classes of p log(p / q)."""
    terms = []
    for row, stored in zip(now, then, strict=True):
        p, q = ((each / temperature).exp() / (each / temperature).exp().sum() for each in (stored, row))
        terms += [a * (a.log() - b.log()) for a, b in zip(p, q, strict=True)]
    return sum(terms) / len(terms)


def distorted(x, draw):
    """Each image shifted by up to 4 pixels, black comes in; then other contrast and brightness."""
    down, right, contrast, brightness = torch.rand(4, len(x), 1, generator=draw).squeeze(2).tolist()
    views = []
    for i, image in enumerate(x):
        shift = [int(each[i] * 9) - 4 for each in (down, right)]
        moved = torch.zeros_like(image)
        for row in range(6):
            for column in range(6):
                source = row + shift[0], column + shift[1]
                if all(0 <= each < 6 for each in source):
                    moved[0, row, column] = image[0, source[0], source[1]]
        mean = moved.mean()
        views.append((0.6 + 0.8 * brightness[i]) * (mean + (0.6 + 0.8 * contrast[i]) * (moved - mean)))
    return torch.stack(views)


def barlow_twins(a, b):
    columns = []
    for z in (a, b):
        columns.append([(c - c.mean()) / (((c - c.mean()) ** 2).mean() + 1e-5).sqrt() for c in z.T])
    loss = 0
    for i, left in enumerate(columns[0]):
        for j, right in enumerate(columns[1]):
            c = (left * right).mean()
            loss = loss + ((1 - c) ** 2 if i == j else 2e-3 * c**2)
    return loss


def slow_steps(adapted, projector, draws, views):
    """Plain SGD on Barlow Twins, then back most of the way, the statistics of BatchNorm as well; the last loss."""
    pair = nn.ModuleList([adapted.slow, projector])
    before = deepcopy(pair.state_dict())
    trained = [each for name, each in pair.named_parameters() if "classifier" not in name]
    for drawn in draws:
        seen = [projector(adapted.slow.features(distorted(drawn.x, views))) for _ in range(2)]
        loss = barlow_twins(*seen)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= SETTINGS["slow_lr"] * gradient
    with torch.no_grad():
        for name, each in pair.state_dict().items():
            if each.is_floating_point():
                each.copy_(before[name] + SETTINGS["lookahead"] * (each - before[name]))
    return loss.detach()


@pytest.mark.parametrize(("kind", "replay_size"), [("mlp", 5), ("mlp", None), ("batchnorm", None), ("grouped", 5)])
def test_six_steps(kind, replay_size):
    model = make(kind)
    learner = dualnet(model, replay_size=replay_size)
    reference, projector = deepcopy(learner.adapted), deepcopy(learner.projector)
    buffer, views = record(learner), generator(0, "views")
    for step, (x, y) in enumerate(stream(6)):
        losses = learner.observe(x, y)
        draws = buffer.draws
        outputs = outputs_of(reference, x)
        loss = current = cross_entropies(outputs, y).mean()
        if step:
            drawn, *draws = draws
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            now = outputs_of(reference, drawn.x)
            replay, distance = cross_entropies(now, drawn.y).mean(), divergence(now, drawn.logits, 2.5)
            loss = current + replay + 3.0 * distance
            torch.testing.assert_close(losses.replay, replay.detach())
            torch.testing.assert_close(losses.consistency, distance.detach())
        torch.testing.assert_close(losses.total, loss.detach())
        torch.testing.assert_close(buffer.offers[-1][2], outputs.detach())
        assert torch.equal(buffer.offers[-1][0], x)
        descend(reference, loss, 0.1)
        assert [len(each.y) for each in draws] == [7, 7]
        torch.testing.assert_close(losses.slow, slow_steps(reference, projector, draws, views))
        buffer.draws = []
    assert_same_state(learner.evaluated(), reference, rtol=1e-8, atol=1e-10)
    assert_same_state(learner.projector, projector, rtol=1e-8, atol=1e-10)


def test_all_stages_of_a_resnet_are_adapted():
    adapted = Adapted(make("resnet"))
    x = next(stream(1))[0]
    torch.testing.assert_close(adapted(x), outputs_of(deepcopy(adapted), x))


def test_a_minibatch_and_a_draw_have_batchnorm_statistics_of_their_own():
    model = make("resnet")
    learners = [dualnet(each, slow_steps=0) for each in (group_batchnorm(deepcopy(model)), model)]  # fused; apart
    for x, y in stream(3):
        fused, apart = (learner.observe(x, y).total for learner in learners)
        torch.testing.assert_close(fused, apart)
    assert learners[0]._groups.fused
    assert not learners[1]._groups.fused


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5}, {"optimizer": "adam"}, {"schedule": "cosine"}])
def test_the_optimiser_of_a_run_trains_the_fast_layers_too(settings):
    config = hf.RunConfig.preset("rot-mnist", "dualnet", buffer_size=20, lr=0.1, **settings)
    learners = []
    for _ in range(2):
        model = make("mlp")
        optimizer, schedule = make_optimizer(config, model, torch.device("cpu"))
        parts = Parts(model, optimizer, lambda x: x, torch.Generator().manual_seed(0), None, schedule)
        learners.append(make_learner(config, parts))
    one, other = learners
    batches = list(stream(6))
    before = deepcopy(one.adapted.fast)
    for x, y in batches[:3]:
        one.observe(x, y)
    assert all(not torch.equal(*pair) for pair in zip(before.parameters(), one.adapted.fast.parameters(), strict=True))
    other.load_state_dict(deepcopy(one.state_dict()))
    for x, y in batches[3:]:
        assert one.observe(x, y) == other.observe(x, y)
    assert_same_state(one.evaluated(), other.evaluated(), rtol=0, atol=0)


class EagerAdagrad(torch.optim.Optimizer):
    """Makes its state when it is made, and never later, as torch's Adagrad did before 2.13."""

    def __init__(self, params, lr=0.01, start=0.5):
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            self.state |= {each: {"sum": torch.full_like(each, group["start"])} for each in group["params"]}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["sum"] += each.grad**2
                each -= group["lr"] * each.grad / self.state[each]["sum"].sqrt()


class Wrapped(torch.optim.SGD):
    """Cannot be made from the settings of a group alone."""

    def __init__(self, params, base):
        super().__init__(params, lr=base, momentum=0.5)


O = torch.optim
OPTIMIZERS = [O.SGD, O.Adam, O.AdamW, O.Adamax, O.Adadelta, O.Adafactor, O.Adagrad, O.ASGD, O.NAdam, O.RAdam, O.RMSprop]


@pytest.mark.parametrize("kind", [*OPTIMIZERS, O.Rprop, EagerAdagrad, Wrapped])
@pytest.mark.parametrize("used", [False, True])
def test_every_optimiser_trains_the_fast_layers_and_continues(kind, used):
    """Also one that has made a step, and so has state, before the fast layers come."""
    learners = []
    for _ in range(2):
        model = make("mlp")
        optimizer = kind(model.parameters(), 0.01)
        if used:
            model(next(stream(1))[0]).sum().backward()
            optimizer.step()
        learners.append(DualNet(model, optimizer, buffer_size=20))
    one, other = learners
    batches = list(stream(4))
    before = deepcopy(one.fast)
    for x, y in batches[:2]:
        one.observe(x, y)
    assert all(not torch.equal(*pair) for pair in zip(before.parameters(), one.fast.parameters(), strict=True))
    other.load_state_dict(deepcopy(one.state_dict()))
    for x, y in batches[2:]:
        assert one.observe(x, y) == other.observe(x, y)
    assert_same_state(one.evaluated(), other.evaluated(), rtol=0, atol=0)


def test_fast_layers_begin_with_the_state_that_the_optimiser_gives_new_parameters():
    model = make("mlp")
    optimizer = EagerAdagrad(model.parameters(), start=0.25)
    learner = DualNet(model, optimizer, buffer_size=20)
    assert all((optimizer.state[each]["sum"] == 0.25).all() for each in learner.fast.parameters())


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    result = tiny_run("dualnet")
    assert result.accuracy > 55
    model, _ = final_model("nowhere", result.config, result.weights, data_root(None))  # as export and analyze do
    images = torch.rand(4, 1, 28, 28)
    assert model(images).shape == (4, 10)
    assert all(torch.equal(value, result.weights[name]) for name, value in model.state_dict().items())


def test_a_refused_step_leaves_no_trace_in_the_fast_layers():
    learner = dualnet(make("resnet"))
    batches = list(stream(3))
    learner.observe(*batches[0])
    for x, y, sentence in (
        (batches[1][0], batches[1][1] + 9, "label"),
        (batches[1][0] * torch.nan, batches[1][1], "not"),
    ):
        before = deepcopy(learner.evaluated())
        with pytest.raises(HoldfastError, match=sentence):
            learner.observe(x, y)
        assert_same_state(learner.evaluated(), before, rtol=0, atol=0)


def test_slow_steps_in_a_loop_of_ones_own():
    """Lightning, for instance, ends a step without gradients; and a model may have parts that features do not need."""
    learners = []
    for _ in range(2):
        model = make("batchnorm")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.unused = nn.Conv2d(1, 1, 1).double()
        learners.append(dualnet(model))
    whole, apart = learners
    for x, y in stream(3):
        whole.observe(x, y)
        losses = apart.losses(x, y)
        apart.optimizer.zero_grad()
        losses.total.backward()
        apart.optimizer.step()
        with torch.no_grad():
            apart.commit(losses)
    assert_same_state(whole.evaluated(), apart.evaluated(), rtol=0, atol=0)


def test_one_stored_sample_has_no_correlation():
    learner = dualnet(make("mlp"))
    x, y = next(stream(1))
    assert "slow" not in learner.observe(x[:1], y[:1]).as_dict()
    assert learner.observe(x[:1], y[:1]).slow.isfinite()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"distillation": -1.0}, "distillation must be a finite number of at least 0, not -1.0"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, not 0.0"),
        ({"slow_lr": float("nan")}, "slow_lr must be a finite number of at least 0"),
        ({"slow_size": 1}, "slow_size must be a whole number of at least 2, not 1"),
        ({"slow_steps": 2.5}, "slow_steps must be a whole number of at least 0, not 2.5"),
        ({"lookahead": 1.5}, "lookahead must lie between 0 and 1, not at 1.5"),
        ({"loss": nn.functional.mse_loss}, "DualNet compares probabilities of classes: leave out loss="),
        ({"outputs": len}, "DualNet makes outputs of the model's features itself: leave out call= and outputs="),
        ({"head": "classifier"}, "the head of DualNet cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        dualnet(make("mlp"), **options)


def test_models_and_inputs_that_it_cannot_use():
    x, y = next(stream(1))
    with pytest.raises(UsageError, match=r"has no method features\(x\)"):
        dualnet(network("batchnorm")).observe(x, y)
    with pytest.raises(UsageError, match="need one tensor of floating-point numbers: let augment return one"):
        dualnet(make("mlp")).observe(x.to(torch.int64), y)

    class Steps:
        def zero_grad(self):
            pass

        def step(self):
            pass

    with pytest.raises(UsageError, match="an optimiser of type Steps has no param_groups that could take in further"):
        DualNet(make("mlp"), Steps(), buffer_size=20)
