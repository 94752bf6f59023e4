"""The candidates of benchmarks/beyond.py: without ideas the paper's method, and each idea does what it says."""

import importlib.util
import json
import math
import sys
from copy import deepcopy
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.config import RunConfig
from holdfast.experiments import load_results
from holdfast.learners import Ballast, settings_for
from holdfast.methods import LEARNERS
from holdfast.models import MODELS
from holdfast.rng import generator
from holdfast.testing import check_learner

FILE = Path(__file__).parents[1] / "benchmarks" / "beyond.py"


@pytest.fixture(scope="module")
def beyond():
    specification = importlib.util.spec_from_file_location("beyond", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["beyond"] = module  # as the learner's settings are found through its module
    specification.loader.exec_module(module)
    yield module
    del LEARNERS._entries["beyond"], MODELS._entries["narrow"], sys.modules["beyond"]


class Network(nn.Sequential):
    def features(self, x):
        return self[:-1](x)


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    return Network(*layers)


def stream(steps=12, classes=(0, 1, 2)):
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(0, len(classes), (8,), generator=draw)
        yield torch.randn(8, 1, 4, 4, generator=draw), torch.tensor(classes)[chosen]


def learner_of(kind, **settings):
    model = network()
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20, seed=3, **settings)


def learn(kind, **settings):
    learner = learner_of(kind, **settings)
    for x, y in stream():
        learner.observe(x, y)
    return learner


