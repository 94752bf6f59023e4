"""Consistency replay against Algorithm 1 written out slowly: separate passes, explicit terms, plain SGD."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import ConsistencyReplay
from learners.conftest import (
    CLASSES,
    accuracies,
    assert_same_state,
    blobs,
    cross_entropies,
    descend,
    network,
    plain_copy,
    record,
    stream,
)


def probabilities(rows):
    return torch.exp(rows) / torch.exp(rows).sum(1, keepdim=True)


def unit(rows):
    return rows / rows.square().sum(1, keepdim=True).sqrt()


# The consistency terms as the protocol states them; c are the current logits, s the stored ones.
TERMS = {
    "l1": lambda c, s: sum((c[i] - s[i]).abs().sum() for i in range(len(c))) / len(c),
    "l2": lambda c, s: sum((c[i] - s[i]).square().sum().sqrt() for i in range(len(c))) / len(c),
    "linf": lambda c, s: sum((c[i] - s[i]).abs().max() for i in range(len(c))) / len(c),
    "mse": lambda c, s: (c - s).square().sum() / (c.shape[0] * c.shape[1]),
    "kl": lambda c, s: (
        (probabilities(s) * (probabilities(s).log() - probabilities(c).log())).sum() / (c.shape[0] * c.shape[1])
    ),
    "byol": lambda c, s: (2 - 2 * (unit(c) * unit(s)).sum(1)).sum() / len(c),
    "dino": lambda c, s: -(probabilities(unit(s) / 0.06) * probabilities(unit(c) / 0.1).log()).sum() / len(c),
}


def consistency(model, lr=0.1, **options) -> ConsistencyReplay:
    return ConsistencyReplay(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


class Algorithm1:
    """One step at a time on a network of its own, given the samples that were drawn."""

    def __init__(self, model, regularizer, alpha, beta, augment=lambda x: x):
        self.model, self.term, self.alpha, self.beta = model, TERMS[regularizer], alpha, beta
        self.augment = augment

    def loss(self, x, y, draws):
        """(total, current, replay, consistency) and the logits of the current minibatch."""
        logits = self.model(self.augment(x))  # first pass
        current = cross_entropies(logits, y).mean()
        if not draws:
            return (current, current, torch.zeros_like(current), torch.zeros_like(current)), logits
        first, second = draws
        kept = self.term(self.model(self.augment(first.x)), first.logits)  # second pass
        replay = cross_entropies(self.model(self.augment(second.x)), second.y).mean()  # third pass
        return (current + self.alpha * replay + self.beta * kept, current, replay, kept), logits


def check_against_algorithm1(
    kind, regularizer="mse", alpha=0.7, beta=0.3, sizes=(6, 7), capacity=20, dtype=torch.float64, steps=10, batch=8
):
    model = network(kind, dtype)
    slow = Algorithm1(plain_copy(kind, model), regularizer, alpha, beta)
    learner = consistency(
        model,
        buffer_size=capacity,
        regularizer=regularizer,
        alpha=alpha,
        beta=beta,
        consistency_size=sizes[0],
        replay_size=sizes[1],
    )
    buffer = record(learner)
    tight = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    for step, (x, y) in enumerate(stream(steps, batch, dtype)):
        buffer.draws.clear()
        losses = learner.observe(x, y)
        assert [len(drawn.y) for drawn in buffer.draws] == (
            [min(size or batch, batch * step, capacity) for size in sizes] if step else []
        )
        expected, logits = slow.loss(x, y, buffer.draws)
        for term, value in zip(("total", "current", "replay", "consistency"), expected, strict=True):
            torch.testing.assert_close(getattr(losses, term).to(dtype), value.detach(), **tight)
        # The logits that are kept are those from before the update.
        torch.testing.assert_close(buffer.offers[-1][2], logits.detach(), **tight)
        descend(slow.model, expected[0], 0.1)
    # Parameters, and BatchNorm's running statistics after three passes a step in the right order.
    assert_same_state(model, slow.model, **tight)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("regularizer", TERMS)
def test_ten_steps(kind, regularizer):
    check_against_algorithm1(kind, regularizer)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 0.0), (0.0, 2.0)])
def test_weights(kind, alpha, beta):
    check_against_algorithm1(kind, alpha=alpha, beta=beta)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("sizes", [(8, 8), (None, None), (3, 16)])
def test_sizes_of_the_draws(kind, sizes):
    check_against_algorithm1(kind, sizes=sizes)


@pytest.mark.parametrize("sizes", [(8, 8), (3, 16), (8, 3)])
@pytest.mark.parametrize("regularizer", ["mse", "linf"])
def test_fused_groups_in_single_precision(sizes, regularizer):
    check_against_algorithm1("grouped", regularizer, sizes=sizes, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
def test_buffer_smaller_than_the_minibatch(kind):
    check_against_algorithm1(kind, capacity=3, sizes=(8, 8))


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
def test_batchnorm_together_is_one_pass_with_common_statistics(kind):
    model = network(kind)
    twin = plain_copy(kind, model)
    learner = consistency(model, buffer_size=20, batchnorm="together", consistency_size=6, replay_size=7)
    buffer = record(learner)
    for step, (x, y) in enumerate(stream(6)):
        buffer.draws.clear()
        learner.observe(x, y)
        first, second = buffer.draws if step else (None, None)
        outputs = twin(torch.cat([x, first.x, second.x]) if step else x)
        loss = cross_entropies(outputs[:8], y).mean()
        if step:
            loss = loss + cross_entropies(outputs[14:], second.y).mean()
            loss = loss + ((outputs[8:14] - first.logits) ** 2).mean()
        descend(twin, loss, 0.1)
    assert_same_state(model, twin, rtol=1e-9, atol=1e-11)


def test_batchnorm_is_apart_or_together():
    with pytest.raises(UsageError, match=r"unknown batchnorm 'apar'.*apart"):
        consistency(network("mlp"), buffer_size=4, batchnorm="apar")


def test_minibatch_of_one():
    check_against_algorithm1("mlp", batch=1)


def test_buffer_is_offered_inputs_as_they_came_with_logits_of_their_view():
    model = network("mlp", torch.float32)
    noise = torch.Generator().manual_seed(0)
    views = []

    def augment(x):  # random, and its input is not what the network gets
        views.append(x.float() / 255 + torch.rand(x.shape, generator=noise))
        return views[-1]

    learner = consistency(model, buffer_size=10, augment=augment)
    buffer = record(learner)
    draw = torch.Generator().manual_seed(1)
    for _ in range(6):
        x = torch.randint(0, 256, (8, 1, 6, 6), generator=draw, dtype=torch.uint8)
        y = torch.randint(0, CLASSES, (8,), generator=draw)
        before = plain_copy("mlp", model)
        views.clear()
        learner.observe(x, y)
        offered_x, offered_y, logits = buffer.offers[-1]
        assert offered_x.dtype == torch.uint8
        assert torch.equal(offered_x, x)
        assert torch.equal(offered_y, y)
        torch.testing.assert_close(logits, before(views[-1][:8]).detach())
        assert not torch.allclose(logits, model(views[-1][:8]).detach())  # the update made a difference
        assert not logits.requires_grad
    kept = buffer.contents()
    seen = {
        x.numpy().tobytes(): (int(y), row)
        for xs, ys, rows in buffer.offers
        for x, y, row in zip(xs, ys, rows, strict=True)
    }
    for x, y, row in zip(*kept, strict=True):
        label, logits = seen[x.numpy().tobytes()]
        assert label == y
        assert torch.equal(logits, row)


def test_every_draw_is_augmented_anew():
    model = network("mlp")
    shown = []
    learner = consistency(model, buffer_size=10, augment=lambda x: shown.append(x.clone()) or x)
    buffer = record(learner)
    for x, y in stream(5):
        shown.clear()
        buffer.draws.clear()
        learner.observe(x, y)
        assert torch.equal(shown[-1], torch.cat([x, *(drawn.x for drawn in buffer.draws)]))


def test_the_two_draws_are_independent():
    model = nn.Linear(1, 2)
    learner = consistency(model, lr=0.0, buffer_size=40, consistency_size=10, replay_size=10)
    buffer = record(learner)
    steps = 800
    for step in range(steps + 10):  # The input is the sample's number, so that samples can be told apart.
        learner.observe(torch.arange(4.0)[:, None] + 4 * step, torch.tensor([0, 1, 0, 1]))
    drawn = [set(draw.x.flatten().tolist()) for draw in buffer.draws[-2 * steps :]]
    assert all(len(numbers) == 10 for numbers in drawn)
    overlaps = [len(first & second) for first, second in zip(drawn[::2], drawn[1::2], strict=True)]
    # Hypergeometric: 10 * 10 / 40 in common expected, standard deviation 1.20 a step.
    assert abs(sum(overlaps) / steps - 2.5) < 5 * 1.2 / sqrt(steps)
    assert len(set(overlaps)) > 4


def test_inputs_need_not_be_images():
    """Token numbers into an embedding: long inputs, no augmentation."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    draw = torch.Generator().manual_seed(0)
    learner = consistency(Bag(), buffer_size=10, regularizer="linf")
    for _ in range(5):
        tokens = torch.randint(0, 20, (6, 4), generator=draw)
        losses = learner.observe(tokens, tokens[:, 0] % 3)
        assert torch.isfinite(losses.total)
    assert learner.buffer.contents().x.dtype == torch.int64
    assert losses.consistency > 0


