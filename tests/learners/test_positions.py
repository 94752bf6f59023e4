"""Classes at many positions of a sample: tokens and pixels, against loops over positions."""

from copy import deepcopy
from itertools import product
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.errors import TrainingError, UsageError
from holdfast.learners import AveragedGem, DarkReplay, Sgd
from holdfast.learners.positions import IGNORED, Positions
from learners.conftest import assert_same_state

WORDS = 7
NORMS = ("l1", "l2", "linf", "mse")


class Reader(nn.Module):
    """Tokens (B, T) -> logits of the next ones (B, T, WORDS)."""

    def __init__(self, words=WORDS, width=6):
        super().__init__()
        self.embed, self.body = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.classifier = nn.Linear(width, words)

    def forward(self, tokens):
        return self.classifier(self.body(self.embed(tokens))[0])


def reader(seed=0, **sizes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Reader(**sizes).double()


def segmenter(seed=0):
    """Images (B, 1, H, W) -> logits of the pixels (B, 3, H, W)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Conv2d(1, 3, 3, padding=1).double()


def texts(steps, size=4, length=5, seed=0):
    """Tokens and labels of the next ones, about a third of them not supervised."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(WORDS, (size, length), generator=draw)
        y = torch.randint(WORDS, (size, length), generator=draw)
        y[torch.rand(size, length, generator=draw) < 0.3] = IGNORED
        y[0, 0] = 1
        yield x, y


def pictures(steps, size=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        y = torch.randint(-1, 3, (size, 4, 5), generator=draw)
        y[y < 0] = IGNORED
        yield torch.randn(size, 1, 4, 5, generator=draw, dtype=torch.float64), y


def sgd(model, lr=0.1):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=lr)


def make(kind, model, **options):
    shared = {"class_dim": -1} | ({"buffer_size": 12} if kind.needs_buffer else {})
    return kind(model, sgd(model), **shared | options)


def watch(learner):
    """All draws that the learner's buffer gives from now on."""
    drawn, sample = [], learner.buffer.sample
    learner.buffer.sample = lambda n: drawn.append(sample(n)) or drawn[-1]
    return drawn


def surprise(logits, label):
    """-log p(label) in plain numbers."""
    return log(sum(exp(each) for each in logits)) - logits[label]


def places(outputs, y, class_dim):
    """Every supervised position: its logits, one after the other, and its label."""
    outputs = outputs.movedim(class_dim, -1)
    for place in product(*map(range, y.shape)):
        if y[place] != IGNORED:
            yield outputs[place], int(y[place])


def mean_surprise(outputs, y, class_dim=-1):
    found = [surprise(logits.tolist(), label) for logits, label in places(outputs, y, class_dim)]
    return sum(found) / len(found)


# --- the loss --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    classes=st.integers(2, 4),
    data=st.data(),
    weighted=st.booleans(),
)
def test_the_mean_is_over_supervised_positions(shape, classes, data, weighted):
    class_dim = data.draw(st.sampled_from([-1, *range(1, len(shape) + 1)]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    outputs = torch.randn(*shape, classes, generator=draw, dtype=torch.float64).movedim(-1, class_dim)
    y = torch.randint(-1, classes, shape, generator=draw)
    y[y < 0] = IGNORED
    weights = 0.5 + torch.rand(classes, generator=draw, dtype=torch.float64) if weighted else None
    outputs.requires_grad_()
    mean = Positions(class_dim).mean(outputs, y, None, weights)
    found = [
        (surprise(z.tolist(), label), 1.0 if weights is None else float(weights[label]))
        for z, label in places(outputs, y, class_dim)
    ]
    expected = sum(s * w for s, w in found) / sum(w for _, w in found) if found else 0.0
    assert mean.item() == pytest.approx(expected)
    own = Positions(class_dim).mean(outputs, y, lambda z, label: F.cross_entropy(z, label, weights), None)
    assert own.item() == pytest.approx(expected)
    mean.backward()
    assert outputs.grad.isfinite().all()
    counted = Positions(class_dim).last(outputs.grad).abs().sum(-1) > 0
    assert torch.equal(counted, y != IGNORED)


@pytest.mark.parametrize("kind", [Sgd, hf.ExperienceReplay, hf.ConsistencyReplay, DarkReplay, AveragedGem])
@pytest.mark.parametrize(
    ("model", "stream", "class_dim"), [(reader, texts, -1), (reader, texts, 2), (segmenter, pictures, 1)]
)
def test_the_loss_of_the_minibatch(kind, model, stream, class_dim):
    learner = make(kind, model(), class_dim=class_dim)
    for x, y in stream(3):
        before = learner.model(x)
        losses = learner.observe(x, y)
        assert float(losses.current) == pytest.approx(mean_surprise(before, y, class_dim))
    assert learner.buffer is None or torch.equal(learner.buffer.contents().y[-len(y) :], y)
    assert not learner.capturable


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_er_counts_positions(alpha):
    """One mean over all supervised positions of the minibatch and the draw; replayed ones weigh alpha."""
    learner = make(hf.ExperienceReplay, reader(), alpha=alpha, replay_size=3)
    drawn = watch(learner)
    for x, y in texts(4):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    now = [surprise(z.tolist(), label) for z, label in places(before(x), y, -1)]
    then = [surprise(z.tolist(), label) for z, label in places(before(drawn[-1].x), drawn[-1].y, -1)]
    assert float(losses.total) == pytest.approx((sum(now) + alpha * sum(then)) / (len(now) + len(then)))
    assert float(losses.replay) == pytest.approx(sum(then) / len(then))


def test_a_draw_without_supervised_positions_counts_nothing():
    for kind in (hf.ExperienceReplay, hf.ConsistencyReplay, DarkReplay):
        learner = make(kind, reader(), buffer_size=8, replay_size=8)
        x, y = next(texts(1))
        learner.observe(x, y)
        learner.buffer.forget(torch.tensor([True, *[False] * 3]))
        learner.buffer._storage.columns[1].fill_(IGNORED)
        losses = learner.observe(x, y)
        assert losses.replay == losses.consistency == 0
        learner.check_finite()


# --- consistency -----------------------------------------------------------------------------------------------------

SLOW = {
    "l1": lambda z, s: sum(abs(a - b) for a, b in zip(z, s, strict=True)),
    "l2": lambda z, s: sum((a - b) ** 2 for a, b in zip(z, s, strict=True)) ** 0.5,
    "linf": lambda z, s: max(abs(a - b) for a, b in zip(z, s, strict=True)),
    "mse": lambda z, s: sum((a - b) ** 2 for a, b in zip(z, s, strict=True)) / len(z),
    "kl": lambda z, s: sum(exp(-surprise(s, c)) * (surprise(z, c) - surprise(s, c)) for c in range(len(z))) / len(z),
    "byol": lambda z, s: (
        2 - 2 * sum(a * b for a, b in zip(z, s, strict=True)) / (sum(a * a for a in z) * sum(b * b for b in s)) ** 0.5
    ),
}


def mean_distance(term, now, then, y, class_dim):
    pairs = zip(places(now, y, class_dim), places(then, y, class_dim), strict=True)
    found = [term(z.tolist(), s.tolist()) for (z, _), (s, _) in pairs]
    return sum(found) / len(found)


@pytest.mark.parametrize("term", SLOW)
@pytest.mark.parametrize(("model", "stream", "class_dim"), [(reader, texts, -1), (segmenter, pictures, 1)])
def test_consistency_of_each_position(term, model, stream, class_dim):
    learner = make(hf.ConsistencyReplay, model(), class_dim=class_dim, regularizer=term, alpha=0.7, beta=0.4)
    drawn = watch(learner)
    for x, y in stream(4):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    one, two = drawn[-2:]
    expected = mean_distance(SLOW[term], before(one.x), one.logits, one.y, class_dim)
    assert float(losses.consistency) == pytest.approx(expected)
    assert float(losses.replay) == pytest.approx(mean_surprise(before(two.x), two.y, class_dim))
    total = losses.current + 0.7 * losses.replay + 0.4 * losses.consistency
    torch.testing.assert_close(losses.total, total)


@pytest.mark.parametrize("term", [name for name in hf.REGULARIZERS if name not in SLOW])
def test_other_regularizers_get_rows_of_positions(term):
    learner = make(hf.ConsistencyReplay, reader(), regularizer=term)
    drawn = watch(learner)
    for x, y in texts(3):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    one = drawn[-2]
    now, then = (torch.stack([z for z, _ in places(each, one.y, -1)]) for each in (before(one.x), one.logits))
    torch.testing.assert_close(losses.consistency, hf.REGULARIZERS[term](now, then).detach())


def test_der_compares_positions():
    learner = make(DarkReplay, reader(), beta=0.3)
    drawn = watch(learner)
    for x, y in texts(3):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    one = drawn[-1]
    assert float(losses.consistency) == pytest.approx(mean_distance(SLOW["mse"], before(one.x), one.logits, one.y, -1))


# --- which positions count -------------------------------------------------------------------------------------------


def test_a_mask_decides_what_counts():
    """Even tokens count; where they are not supervised, the regularizer compares them, and the loss does not."""
    learner = make(hf.ConsistencyReplay, reader(), regularizer="l1", mask=lambda x, y: x % 2 == 0)
    drawn = watch(learner)
    for x, y in texts(4):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    assert float(losses.current) == pytest.approx(mean_surprise(before(x), y.masked_fill(x % 2 == 1, IGNORED)))
    one, two = drawn[-2:]
    assert float(losses.replay) == pytest.approx(
        mean_surprise(before(two.x), two.y.masked_fill(two.x % 2 == 1, IGNORED))
    )
    compared = torch.where(one.x % 2 == 0, 0, IGNORED)
    assert float(losses.consistency) == pytest.approx(
        mean_distance(SLOW["l1"], before(one.x), one.logits, compared, -1)
    )
    assert bool((learner.buffer.contents().y == IGNORED).any())  # labels are stored as they came


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (lambda x, y: y.float(), r"a bool for each of the labels \(4, 5\), not \(4, 5\) torch.float32"),
        (lambda x, y: y[0] > 0, r"not \(5,\) torch.bool"),
        (lambda x, y: None, "not NoneType"),
        (lambda x, y: y < -200, "no position is supervised"),
    ],
)
def test_a_mask_that_makes_no_sense(mask, says):
    learner = make(hf.ExperienceReplay, reader(), mask=mask)
    with pytest.raises(UsageError, match=says):
        learner.observe(*next(texts(1)))


