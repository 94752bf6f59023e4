"""Ballast against slow loops."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners import Ballast
from holdfast.models import group_batchnorm
from holdfast.testing import check_learner
from learners.conftest import (
    CLASSES,
    Convolutions,
    assert_same_state,
    cross_entropies,
    descend,
    network,
    plain_copy,
    record,
    stream,
    tiny_run,
)

IDEAS = [{}, {"adjusted": True}, {"adjusted": True, "strength": 2.5}, {"target": "stored"}]


def ballast(model, **options) -> Ballast:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Ballast(model, optimizer, **{"buffer_size": 20, "alpha": 0.7, "beta": 0.5, "decay": 0.75, **options})


def adjustment(*labels):
    """For each class, the logarithm of 1 + how often it is among the labels."""
    every = [label for each in labels for label in each.tolist()]
    return torch.tensor([math.log(1 + every.count(number)) for number in range(CLASSES)], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
@pytest.mark.parametrize("ideas", IDEAS, ids=str)
def test_ten_steps(kind, replay_size, ideas):
    model = network(kind)
    reference, average = (plain_copy(kind, model) for _ in range(2))
    learner = ballast(model, replay_size=replay_size, **ideas)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        assert len(buffer.draws) == step  # one draw a step, none from an empty buffer
        outputs = reference(x)
        if step == 0:
            loss = current = cross_entropies(outputs, y).mean()
        else:
            drawn = buffer.draws[-1]
            assert len(drawn.y) == min(replay_size or 8, 8 * step, 20)
            now, steady = reference(drawn.x), average(drawn.x).detach()
            target = drawn.logits if "target" in ideas else steady
            squares = [(a - b) ** 2 for a, b in zip(now.flatten(), target.flatten(), strict=True)]
            consistency = sum(squares) / len(squares)
            added = ideas.get("strength", 1.0) * adjustment(y, drawn.y) if "adjusted" in ideas else 0.0
            current = cross_entropies(outputs + added, y).mean()
            replay = cross_entropies(now + added, drawn.y).mean()
            loss = current + 0.7 * replay + 0.5 * consistency
            torch.testing.assert_close(losses.replay, replay.detach(), rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(losses.consistency, consistency.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.current, current.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-8)
        descend(reference, loss, 0.1)
        decay = min(0.75, 1 - 1 / (step + 2))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), reference.parameters(), strict=True):
                slow.copy_(decay * slow + (1 - decay) * fast)
    # The average's weight comes from a count on the device, in float32.
    for mine, theirs in ((model, reference), (learner.average, average)):
        assert_same_state(mine, theirs, rtol=1e-6, atol=1e-7)


def features_network(kind):
    """A network that has features; its inputs are (B, 1, 6, 6)."""
    if kind == "mlp":
        return network("mlp")
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Convolutions().double()
    return group_batchnorm(model) if kind == "grouped" else model


def apart(a, b):
    """1 - cosine of the angle between two vectors; no angle if one of them is 0."""
    return 1 - (a @ b) / (a @ a).sqrt() / (b @ b).sqrt() if a.any() and b.any() else 1.0


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
def test_features_are_held_by_a_slow_teacher(kind):
    """Ten steps against a second, slow network whose features are compared one by one."""
    model = features_network(kind)
    reference = features_network("mlp" if kind == "mlp" else "batchnorm")
    teacher, average = deepcopy(reference), deepcopy(reference)
    options = {"hold_features": 3.0, "teacher": 0.875, "target": "stored"}
    learner = ballast(model, **options)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        if step == 0:
            loss = cross_entropies(reference(x), y).mean()
        else:
            drawn = buffer.draws[-1]
            average(drawn.x)
            turned = 0.0
            for part in (x, drawn.x):
                mine, held = reference.features(part), teacher.features(part).detach()
                turned = turned + sum(map(apart, mine, held)) / len(part)
            outputs, now = (reference.classifier(reference.features(part)) for part in (x, drawn.x))
            consistency = ((now - drawn.logits) ** 2).mean() + 3.0 * turned
            loss = cross_entropies(outputs, y).mean() + 0.7 * cross_entropies(now, drawn.y).mean() + 0.5 * consistency
            torch.testing.assert_close(losses.consistency, consistency.detach(), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-8)
        descend(reference, loss, 0.1)
        with torch.no_grad():
            for slow, most in ((average, 0.75), (teacher, 0.875)):
                decay = min(most, 1 - 1 / (step + 2))
                for mine, theirs in zip(slow.parameters(), reference.parameters(), strict=True):
                    mine.copy_(decay * mine + (1 - decay) * theirs)
    for (name, mine), theirs in zip(learner.teacher.named_parameters(), teacher.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=name)
    assert_same_state(learner.average, average, rtol=1e-6, atol=1e-7)


def turned_by(image, turns):
    """An image (channels, side, side) turned counter-clockwise by so many right angles, pixel by pixel."""
    side = image.shape[1]
    for _ in range(turns):
        before, image = image, torch.empty_like(image)
        for row in range(side):
            for column in range(side):
                image[:, row, column] = before[:, column, side - 1 - row]
    return image


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("adjusted", [False, True])
def test_turned_images_are_further_classes(kind, adjusted):
    """Ten steps against a network with outputs for every class at every angle; images are turned one by one."""
    model = features_network(kind)
    reference = features_network("mlp" if kind == "mlp" else "batchnorm")
    layer = nn.Linear(reference.classifier.in_features, 3 * CLASSES, dtype=torch.float64)
    weights = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    learner = ballast(model, turn=0.4, target="stored", class_weights=weights, adjusted=adjusted)
    buffer, numbers = record(learner), torch.Generator().set_state(learner.angles.get_state())

    def mean(outputs, labels, everything):
        every = [label for each in everything for label in each]
        more = [0.0] * outputs.shape[1]
        if adjusted:
            more = [math.log(1 + every.count(number)) for number in range(outputs.shape[1])]
        logs = (outputs + torch.tensor(more, dtype=torch.float64)).log_softmax(1)
        heavy = [float(weights[label % CLASSES]) for label in labels]
        return -sum(w * row[label] for w, row, label in zip(heavy, logs, labels, strict=True)) / sum(heavy)

    for step, (x, y) in enumerate(stream(10)):
        losses = learner.observe(x, y)
        if step == 0:
            loss = mean(reference(x), y.tolist(), [[]])
        else:
            drawn = buffer.draws[-1]
            parts, labels = [x, drawn.x], [y.tolist(), drawn.y.tolist()]
            angles = torch.randint(1, 4, (len(x) + len(drawn.x),), generator=numbers).tolist()
            angles = [angles[: len(x)], angles[len(x) :]]
            outputs = [reference(part) for part in parts]
            loss = mean(outputs[0], labels[0], labels) + 0.7 * mean(outputs[1], labels[1], labels)
            loss = loss + 0.5 * ((outputs[1] - drawn.logits) ** 2).mean()
            classes = [
                [label + CLASSES * turns for label, turns in zip(*each, strict=True)]
                for each in zip(labels, angles, strict=True)
            ]
            for weight, part, turns, wanted in zip((1.0, 0.7), parts, angles, classes, strict=True):
                found = reference.features(torch.stack([turned_by(*each) for each in zip(part, turns, strict=True)]))
                every = torch.cat([reference.classifier(found), layer(found)], 1)
                loss = loss + 0.4 * weight * mean(every, wanted, classes)
        torch.testing.assert_close(losses.total, loss.detach(), rtol=1e-6, atol=1e-8)
        descend(nn.ModuleList([reference, layer] if step else [reference]), loss, 0.1)
    assert layer.weight.any()
    for mine, theirs in zip(learner.turned.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    assert_same_state(model, reference, rtol=1e-6, atol=1e-7)


def test_only_square_images_can_be_turned():
    learner = ballast(nn.Sequential(nn.Flatten(), nn.Linear(18, CLASSES, dtype=torch.float64)), turn=1.0)
    x, y = next(stream(1))
    learner.observe(x[:, :, :3], y)
    before = deepcopy(learner.model)
    with pytest.raises(UsageError, match="only square images can be turned"):
        learner.observe(x[:, :, :3], y)
    assert_same_state(learner.model, before, rtol=0, atol=0)


def test_an_image_is_seen_at_all_angles():
    """The mean over four looks, one image and one angle after the other, with an average of each layer."""
    learner = ballast(features_network("batchnorm"), target="stored", turn=0.5, looks="angles")
    layers = [learner.turned.weight.detach().clone()]
    for minibatch in stream(6):
        learner.observe(*minibatch)
        layers.append(learner.turned.weight.detach().clone())
    assert layers[-1].any()
    weight = layers[0]
    for step, layer in enumerate(layers[1:], start=1):
        weight = torch.lerp(layer, weight, min(0.75, 1 - 1 / (step + 1)))
    torch.testing.assert_close(learner.at_all_angles.turned.weight, weight)
    x, _ = next(stream(1))
    answer, average = (each.eval() for each in (learner.evaluated(), deepcopy(learner.average)))
    head = torch.cat([average.classifier.weight, weight])
    offset = torch.cat([average.classifier.bias, learner.at_all_angles.turned.bias])
    for image, found in zip(x, answer(x), strict=True):
        looks = []
        for angle in range(4):
            outputs = head @ average.features(turned_by(image, angle)[None])[0] + offset
            looks.append(outputs[CLASSES * angle : CLASSES * (angle + 1)])
        torch.testing.assert_close(found, sum(looks) / 4)


class OneToken(Convolutions):
    """The last layer, in 16 bits, sees a single position of each image, as in some transformers."""

    def __init__(self):
        super().__init__()
        self.classifier.bfloat16().requires_grad_(False)

    def forward(self, x):
        return self.classifier(self.features(x)[:, None].bfloat16())[:, 0]


def test_what_learned_from_turned_images_can_look_at_them():
    model = OneToken()
    learner = ballast(model, turn=0.5, looks="angles")
    for x, y in stream(3, dtype=torch.float32):
        learner.observe(x, y)
    assert learner.evaluated().eval()(x).shape == (8, CLASSES)


def test_the_network_that_looks_from_all_sides_is_made_again_from_its_weights():
    learner = ballast(features_network("batchnorm"), turn=0.5, looks="angles")
    for minibatch in stream(3):
        learner.observe(*minibatch)
    again = Ballast.wrap(features_network("batchnorm"), turn=0.5, looks="angles")
    again.load_state_dict(learner.evaluated().state_dict())
    x, _ = next(stream(1))
    assert torch.equal(again.eval()(x), learner.evaluated().eval()(x))
    model = features_network("batchnorm")
    assert Ballast.wrap(model, turn=0.5) is model


def test_the_average_is_evaluated_and_follows():
    learner = ballast(network("mlp"), decay=0.0)
    for x, y in stream(3):
        learner.observe(x, y)
    assert learner.evaluated() is learner.average
    assert_same_state(learner.average, learner.model, rtol=0, atol=0)


def test_a_refused_step_leaves_no_trace():
    learner = ballast(network("batchnorm"))
    for x, y in stream(2):
        learner.observe(x, y)
    average = deepcopy(learner.average)
    with pytest.raises(UsageError, match="labels up to"):
        learner.observe(x, y + 9)
    assert_same_state(learner.average, average, rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"hold_features": 2.0},
        {"turn": 0.5},
        {"turn": 0.5, "looks": "angles"},
    ],
    ids=str,
)
def test_contract_with_parts_of_its_own(settings):
    """A teacher, a layer for turned classes: they are saved, restored and rolled back like all else."""
    given = {"lr": 0.05, "batch_size": 8, "replay_size": 6, "alpha": 0.5, "beta": 0.5, "buffer_size": 12}
    config = RunConfig(benchmark="testing", method="ballast", settings=tuple(settings.items()), **given)
    check_learner(Ballast, config)
    assert set(ballast(features_network("mlp")).extra_state()) == {"average", "updates"}


@pytest.mark.parametrize(
    "ideas",
    [
        *({}, {"adjusted": True, "strength": 2.5}, {"target": "stored"}),
        *({"hold_features": 1.0}, {"turn": 0.5, "looks": "angles"}),
    ],
    ids=str,
)
def test_it_remembers_what_sgd_forgets(ideas):
    assert tiny_run("sgd").accuracy < 25
    assert tiny_run("ballast", decay=0.95, **ideas).accuracy > 55


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": -0.1}, "beta must be a finite number of at least 0, not -0.1"),
        ({"alpha": float("inf")}, "alpha must be a finite number"),
        ({"strength": -1.0}, "strength must be a finite number of at least 0"),
        ({"hold_features": -1.0}, "hold_features must be a finite number of at least 0"),
        ({"turn": -1.0}, "turn must be a finite number of at least 0"),
        ({"teacher": -0.5}, "teacher must lie between 0 and 1"),
        ({"strength": 2.0}, "strength belongs to adjusted=True"),
        ({"teacher": 0.9}, "teacher belongs to hold_features"),
        ({"hold_features": 1.0, "beta": 0.0}, "nothing would be held"),
        ({"target": "mean"}, "unknown target 'mean'"),
        ({"looks": "twice"}, "unknown looks 'twice'"),
        ({"looks": "angles"}, "give turn"),
        ({"looks": "angles", "turn": 1.0, "outputs": len}, "leave out call= and outputs="),
        ({"decay": 1.1}, "decay must lie between 0 and 1, not at 1.1"),
        ({"loss": torch.nn.functional.mse_loss}, "leave out loss="),
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"decays": 1}, "unknown option of Ballast 'decays'"),
        ({"head": "classifier"}, "the head of Ballast cannot grow: leave out head="),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        ballast(network("mlp"), **options)


class Dropping(Convolutions):
    """Something comes between the features and the last layer, and outputs have a name."""

    def forward(self, x):
        return {"scores": self.classifier(nn.functional.dropout(self.features(x), 0.5, self.training))}


def test_what_is_held_is_what_the_model_computes():
    """A weight of nearly 0 changes nothing: the network is called as it is, with all that it does."""
    weights = []
    for hold in (0.0, 1e-12):
        torch.manual_seed(1)
        model = Dropping()
        learner = ballast(model, hold_features=hold, target="stored", outputs=lambda returned: returned["scores"])
        for x, y in stream(4, dtype=torch.float32):
            torch.manual_seed(2)  # the teacher draws as well, after the network
            learner.observe(x, y)
        weights.append(model.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-5, atol=1e-6)


def test_a_model_that_does_not_use_its_last_layer_is_told():
    model = Convolutions().double()
    model.rotation = nn.Linear(16, CLASSES, dtype=torch.float64)
    learner = ballast(model, hold_features=1.0)
    x, y = next(stream(1))
    learner.observe(x, y)
    before = deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="once a sample"):
        learner.observe(x, y)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_turned_classes_need_all_outputs_of_the_last_layer():
    learner = ballast(features_network("mlp"), turn=0.5, outputs=lambda returned: returned[:, : CLASSES - 1])
    x, y = next(stream(1))
    y = y % (CLASSES - 1)
    learner.observe(x, y)
    with pytest.raises(UsageError, match=f"the model has {CLASSES - 1} outputs, but its last nn.Linear has {CLASSES}"):
        learner.observe(x, y)


class Centred(nn.Module):
    """Works in place on what it is given, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.first, self.last = in_place, nn.Linear(36, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        centred = x.sub_(0.5) if self.in_place else x - 0.5
        return self.last(self.first(centred.flatten(1)).relu())


@pytest.mark.parametrize("idea", [{}, {"hold_features": 1.0}, {"turn": 0.5, "hold_features": 1.0}], ids=str)
def test_a_model_may_work_in_place_on_its_input(idea):
    found = []
    for in_place in (False, True):
        torch.manual_seed(1)
        learner = ballast(Centred(in_place).double(), **idea)
        for x, y in stream(4):
            learner.observe(x, y)
        found.append(learner.average)
    assert_same_state(*found, rtol=0, atol=0)


class Twice(nn.Module):
    """One BatchNorm is called twice, so that a first pass for all minibatches is taken back."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x):
        found = self.norm(self.first(x.flatten(1))).relu()
        return self.last(self.norm(self.second(found)).relu())


@pytest.mark.parametrize("idea", [{"hold_features": 1.0}, {"turn": 0.5}], ids=str)
def test_features_of_a_pass_that_is_taken_back_do_not_count(idea):
    found = []
    for convert in (lambda model: model, group_batchnorm):
        torch.manual_seed(1)
        model = convert(Twice().double())
        learner = ballast(model, **idea)
        images = torch.randn(4, 8, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for x in images:
            learner.observe(x, torch.arange(8) % CLASSES)
        found.append(model)
    assert_same_state(*found, rtol=0, atol=0)


def test_a_refused_step_draws_no_angles():
    learner = ballast(Convolutions().double(), turn=0.5)
    for x, y in stream(2):
        learner.observe(x, y)
    before = learner.angles.get_state()
    with pytest.raises(UsageError, match="labels up to"):
        learner.observe(x, y + 9)
    assert torch.equal(learner.angles.get_state(), before)