def test_any_callable_is_a_regularizer_and_gets_current_first():
    calls = []

    def huber(current, stored, *, delta=1.0):
        calls.append((current.requires_grad, stored.requires_grad, delta))
        return F.huber_loss(current, stored, delta=delta)

    model = network("mlp")
    learner = consistency(model, buffer_size=10, regularizer=huber, options={"delta": 0.25})
    buffer = record(learner)
    for x, y in stream(3):
        before = plain_copy("mlp", model)
        losses = learner.observe(x, y)
    assert calls == [(True, False, 0.25)] * 2
    first, _ = buffer.draws[-2:]
    expected = F.huber_loss(before(first.x), first.logits, delta=0.25)
    torch.testing.assert_close(losses.consistency, expected.detach())


def test_options_reach_a_named_regularizer():
    def consistency_loss(**options):
        learner = consistency(network("mlp"), buffer_size=10, regularizer="simclr", **options)
        return [learner.observe(x, y) for x, y in stream(2)][-1].consistency

    assert consistency_loss() == consistency_loss(options={"temperature": 0.5})
    assert consistency_loss() != consistency_loss(options={"temperature": 0.1})


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_any_optimizer(make):
    model = network("mlp")
    copy = plain_copy("mlp", model)
    slow = Algorithm1(copy, "l2", 0.5, 0.2)
    optimizer, reference = make(model.parameters(), lr=0.01), make(copy.parameters(), lr=0.01)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=20, regularizer="l2", alpha=0.5, beta=0.2)
    buffer = record(learner)
    for x, y in stream(10):
        buffer.draws.clear()
        learner.observe(x, y)
        (loss, *_), _ = slow.loss(x, y, buffer.draws)
        reference.zero_grad()
        loss.backward()
        reference.step()
    assert_same_state(model, copy, rtol=1e-8, atol=1e-10)