def test_views_may_change_pixels_and_labels_alike():
    def flip(x, y):
        return x.flip(-1), y.flip(-1)

    learner = make(hf.ExperienceReplay, segmenter(), class_dim=1, augment=flip)
    x, y = next(pictures(1))
    before = deepcopy(learner.model)
    losses = learner.observe(x, y)
    assert float(losses.total) == pytest.approx(mean_surprise(before(x.flip(-1)), y.flip(-1), 1))
    assert torch.equal(learner.buffer.contents().y, y)


@pytest.mark.parametrize("kind", [Sgd, hf.ExperienceReplay, AveragedGem])
def test_views_cannot_mix_labels_of_positions(kind):
    def smooth(x, y):
        return x, 0.9 * F.one_hot(y.clamp(min=0), WORDS).double() + 0.1 / WORDS

    learner = make(kind, reader(), augment=smooth)
    before = deepcopy(learner.model)
    with pytest.raises(UsageError, match=r"labels of shape \(4, 5\), as it got them, not .*float64 .* \(4, 5, 7\)"):
        learner.observe(*next(texts(1)))
    assert_same_state(learner.model, before, rtol=0, atol=0)


# --- errors, before anything moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: torch.full_like(y, IGNORED), "no position is supervised: all labels are -100"),
        (lambda y: y.index_fill(1, torch.tensor([2]), WORDS), rf"labels up to {WORDS} do not fit .* 0\.\.{WORDS - 1}"),
        (lambda y: y.index_fill(1, torch.tensor([2]), -1), "label -1 names no output"),
        (lambda y: y[:, :3], r"outputs of shape \(4, 5, 7\) with class_dim=-1 do not fit labels of shape \(4, 3\)"),
        (lambda y: y[:, 0], r"do not fit labels of shape \(4,\)"),
        (lambda y: y.double(), "whole numbers"),
        (lambda y: y[:2], "4 inputs need as many labels"),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_labels_that_make_no_sense_change_nothing(change, says, steps):
    learner = make(hf.ConsistencyReplay, reader(), regularizer="kl")
    for x, y in texts(steps):
        learner.observe(x, y)
    before, drawn, (x, y) = deepcopy(learner.model), learner.buffer.generator.get_state(), next(texts(1))
    y[:, 0] = 1
    if steps and says.startswith(("outputs", r"do not fit labels of")):
        says = "do not fit the buffer"
    with pytest.raises(UsageError, match=says):
        learner.observe(x, change(y))
    assert_same_state(learner.model, before, rtol=0, atol=0)
    assert torch.equal(learner.buffer.generator.get_state(), drawn)
    assert learner.buffer.offered == 4 * steps


