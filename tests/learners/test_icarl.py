"""iCaRL against slow loops: its loss, its exemplars, and its answers."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import Icarl
from holdfast.models import MLP, group_batchnorm
from learners.conftest import CLASSES, Convolutions, assert_same_state, descend, network, record, stream, tiny_run


def make(kind):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = MLP((1, 6, 6), CLASSES, width=12) if kind == "mlp" else Convolutions()
    model = model.double()
    return group_batchnorm(model) if kind == "grouped" else model


def icarl(model, **options) -> Icarl:
    return Icarl(model, torch.optim.SGD(model.parameters(), lr=0.5), **{"buffer_size": 14, **options})


def binary_cross_entropy(outputs, targets, classes):
    terms = []
    for row, target in zip(outputs, targets, strict=True):
        for each in classes:
            p = 1 / (1 + torch.exp(-row[each]))
            terms.append(-(target[each] * p.log() + (1 - target[each]) * (1 - p).log()))
    return sum(terms) / len(terms)


def herd(found, count):
    """The numbers of the chosen rows: each choice brings the mean of all chosen ones nearest to the mean."""
    goal, chosen = found.mean(0), []
    while len(chosen) < min(count, len(found)):
        rest = [each for each in range(len(found)) if each not in chosen]
        chosen.append(min(rest, key=lambda each: float((found[[*chosen, each]].mean(0) - goal).norm())))
    return chosen


TASKS = [(0, 1), (2, 3), (4,)]


def tasks():
    """Three tasks of three minibatches."""
    draw = torch.Generator().manual_seed(3)
    for classes in TASKS:
        batches = []
        for _ in range(3):
            y = torch.tensor(classes)[torch.randint(0, len(classes), (8,), generator=draw)]
            x = torch.randn(8, 1, 6, 6, generator=draw, dtype=torch.float64) + y.view(-1, 1, 1, 1)
            batches.append((x, y))
        yield classes, batches


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("replay_size", [5, None])
def test_three_tasks(kind, replay_size):
    model = make(kind)
    reference = deepcopy(model)
    teacher, seen, exemplars = None, [], {}
    learner = icarl(model, replay_size=replay_size)
    buffer = record(learner)
    for classes, batches in tasks():
        old, seen = seen, [*seen, *classes]
        learner.begin_task(classes)
        for x, y in batches:
            loss = learner.observe(x, y).total
            labels = y
            if exemplars:
                drawn = buffer.draws[-1]
                assert len(drawn.y) == min(replay_size or 8, 14)
                x, labels = torch.cat([x, drawn.x]), torch.cat([y, drawn.y])
            targets = [[float(each == label) for each in range(CLASSES)] for label in labels.tolist()]
            if teacher is not None:
                answers = torch.sigmoid(teacher(x)).tolist()
                targets = [
                    [then[each] if each in old else now[each] for each in range(CLASSES)]
                    for now, then in zip(targets, answers, strict=True)
                ]
            expected = binary_cross_entropy(reference(x), targets, seen)
            torch.testing.assert_close(loss, expected.detach())
            descend(reference, expected, 0.5)
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        learner.end_task(x, y)
        teacher, share = deepcopy(reference).eval(), 14 // len(seen)
        exemplars = {label: samples[:share] for label, samples in exemplars.items()}
        with torch.no_grad():
            for label in classes:
                candidates = x[y == label]
                exemplars[label] = candidates[herd(teacher.features(candidates), share)]
        check_memory(buffer, exemplars)
        check_answers(learner, teacher, exemplars, x)
    assert not buffer.offers  # only the ends of tasks fill the buffer
    assert_same_state(model, reference, rtol=1e-9, atol=1e-11)
    assert_same_state(learner.teacher, teacher, rtol=1e-9, atol=1e-11)


def check_memory(buffer, exemplars):
    stored = buffer.contents()
    wanted = [(x, label) for label, samples in sorted(exemplars.items()) for x in samples]
    assert stored.y.tolist() == [label for _, label in wanted]
    assert torch.equal(stored.x, torch.stack([x for x, _ in wanted]))


@torch.no_grad()
def check_answers(learner, teacher, exemplars, x):
    """Differences of outputs are differences of squared distances; classes without exemplars are never the answer."""
    means = {label: teacher.features(samples).mean(0) for label, samples in exemplars.items()}
    for row, output in zip(teacher.features(x), learner.evaluated()(x), strict=True):
        distances = {label: ((row - mean) ** 2).sum() for label, mean in means.items()}
        assert int(output.argmax()) == min(distances, key=distances.get)
        first = min(means)
        for label in means:
            torch.testing.assert_close(output[label] - output[first], distances[first] - distances[label])
        assert all(output[label] < -1e8 for label in range(CLASSES) if label not in means)


def test_a_class_that_comes_again_is_chosen_anew_from_old_and_new_samples():
    learner = icarl(make("mlp"), buffer_size=4)
    for x, y in stream(2):
        learner.begin_task((0, 1, 2, 3))
        learner.observe(x, y % 2)
        learner.end_task(x, y % 2)
    assert learner.buffer.contents().y.tolist() == [0, 1]
    assert not learner.old.any()
    assert learner.seen.tolist() == [True] * 4 + [False]


def test_features_are_of_views_without_augmentation():
    class Doubling:
        def normalize(self, x):
            return x

        def __call__(self, x):
            return 2 * x

    learners = [icarl(make("mlp"), augment=view) for view in (Doubling(), None)]
    x, y = next(stream(1))
    for learner in learners:
        learner.begin_task((0, 1))
        learner.end_task(x, y)
    assert_same_state(learners[0].nearest, learners[1].nearest, rtol=0, atol=0)


class Tied(nn.Module):
    """Words -> classes, one for each word; the last layer has the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.classifier = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)
        self.classifier.weight = self.embedding.weight

    def features(self, x):
        return self.embedding(x).mean(1)

    def forward(self, x):
        return self.classifier(self.features(x))