def test_gradients_left_behind_by_others_do_no_harm():
    def train(spoil):
        model = network("mlp")
        learner = consistency(model, buffer_size=10)
        for x, y in stream(4):
            if spoil:
                (1000 * model(x).sum()).backward()
            learner.observe(x, y)
        return model

    assert_same_state(train(False), train(True), rtol=0, atol=0)


def test_seeds_decide_the_draws_and_nothing_global_does():
    def train(seed, global_seed):
        torch.manual_seed(global_seed)
        model = network("mlp")
        learner = consistency(model, buffer_size=10, seed=seed)
        for x, y in stream(6):
            learner.observe(x, y)
        return model.classifier.weight.detach().clone()

    with torch.random.fork_rng():
        assert torch.equal(train(0, 0), train(0, 1))
        assert not torch.equal(train(0, 0), train(1, 0))


@pytest.mark.parametrize("regularizer", ["mse", "linf", "l1"])
def test_consistency_keeps_the_first_blob(linear, regularizer):
    training, x, y = blobs()
    learner = consistency(linear, lr=0.3, buffer_size=20, regularizer=regularizer, alpha=0.5, beta=0.2)
    for batch in training:
        learner.observe(*batch)
    assert min(accuracies(linear, x, y)) > 90


def test_consistency_alone_holds_the_answers(linear):
    """With alpha 0 no stored label is used; the stored logits alone keep the first blob."""
    training, x, y = blobs()
    learner = consistency(linear, lr=0.05, buffer_size=40, regularizer="mse", alpha=0.0, beta=1.0)
    for batch in training:
        learner.observe(*batch)
    assert min(accuracies(linear, x, y)) > 90