@pytest.mark.parametrize("steps", [0, 3])
def test_a_token_that_the_model_does_not_know_changes_nothing(steps):
    learner = make(hf.ConsistencyReplay, reader(), regularizer="kl")
    for x, y in texts(steps):
        learner.observe(x, y)
    before, drawn, (x, y) = deepcopy(learner.model), learner.buffer.generator.get_state(), next(texts(1))
    x[1, 2] = WORDS
    with pytest.raises(UsageError, match=r"no row in one of the model's embeddings: .* another tokenizer's"):
        learner.observe(x, y)
    assert_same_state(learner.model, before, rtol=0, atol=0)
    assert torch.equal(learner.buffer.generator.get_state(), drawn)
    assert learner.buffer.offered == 4 * steps


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (
            hf.ConsistencyReplay,
            {"class_dim": 0},
            "class_dim is the dimension of the outputs that has the classes, not 0",
        ),
        (hf.ConsistencyReplay, {"class_dim": "last"}, "not 'last'"),
        (hf.ConsistencyReplay, {"head": "classifier"}, "cannot grow: leave out head= or class_dim="),
        (hf.ConsistencyReplay, {"class_dim": None, "mask": lambda x, y: y > 0}, "give class_dim as well"),
        (hf.LEARNERS["clser"], {}, r"ClsEr needs outputs \(samples, classes\): leave out class_dim"),
        (hf.LEARNERS["ewc"], {}, "OnlineEwc needs outputs"),
    ],
)
def test_options_that_do_not_go_together(kind, options, says):
    with pytest.raises(UsageError, match=says):
        make(kind, reader(), **options)