def test_without_ideas_it_is_consistency_replay_with_one_draw(beyond):
    ours = learn(beyond.Candidate, beta=0.5, decay=0.0, target="stored")
    paper = learn(hf.ConsistencyReplay, beta=0.5, replay=1.0)
    for mine, theirs in zip(ours.model.state_dict().values(), paper.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert ours.evaluated() is ours.model


def test_average_is_the_mean_of_all_networks_at_first(beyond):
    learner = learner_of(beyond.Candidate)
    weights = [learner.model[0].weight.detach().clone()]
    for x, y in stream():
        learner.observe(x, y)
        weights.append(learner.model[0].weight.detach().clone())
    # Until the decay limits it, the average of n steps gives each the weight 1 / (n + 1), the beginning included.
    torch.testing.assert_close(learner.evaluated()[0].weight, torch.stack(weights).mean(0))


def test_statistics_of_the_buffer(beyond):
    learner = learn(beyond.Candidate, decay=0.9, statistics="buffer")
    norm = learner.evaluated()[1]
    inputs = learner.average[0](learner.buffer.contents().x)
    torch.testing.assert_close(norm.running_mean, inputs.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, inputs.transpose(0, 1).flatten(1).var(1))


@pytest.mark.parametrize("refresh", [0.25, 1.0])
def test_stored_outputs_of_drawn_samples_move_to_the_average_s(beyond, refresh):
    learner = learn(beyond.Candidate, decay=0.9, target="stored", refresh=refresh)
    x, y = next(stream())
    before = learner.buffer.contents().logits.clone()
    losses, drawn = last_draw(learner, x, y)
    steady = deepcopy(learner.average)(drawn.x)  # in training mode, as the learner asks it
    slots = [int((before == row).all(1).nonzero()) for row in drawn.logits]
    learner.buffer.add = lambda *_: None  # nothing new takes a slot
    learner.commit(losses)
    after = learner.buffer.contents().logits
    torch.testing.assert_close(after[slots], torch.lerp(drawn.logits, steady, refresh))
    others = [slot for slot in range(20) if slot not in slots]
    assert torch.equal(after[others], before[others])


def test_an_anchor_pulls_the_network_to_the_teacher(beyond):
    learner = learn(beyond.Candidate, decay=0.9, teacher=0.99, anchor=0.25)
    before, taught = (each[0].weight.detach().clone() for each in (learner.model, learner.teacher))
    x, y = next(stream())
    losses = learner.losses(x, y)
    learner.commit(losses)  # without a step of the optimiser
    limit = 1 - 1 / (int(learner.updates) + 1)
    followed = limit * taught + (1 - limit) * before  # the teacher moves first
    torch.testing.assert_close(learner.model[0].weight, 0.75 * before + 0.25 * followed)
    with pytest.raises(hf.UsageError, match="anchor needs a teacher"):
        learner_of(beyond.Candidate, anchor=0.1)


def test_gradients_up_to_a_limit(beyond):
    learner = learn(beyond.Candidate, limit=0.01)
    before = [each.detach().clone() for each in learner.model.parameters()]
    learner.observe(*next(stream()))
    moved = [(mine - old).detach().flatten() for mine, old in zip(learner.model.parameters(), before, strict=True)]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_asymmetric_minibatch_leaves_absent_classes_alone(beyond):
    learner = learn(beyond.Candidate, asymmetric=True, alpha=0.0, beta=0.0)
    before = learner.model[4].bias.detach().clone()
    learner.observe(torch.randn(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(learner.model[4].bias[1:], before[1:])


def last_draw(learner, x, y):
    """The losses of a minibatch, and what was drawn for them."""
    again = torch.Generator().set_state(learner.buffer.generator.get_state())
    losses = learner.losses(x, y)
    learner.buffer.generator, mine = again, learner.buffer.generator
    drawn = learner.buffer.sample(len(y))
    learner.buffer.generator = mine
    return losses, drawn


@pytest.mark.parametrize("turn", [0.0, 0.5])
def test_counts_of_earlier_steps_fade(beyond, turn):
    learner = learner_of(beyond.Candidate, adjusted=True, recall=0.5, target="stored", turn=turn)
    counted, batches = torch.zeros(3), list(stream(5))
    learner.observe(*batches[0])
    for x, y in batches[1:]:
        learner.losses(x, y)  # losses that nobody commits leave no trace
        model = deepcopy(learner.model)
        losses, drawn = last_draw(learner, x, y)
        counted = 0.5 * counted + torch.bincount(torch.cat([y, drawn.y]), minlength=3)
        expected = nn.functional.cross_entropy(model(x) + (1 + counted).log(), y)
        torch.testing.assert_close(losses.current, expected)
        learner.descend(losses)
        learner.commit(losses)
        torch.testing.assert_close(learner.fair.recalled[3], counted)
        angles = learner.fair.recalled[12].view(4, 3)
        assert not angles[0].any()
        torch.testing.assert_close(angles.sum(0), counted if turn else torch.zeros(3))


def test_each_of_several_losses_has_counts_of_its_own(beyond):
    """Gradients may be accumulated over minibatches before they are committed."""
    learner = learner_of(beyond.Candidate, adjusted=True, recall=0.5)
    batches, counted = list(stream(4)), torch.zeros(3)
    learner.observe(*batches[0])
    both = [last_draw(learner, x, y) for x, y in batches[1:3]]
    (both[0][0].total + both[1][0].total).backward()
    learner.optimizer.step()
    for (losses, drawn), (_, y) in zip(both, batches[1:3], strict=True):
        learner.commit(losses)
        counted = 0.5 * counted + torch.bincount(torch.cat([y, drawn.y]), minlength=3)
        torch.testing.assert_close(learner.fair.recalled[3], counted)
    learner.losses(*batches[3])  # nobody commits it
    learner.forget_all()
    learner.observe(*batches[3])
    torch.testing.assert_close(learner.fair.recalled[3], counted)


def test_absent_classes_are_left_alone_at_every_angle(beyond):
    learner = learn(beyond.Candidate, asymmetric=True)
    labels = torch.tensor([1, 4 + 3, 1 + 9])  # class 1 as it is, and at two angles
    expected = [number % 3 != 1 for number in range(12)]
    assert learner.fair.absent(labels, 12).tolist() == expected


@pytest.mark.parametrize("mix", ["none", "mixup", "cutmix"])
@pytest.mark.parametrize("target", ["average", "stored"])
def test_terms_against_slow_loops(beyond, mix, target):
    settings = {"alpha": 0.7, "beta": 0.3, "hold": 0.4, "asymmetric": True, "adjusted": True, "decay": 0.8}
    learner = learn(beyond.Candidate, mix=mix, target=target, **settings)
    model, average = deepcopy(learner.model), deepcopy(learner.average)
    numbers = torch.Generator().set_state(learner.generator.get_state())
    x, y = torch.randn(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)
    losses, drawn = last_draw(learner, x, y)
    averaged = average(drawn.x).detach()  # in any case: its BatchNorm statistics come from draws
    targets = averaged if target == "average" else drawn.logits
    mixed, shares = drawn.x.clone(), [1.0] * 8
    if mix == "mixup":
        shares = torch.rand(8, 1, generator=numbers).flatten().tolist()
        mixed = torch.stack([s * drawn.x[i] + (1 - s) * drawn.x[i - 1] for i, s in enumerate(shares)])
    if mix == "cutmix":
        down, right, area = torch.rand(3, 8, generator=numbers).tolist()
        for i in range(8):
            half, taken = area[i] ** 0.5 / 2, 0
            for row in range(4):
                for column in range(4):
                    if abs((row + 0.5) / 4 - down[i]) < half and abs((column + 0.5) / 4 - right[i]) < half:
                        mixed[i, :, row, column] = drawn.x[i - 1, :, row, column]
                        taken += 1
            shares[i] = 1 - taken / 16
    outputs, now = model(x), model(mixed)
    counts = [1 + sum(label == each for label in [*y.tolist(), *drawn.y.tolist()]) for each in range(3)]
    adjustment = torch.tensor(counts).log()
    consistency, replay = 0.0, 0.0
    for i, s in enumerate(shares):
        wanted = s * targets[i] + (1 - s) * targets[i - 1]
        consistency += ((now[i] - wanted) ** 2).mean() / 8
        logs = (now[i] + adjustment).log_softmax(0)
        replay -= (s * logs[drawn.y[i]] + (1 - s) * logs[drawn.y[i - 1]]) / 8
    steady = average.eval()(x).detach()
    consistency += 0.4 * sum((outputs[i, c] - steady[i, c]) ** 2 for i in range(8) for c in (1, 2)) / 24
    torch.testing.assert_close(losses.current, torch.zeros(()))  # all classes were seen, and only one is in the batch
    torch.testing.assert_close(losses.replay, replay)
    torch.testing.assert_close(losses.consistency, consistency)
    torch.testing.assert_close(losses.total, 0.7 * replay + 0.3 * consistency)


def test_jitter_against_slow_loops(beyond):
    """A crop is read between pixels in straight lines, those beyond the edge as 0; then colours, contrast and light."""
    images = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(4))
    made = beyond.jittered(images, 0.4, torch.Generator().manual_seed(5))
    uniforms = torch.rand(6, 3, 1, 1, 1, generator=torch.Generator().manual_seed(5)).flatten(1).tolist()
    for i, (size, down, right, *colours) in enumerate(zip(*uniforms, strict=True)):
        side, wanted = 1 - 0.2 * size, torch.zeros(2, 4, 4)
        for row in range(4):
            for column in range(4):
                # Pixel 0 covers 0 to 1, so its middle is at 0.5; the picture's middle is at 2.
                at = [
                    2 + 2 * (side * ((place + 0.5) / 2 - 1) + (1 - side) * (2 * shift - 1)) - 0.5
                    for place, shift in ((row, down), (column, right))
                ]
                for r in (math.floor(at[0]), math.floor(at[0]) + 1):
                    for c in (math.floor(at[1]), math.floor(at[1]) + 1):
                        if 0 <= r < 4 and 0 <= c < 4:
                            near = (1 - abs(at[0] - r)) * (1 - abs(at[1] - c))
                            wanted[:, row, column] += near * images[i, :, r, c]
        saturation, contrast, light = (0.4 * (2 * each - 1) for each in colours)
        wanted += saturation * (wanted - wanted.mean(0))
        wanted += contrast * (wanted - wanted.mean()) + light
        torch.testing.assert_close(made[i], wanted, rtol=1e-5, atol=1e-5)


def test_supervised_contrast_against_slow_loops(beyond):
    directions = nn.functional.normalize(torch.randn(6, 3, generator=torch.Generator().manual_seed(6)))
    labels, total = [0, 1, 0, 0, 1, 1], 0.0
    for i in range(6):
        likeness = {j: math.exp(float(directions[i] @ directions[j]) / 0.1) for j in range(6) if j != i}
        alike = [j for j in likeness if labels[j] == labels[i]]
        total -= fmean(math.log(likeness[j] / sum(likeness.values())) for j in alike) / 6
    found = beyond.supervised_contrast(directions, torch.tensor(labels))
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_contrast_compares_two_views_of_the_minibatch_and_of_the_draw(beyond):
    model = MODELS["mlp"]((1, 4, 4), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"alpha": 0.7, "beta": 0.3, "jitter": 0.4, "contrast": 0.5, "target": "stored"}
    learner = beyond.Candidate(model, optimizer, buffer_size=20, seed=3, **settings)
    for x, y in stream(4):
        learner.observe(x, y)
    numbers = torch.Generator().set_state(learner.generator.get_state())
    losses, drawn = last_draw(learner, x, y)
    expected = losses.current + 0.7 * losses.replay + 0.3 * losses.consistency
    for images, labels in ((x, y), (drawn.x, drawn.y)):
        views = torch.cat([images, beyond.jittered(images, 0.4, numbers)])
        directions = nn.functional.normalize(model.features(views))
        expected = expected + 0.5 * beyond.supervised_contrast(directions, torch.cat([labels, labels]))
    torch.testing.assert_close(losses.total, expected)


def test_features_are_held_by_a_slower_network(beyond):
    """The cosine with the teacher's features on both; at first, the teacher is the mean of all networks."""
    model = MODELS["mlp"]((1, 4, 4), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"alpha": 0.0, "beta": 0.3, "hold_features": 2.0, "teacher": 0.99, "decay": 0.5, "target": "stored"}
    learner = beyond.Candidate(model, optimizer, buffer_size=20, seed=3, **settings)
    networks = [deepcopy(model)]
    for x, y in stream(4):
        learner.observe(x, y)
        networks.append(deepcopy(model))
    for name, held in learner.teacher.named_parameters():
        torch.testing.assert_close(held, sum(each.get_parameter(name) for each in networks) / 5)
    assert not torch.equal(learner.average.get_parameter(name), held)
    losses, drawn = last_draw(learner, x, y)
    expected = nn.functional.mse_loss(model(drawn.x), drawn.logits)
    for images in (x, drawn.x):
        now, then = model.features(images).detach(), learner.teacher.features(images)
        expected = expected + 2.0 * fmean(
            1 - float(nn.functional.cosine_similarity(a, b, 0)) for a, b in zip(now, then, strict=True)
        )
    torch.testing.assert_close(losses.consistency, expected)
    assert "teacher" in learner.extra_state()


def test_the_nearest_mean_answers(beyond):
    """The class with the largest cosine, one sample after the other; no class that has no samples."""
    learner = learner_of(beyond.Candidate, nearest=True)
    for x, y in stream(classes=(0, 2)):
        learner.observe(x, y)
    stored, average = learner.buffer.contents(), learner.average
    answer = learner.evaluated().eval()
    average.eval()
    means = {}
    for label in (0, 2):
        found = [average.features(x[None])[0] for x, y in zip(stored.x, stored.y, strict=True) if y == label]
        means[label] = sum(each / each.norm() for each in found)
    for x in torch.randn(20, 1, 4, 4):
        found = average.features(x[None])[0]
        cosines = {label: float(found @ mean / mean.norm()) for label, mean in means.items()}
        assert int(answer(x[None]).argmax()) == max(cosines, key=cosines.get)
    average.train()
    before = {name: each.clone() for name, each in average.state_dict().items()}
    learner.evaluated()
    assert all(torch.equal(each, before[name]) for name, each in average.state_dict().items())


def test_a_teacher_of_its_own_holds_the_outputs(beyond):
    learner = learn(beyond.Candidate, hold=2.0, teacher=0.99, decay=0.5, target="stored", beta=1.0)
    x, y = torch.randn(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)
    held, model = deepcopy(learner.teacher)(x).detach(), deepcopy(learner.model)
    losses, drawn = last_draw(learner, x, y)
    absent = torch.tensor([0.0, 1.0, 1.0])
    apart = ((model(x) - held).square() * absent).mean()
    torch.testing.assert_close(
        losses.consistency, nn.functional.mse_loss(deepcopy(learner.model)(drawn.x), drawn.logits) + 2.0 * apart
    )


def test_all_images_are_jittered_and_adjustment_has_a_strength(beyond):
    learner = learn(beyond.Candidate, adjusted=True, strength=2.0, jitter=0.4, jitter_all=True, target="stored")
    model, numbers = deepcopy(learner.model), torch.Generator().set_state(learner.generator.get_state())
    x, y = torch.randn(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64)
    losses, drawn = last_draw(learner, x, y)
    outputs = model(beyond.jittered(torch.cat([x, drawn.x]), 0.4, numbers)[:8])
    counts = torch.bincount(torch.cat([y, drawn.y]), minlength=3) + 1
    torch.testing.assert_close(losses.current, nn.functional.cross_entropy(outputs + 2.0 * counts.log(), y))


def test_an_image_is_seen_mirrored(beyond):
    """The mean over both looks, one image after the other."""
    x = torch.randn(3, 1, 4, 4)
    learner = learn(beyond.Candidate, target="stored", decay=0.8, looks="mirrored")
    answer, average = (each.eval() for each in (learner.evaluated(), deepcopy(learner.average)))
    looks = [torch.stack([average(each[None])[0], average(each.flip(2)[None])[0]]) for each in x]
    torch.testing.assert_close(answer(x), torch.stack([each.mean(0) for each in looks]))


def test_average_sees_unmixed_draws_only(beyond):
    learner = learn(beyond.Candidate, mix="cutmix", hold=1.0)
    norm, convolution = learner.average[1], learner.average[0]
    before = norm.running_mean.clone()
    x, y = next(iter(stream(1)))
    _, drawn = last_draw(learner, x, y)
    torch.testing.assert_close(norm.running_mean, 0.9 * before + 0.1 * convolution(drawn.x).mean((0, 2, 3)))


COMBINATIONS = [
    {},
    {"decay": 0.0, "target": "stored"},
    {"target": "stored", "mix": "mixup"},
    {"asymmetric": True, "mix": "cutmix", "decay": 0.9},
    {"asymmetric": True, "mix": "cutmix", "hold": 0.5, "balanced": True},
    {"adjusted": True, "mix": "mixup", "regularizer": "l2"},
    {"target": "stored", "jitter": 0.4},
    {"target": "stored", "jitter": 0.4, "jitter_all": True, "adjusted": True, "strength": 2.0},
    {"hold": 0.5, "teacher": 0.9},
    {"turn": 0.5, "adjusted": True, "hold_features": 0.5, "teacher": 0.9},
    {"turn": 0.5, "adjusted": True, "recall": 0.9, "looks": "angles"},
    {"turn": 0.5, "asymmetric": True},
]


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_contract(beyond, settings):
    given = {"lr": 0.05, "batch_size": 8, "replay_size": 6, "alpha": 0.5, "beta": 0.5, "buffer_size": 12}
    config = RunConfig(benchmark="testing", method="beyond", settings=tuple(settings.items()), **given)
    check_learner(beyond.Candidate, config)


FINAL = {"target", "decay", "adjusted", "strength", "balanced", "hold_features", "teacher", "turn", "looks"}


def beyond_or_ballast(config):
    """Ballast, if it has these settings and an average."""
    settings = dict(config.settings)
    known = settings.keys() <= FINAL and settings.get("looks") != "mirrored"
    return "ballast" if known and settings.get("decay") != 0 else "beyond"


IDEAS = [
    {},
    {"adjusted": True, "turn": 0.5},
    {"adjusted": True, "balanced": True},
    {"adjusted": True, "strength": 3.0},
    {"turn": 0.5, "looks": "angles"},
    {"target": "stored"},
    {"adjusted": True, "hold_features": 2.0, "teacher": 0.99},
]


@pytest.mark.parametrize("ideas", IDEAS, ids=str)
def test_ballast_computes_the_same_weights_as_the_candidate(beyond, ideas):
    """Results of a candidate at full length are results of the method that it became."""
    candidate, method = (learn(kind, beta=0.2, decay=0.9, **ideas) for kind in (beyond.Candidate, Ballast))
    for mine, theirs in ((candidate.model, method.model), (candidate.evaluated(), method.evaluated())):
        for name, tensor in mine.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert torch.equal(candidate.buffer.contents().x, method.buffer.contents().x)


def test_every_candidate_has_a_config_of_its_own(beyond):
    for epochs in (5, None):
        given = {"buffer_size": 200, "epochs": epochs, "seed": 0}
        configs = {name: beyond.config_of(settings, **given) for name, settings in beyond.CANDIDATES.items()}
        assert len(set(configs.values())) == len(configs)
        for config in configs.values():
            assert (config.epochs, config.validation) == ((5, beyond.VALIDATION) if epochs else (50, 0.0))
            assert config.method == ("beyond" if epochs else beyond_or_ballast(config))


def test_settings_at_their_default_are_not_in_the_fingerprint(beyond):
    short = beyond.config_of({"decay": 0.999, "mix": "none", "asymmetric": False}, buffer_size=200, epochs=5, seed=0)
    assert short.settings == ()
    assert short.fingerprint == beyond.config_of({}, buffer_size=200, epochs=5, seed=0).fingerprint
    # A later version that has only the settings that are named here has the same fingerprint for the same run.
    full = beyond.config_of(beyond.ADJUSTED, buffer_size=200, seed=0)
    named = {"adjusted": True, "decay": 0.9999}
    plain = RunConfig.preset("seq-cifar10", "mse", buffer_size=200)
    later = plain.change(method="ballast", alpha=1.0, beta=0.2, settings=tuple(named.items()))
    assert full.fingerprint == later.fingerprint
    assert set(named) < set(settings_for(full))


def test_full_length_stretches_the_decay_and_takes_turns(beyond):
    configs = beyond.full_configs("average as target", [200, 500], 2)
    assert [(config.buffer_size, config.seed) for config in configs] == [(200, 0), (500, 0), (200, 1), (500, 1)]
    # 0.001 a step for 5 epochs is 0.0001 a step for 50.
    assert {dict(config.settings)["decay"] for config in configs} == {0.9999}
    assert beyond.full_name(configs[1]) == "seq-cifar10/ballast-500-seed0.json"
    plain = beyond.full_configs("plain", [200], 1)[0]
    assert (plain.method, dict(plain.settings)["decay"]) == ("beyond", 0.0)


def test_with_fewer_samples_the_average_follows_faster(beyond):
    """It remembers the same share of a task: here 0.225 times as many steps as in a run of five epochs."""
    more = ["train_limit=2000", "validation=0.5"]
    config = beyond.config_of(
        {"decay": 0.99, "teacher": 0.9995, "hold_features": 1.0}, buffer_size=200, epochs=10, seed=0, more=more
    )
    usual = 10_000 * 0.9 * 5  # samples that five epochs of a task show
    share = 2000 * 0.5 * 10 / usual
    found = dict(config.settings)
    assert found["decay"] == pytest.approx(1 - 0.01 / share)
    assert found["teacher"] == pytest.approx(1 - 0.0005 / share)


def test_best_of_those_with_enough_runs(beyond):
    table = [
        {"candidate": "once", "accuracies": [70.0]},
        {"candidate": "twice", "accuracies": [69.0, 68.0]},
        {"candidate": "also", "accuracies": [60.0, 61.0]},
    ]
    assert beyond.best(table) == "twice"
    with pytest.raises(hf.UsageError, match="no candidate has a result"):
        beyond.best([])


def test_short_runs_then_the_best_at_full_length(beyond, tmp_path, capsys):
    out, table, small = tmp_path / "out", tmp_path / "table.jsonl", tmp_path / "small"
    tiny = ["--benchmark", "seq-mnist", "--set", "tasks=2", "--set", "train_limit=60", "--device", "cpu"]
    names = ["average as target", "average as target, adjusted"]
    common = [*tiny, "--out", str(out), "--buffer-size", "20", *(part for name in names for part in ("--only", name))]
    assert beyond.main([*common, "--epochs", "1", "--summary", str(table)]) == 0
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    assert {(line["candidate"], line["validation"]) for line in lines} == {(name, 0.1) for name in names}
    for line in lines:
        assert line["seeds"] == [0, 1]
        assert line["accuracies"] == pytest.approx([fmean(tasks) for tasks in line["last"]])
    full = ["--epochs", "1", "--full", "best", "--buffer-size", "30", "--seeds", "2", "--small", str(small)]
    assert beyond.main([*common, *full]) == 0
    assert f"at full length: {lines[0]['candidate']}" in capsys.readouterr().out
    files = sorted(path.name for path in (small / "seq-mnist").iterdir())
    assert files == [f"ballast-{size}-seed{seed}.json" for size in (20, 30) for seed in (0, 1)]
    found = load_results(small).by_fingerprint.values()
    assert {(each.config.method, each.config.validation) for each in found} == {("ballast", 0.0)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 0.0}, "without an averaged network"),
        ({"decay": 0.0, "target": "stored", "hold": 1.0}, "without an averaged network"),
        ({"mix": "cutmx"}, "unknown mix 'cutmx'"),
        ({"looks": "angles"}, "give turn"),
        ({"recall": 1.5}, "recall must lie between 0 and 1"),
        ({"target": "averag"}, "unknown target"),
        ({"hold": -1.0}, "hold must be a finite number"),
        ({"turn": 1.0, "contrast": 1.0}, "give neither hold_features nor turn"),
        ({"decay": 1.5}, "decay must lie between 0 and 1"),
        ({"loss": nn.functional.mse_loss}, "leave out loss="),
    ],
)
def test_nonsense_is_refused(beyond, settings, message):
    with pytest.raises(hf.UsageError, match=message):
        learner_of(beyond.Candidate, **settings)


def test_numbers_of_mixtures_come_from_the_seed(beyond):
    x = torch.randn(8, 1, 6, 6)
    for mixture in (beyond.mixup, beyond.cutmix):
        made = [mixture(x, generator(seed, "mix")) for seed in (0, 0, 1)]
        assert torch.equal(made[0][0], made[1][0])
        assert not torch.equal(made[0][0], made[2][0])