# --- errors ----------------------------------------------------------------------------------------------------------

INPUTS = torch.zeros(4, 1, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("labels", [[0, 1, 2, CLASSES], [-1, 0, 1, 2]])
def test_label_out_of_range(labels, steps_before):
    model = network("mlp")
    learner = consistency(model, buffer_size=50)
    for x, y in stream(steps_before):
        learner.observe(x, y)
    before, offered = plain_copy("mlp", model), learner.buffer.offered
    with pytest.raises(UsageError, match=r"labels up to 5 .*outputs are 0\.\.4.*head=|label -1 names no output"):
        learner.observe(INPUTS, torch.tensor(labels))
    assert_same_state(model, before, rtol=0, atol=0)
    assert learner.buffer.offered == offered


@pytest.mark.parametrize("outputs", [CLASSES + 2, CLASSES - 1])
def test_another_head_after_logits_were_stored(outputs):
    model = network("mlp")
    learner = consistency(model, buffer_size=50)
    for x, y in stream(2):
        learner.observe(x, y)
    model.classifier = nn.Linear(12, outputs).double()
    with pytest.raises(UsageError, match=f"now has {outputs} outputs, but the buffer holds logits of {CLASSES}"):
        learner.observe(INPUTS, torch.tensor([0, 1, 2, 3]))


def test_malformed_minibatches():
    learner = consistency(network("mlp"), buffer_size=5)
    with pytest.raises(UsageError, match="4 inputs need as many labels"):
        learner.observe(INPUTS, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match="one dimension"):
        learner.observe(INPUTS, torch.zeros(4, CLASSES))
    with pytest.raises(UsageError, match="at least one sample"):
        learner.observe(INPUTS[:0], torch.zeros(0, dtype=torch.int64))


def test_unknown_regularizer_names_the_nearest():
    with pytest.raises(UsageError, match="unknown regularizer 'lnif': did you mean 'linf'"):
        consistency(network("mlp"), buffer_size=5, regularizer="lnif")


def test_a_regularizer_of_ones_own_takes_two_arguments():
    with pytest.raises(UsageError, match="must take two arguments: the outputs now, and those stored"):
        consistency(nn.Linear(2, 3), buffer_size=9, regularizer=lambda now: now.square().mean())


@pytest.mark.parametrize("use", [lambda now, then: then, lambda now, then: now.detach() - then])
def test_a_regularizer_without_a_gradient_is_refused(use):
    model = nn.Linear(2, 3)
    learner = consistency(model, buffer_size=9, regularizer=lambda now, then: use(now, then).square().mean())
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    learner.observe(x, y)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="has no gradient, so that it would do nothing"):
        learner.observe(x, y)
    assert torch.equal(model.weight, before)
    assert learner.buffer.offered == 4


@pytest.mark.parametrize("term", sorted(set(hf.REGULARIZERS) - {"l1", "l2", "linf", "mse"}))
def test_regularizers_that_do_nothing_for_one_output(term):
    """A softmax of it is 1, and normalised it is 1 or -1: there is no gradient."""
    model = nn.Linear(4, 1)
    learner = consistency(model, buffer_size=5, regularizer=term, loss=F.mse_loss)
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match=f"{term} does nothing where the model has one output"):
        learner.observe(torch.ones(3, 4), torch.ones(3, 1))
    assert torch.equal(model.weight, before)
    model = nn.Linear(4, 1)
    growing = consistency(model, buffer_size=5, regularizer=term, head="")
    growing.observe(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("size", [0, -3])
def test_buffer_needs_a_slot(size):
    with pytest.raises(UsageError, match=f"buffer size must be at least 1, not {size}"):
        consistency(network("mlp"), buffer_size=size)