@pytest.mark.parametrize("term", hf.REGULARIZERS)
def test_a_regularizer_of_logits_is_told_where_the_classes_are(term):
    """Without class_dim, norms compare whole outputs, and all others are refused by name in the first step."""

    def loss(outputs, y):
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten())

    learner = make(hf.ConsistencyReplay, reader(), class_dim=None, loss=loss, regularizer=term)
    before = deepcopy(learner.model)
    if term in NORMS:
        for x, y in texts(3):
            losses = learner.observe(x, y)
        assert losses.consistency > 0
        return
    with pytest.raises(UsageError, match=rf"{term} compares logits .* shape \(4, 5, 7\): .* class_dim=-1"):
        learner.observe(*next(texts(1)))
    assert_same_state(learner.model, before, rtol=0, atol=0)


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was():
    learner = make(hf.ConsistencyReplay, reader(), regularizer="kl", loss=lambda z, y: F.cross_entropy(z, y) * scale)
    scale = 1.0
    for x, y in texts(3):
        learner.observe(x, y)
    before, state = deepcopy(learner.model), learner.buffer.generator.get_state()
    scale = float("inf")
    with pytest.raises(TrainingError, match="the loss is inf"):
        learner.observe(x, y)
    assert_same_state(learner.model, before, rtol=0, atol=0)
    assert torch.equal(learner.buffer.generator.get_state(), state)
    assert learner.buffer.offered == 12


# --- a step in parts -------------------------------------------------------------------------------------------------


def full(seed=0, **options):
    """A learner whose buffer is full and drawn whole in each step, and a stream without unsupervised positions."""
    learner = make(hf.ConsistencyReplay, reader(seed), buffer_size=4, regularizer="kl", **options)
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(WORDS, (16, 5), generator=draw) for _ in range(2))
    learner.observe(x[:4], y[:4])
    return learner, x, y