def test_a_last_layer_that_shares_its_weights():
    """The answers do not change the features; and the evaluated network fits one of a run."""
    model = Tied().double()
    learner = icarl(model)
    learner.begin_task((0, 1))
    x, y = torch.randint(CLASSES, (12, 3)), torch.arange(12) % 2
    learner.observe(x, y)
    learner.end_task(x, y)
    stored = learner.buffer.contents()
    check_answers(learner, learner.teacher, {label: stored.x[stored.y == label] for label in (0, 1)}, x)
    assert model.classifier.weight is model.embedding.weight
    other = Icarl.wrap(Tied().double())
    other.load_state_dict(learner.evaluated().state_dict())
    assert torch.equal(other(x), learner.evaluated()(x))


def test_it_remembers_what_sgd_forgets():
    assert tiny_run("sgd").accuracy < 25
    result = tiny_run("icarl")
    assert result.accuracy > 55
    model = hf.MODELS["mlp"]((1, 28, 28), 10)
    model.load_state_dict(result.weights)  # the answers are those of an ordinary network


class Scoring(Convolutions):
    """Its outputs have a name."""

    def forward(self, x):
        return {"scores": super().forward(x)}


def test_outputs_may_have_a_name():
    learners = [icarl(Convolutions()), icarl(Scoring(), outputs=lambda returned: returned["scores"])]
    learners[1].model.load_state_dict(learners[0].model.state_dict())
    x, y = next(stream(1, dtype=torch.float32))
    for learner in learners:
        learner.begin_task((0, 1))
        learner.observe(x, y)
        learner.end_task(x, y)
    plain, named = (learner.evaluated()(x) for learner in learners)
    assert torch.equal(plain, named["scores"])


def test_what_it_refuses():
    with pytest.raises(UsageError, match="icarl must be told where tasks begin and end, and mnist-360 has no such"):
        hf.run(hf.RunConfig.preset("mnist-360", "icarl"), device="cpu")
    few = hf.RunConfig.preset("seq-mnist", "icarl", buffer_size=9)
    with pytest.raises(UsageError, match="10 classes need as many exemplars: choose a larger buffer size"):
        hf.run(few, device="cpu", on_step=lambda _: pytest.fail("it has begun"))
    learner = icarl(make("mlp"), buffer_size=2)
    learner.begin_task((0, 1))
    x, y = next(stream(1))
    with pytest.raises(UsageError, match=r"belongs to no task so far: call begin_task\(classes\)"):
        learner.observe(x, y + 2)
    with pytest.raises(UsageError, match="3 classes need as many exemplars: choose a larger buffer size"):
        learner.begin_task((2,))
    learner = icarl(network("batchnorm"))
    learner.begin_task((0, 1))
    with pytest.raises(UsageError, match=r"has no method features\(x\)"):
        learner.end_task(x, y)
    model = make("mlp")
    weight_norm(model.classifier)
    with pytest.raises(UsageError, match="but here it is computed from other parameters"):
        icarl(model)
    model = make("mlp")
    model.classifier.register_parameter("bias", None)
    with pytest.raises(UsageError, match=r"whose last nn\.Linear has a bias"):
        icarl(model)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"replay_size": 0}, "replay_size must be at least 1"),
        ({"class_weights": [1.0] * CLASSES}, "iCaRL has a loss of its own: leave out loss= and class_weights="),
        ({"head": "classifier"}, "the head of Icarl cannot grow"),
    ],
)
def test_settings_out_of_range(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        icarl(make("mlp"), **options)