@pytest.mark.parametrize("options", [{"replay_size": 4, "consistency_size": 4}, {"replay": 1.0}])
def test_accumulation_over_four_parts_equals_one_minibatch(options):
    (parts, x, y), (whole, _, _) = full(**options), full(**options)
    expected = whole.losses(x, y)
    whole.optimizer.zero_grad()
    expected.total.backward()
    parts.optimizer.zero_grad()
    pending = [parts.losses(*part) for part in zip(x.split(4), y.split(4), strict=True)]
    for losses in pending:
        (losses.total / 4).backward()
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    before = parts.buffer.offered
    parts.optimizer.step()
    for losses in pending:
        parts.commit(losses)
    assert parts.buffer.offered == before + 16


def test_a_scaled_loss_makes_the_same_step():
    """As with torch.amp.GradScaler: the loss is scaled, the gradients are unscaled before the step."""
    (scaled, x, y), (plain, _, _) = full(), full()
    plain.observe(x, y)
    losses = scaled.losses(x, y)
    scaled.optimizer.zero_grad()
    (1024 * losses.total).backward()
    for each in scaled.model.parameters():
        each.grad /= 1024
    scaled.optimizer.step()
    scaled.commit(losses)
    assert_same_state(scaled.model, plain.model, rtol=1e-12, atol=1e-14)


# --- how many are drawn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.25, 1), (0.01, 1), (0.5, 2), (1.5, 6), (2, 8)])
def test_one_draw_serves_both_terms(share, count):
    learner = make(hf.ConsistencyReplay, reader(), regularizer="l2", replay=share)
    drawn = watch(learner)
    for x, y in texts(4):
        drawn.clear()
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    (one,) = drawn
    assert len(one.x) == count
    assert float(losses.replay) == pytest.approx(mean_surprise(before(one.x), one.y))
    assert float(losses.consistency) == pytest.approx(mean_distance(SLOW["l2"], before(one.x), one.logits, one.y, -1))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (hf.ExperienceReplay, {"replay": 0}, "replay is a share of the minibatch"),
        (hf.ExperienceReplay, {"replay": float("nan")}, "not nan"),
        (hf.ExperienceReplay, {"replay": 0.5, "replay_size": 3}, "leave out one of them"),
        (hf.ConsistencyReplay, {"replay": 0.5, "consistency_size": 3}, "leave out consistency_size"),
        (hf.LEARNERS["gem"], {"replay": 0.5, "class_dim": None}, "draws no samples: leave out replay_size and replay"),
    ],
)
def test_shares_that_make_no_sense(kind, options, says):
    with pytest.raises(UsageError, match=says):
        make(kind, reader(), **options)


# --- language --------------------------------------------------------------------------------------------------------


def test_next_tokens():
    labels = torch.tensor([[5, 6, 7], [1, IGNORED, 3]])
    assert hf.next_tokens(labels).tolist() == [[6, 7, IGNORED], [IGNORED, 3, IGNORED]]
    assert hf.next_tokens(labels[:, :1]).tolist() == [[IGNORED], [IGNORED]]


def language(step, size=16, length=8):
    """Texts in which each token is the one before it plus `step`."""
    start = torch.randint(WORDS, (size, 1), generator=torch.Generator().manual_seed(size * step))
    return (start + step * torch.arange(length)) % WORDS


def perplexity(model, tokens):
    with torch.no_grad():
        return exp(F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def learn_two_languages(kind, **options):
    """Perplexity on the first language after the second was learned; the first token tells which one it is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Reader(words=WORDS + 2, width=24)
    options |= {"class_dim": -1} | ({"buffer_size": 32} if kind.needs_buffer else {})
    learner = kind(model, torch.optim.Adam(model.parameters(), lr=0.01), **options)
    tests = {}
    for sign, step in ((WORDS, 1), (WORDS + 1, 3)):
        tokens = torch.cat([torch.full((16, 1), sign), language(step)], 1)
        for _ in range(120):
            learner.observe(tokens, hf.next_tokens(tokens))
        tests[step] = tokens
    assert perplexity(model, tests[3]) < 2
    return perplexity(model, tests[1])


def test_two_languages_one_after_the_other():
    assert learn_two_languages(Sgd) > 6
    assert learn_two_languages(hf.ExperienceReplay, replay=0.5) < 2.5
    assert learn_two_languages(hf.ConsistencyReplay, regularizer="kl", replay=0.5, answers=hf.TopK(3)) < 2.5
