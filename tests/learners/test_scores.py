"""What a step needs of outputs, in one pass: against operations one by one in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.learners import DarkReplay
from holdfast.learners.positions import IGNORED, Positions
from holdfast.learners.scores import Past, Reading, largest
from learners.conftest import assert_same_state
from learners.test_answers import ragged
from learners.test_positions import WORDS, make, reader, texts


def read(outputs, labels, observed, weights, places):
    """The reading of outputs (rows, classes), of which the last rows are asked for these places and their rest."""
    past = Past([outputs.shape[1]], places, torch.arange(len(places)), torch.empty(0), with_rest=True)
    return Reading(Positions(-1), outputs, labels, observed, weights, past)


def slowly(outputs, labels, observed, weights, places):
    """The same as `read`: cross-entropy of each part, the logits of the places, and the sum of all others."""
    parts = (slice(observed), slice(observed, None))
    sums = [F.cross_entropy(outputs[part], labels[part], weights, reduction="sum") for part in parts]
    last = outputs[len(outputs) - len(places) :]
    others = torch.ones_like(last, dtype=torch.bool).scatter(1, places, False)
    rest = torch.stack([row[kept].logsumexp(0) for row, kept in zip(last, others, strict=True)])
    return torch.stack(sums), last.gather(1, places), rest


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    classes=st.integers(2, 9),
    scale=st.sampled_from([0.1, 3.0, 12.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_and_their_gradient(dtype, rows, classes, scale, weighted, seed, data):
    draw = torch.Generator().manual_seed(seed)
    k, asked = data.draw(st.integers(1, classes - 1)), data.draw(st.integers(1, rows))
    observed = data.draw(st.integers(0, rows))
    exact = (scale * torch.randn(rows, classes, generator=draw)).double().requires_grad_()
    outputs = exact.detach().to(dtype).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=draw)
    labels[torch.rand(rows, generator=draw) < 0.3] = IGNORED
    weights = torch.rand(classes, generator=draw, dtype=torch.float64) + 0.5 if weighted else None
    places = torch.stack([torch.randperm(classes, generator=draw)[:k] for _ in range(asked)])
    reading = read(outputs, labels, observed, weights, places)
    found = reading.sums, reading.chosen, reading.rest
    expected = slowly(exact, labels, observed, weights, places)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    gradients = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)
    torch.testing.assert_close(reading.logs.double(), exact.detach().log_softmax(1)[:observed], **tolerance)
    torch.autograd.backward(found, [each.to(dtype) for each in gradients])
    torch.autograd.backward(expected, gradients)
    torch.testing.assert_close(outputs.grad.double(), exact.grad, **tolerance)


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0, 1000.0, 1e4])
def test_a_rest_that_is_all_but_impossible_has_a_finite_gradient(gap):
    """The gradient at the places does not suffer from how small the rest is."""
    outputs = torch.tensor([[gap, 0.0, -1.0, 0.5]], requires_grad=True)
    found = read(outputs, torch.tensor([IGNORED]), 0, None, torch.tensor([[0]]))
    then = torch.tensor([[0.0, 2.0]])
    hf.REGULARIZERS["kl"](torch.cat([found.chosen, found.rest[:, None]], 1), then).backward()
    exact = outputs.detach().double().requires_grad_()
    _, chosen, rest = slowly(exact, torch.tensor([IGNORED]), 0, None, torch.tensor([[0]]))
    hf.REGULARIZERS["kl"](torch.cat([chosen, rest[:, None]], 1), then.double()).backward()
    assert outputs.grad.isfinite().all()
    torch.testing.assert_close(outputs.grad[0, 0].double(), exact.grad[0, 0], rtol=1e-4, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    columns=st.integers(1, 400),
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    values=st.sampled_from([3, 50, 10**6]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_largest_are_those_of_topk(columns, shape, values, seed, data):
    """Also with many equal ones, of which any may be chosen, but each once; and with infinite ones."""
    k = data.draw(st.integers(1, min(columns, 24)))
    outputs = torch.randint(values, (*shape, columns), generator=torch.Generator().manual_seed(seed)).float()
    outputs[outputs == 0] = -torch.inf
    found, places = largest(outputs, k)
    assert torch.equal(found, outputs.topk(k).values)
    assert torch.equal(outputs.gather(-1, places), found)
    assert all(len(set(row)) == k for row in places.flatten(0, -2).tolist())


# --- samples that will not be stored are not made ready --------------------------------------------------------------


def one_by_one(learner, x, y):
    """A step that makes all samples ready, as with accumulation."""
    losses = learner.losses(x, y)
    learner.descend(losses)
    learner.commit(losses)
    return losses.detach()


@pytest.mark.parametrize(
    ("kind", "storage", "policy"),
    [
        (hf.ConsistencyReplay, "device", "reservoir"),
        (hf.ConsistencyReplay, "host", "reservoir"),
        (hf.ConsistencyReplay, "folder", "reservoir"),
        (hf.ConsistencyReplay, "device", "window"),
        (hf.ConsistencyReplay, "device", "decay"),
        (DarkReplay, "device", "reservoir"),
        (hf.ExperienceReplay, "device", "reservoir"),
        (hf.ExperienceReplay, "folder", "reservoir"),  # where no answers lie beside the samples
    ],
)
@pytest.mark.parametrize("padding", [None, {"x": 0, "y": IGNORED}])
def test_the_same_samples_are_stored_as_if_all_were_made_ready(kind, padding, storage, policy, tmp_path):
    options = {"answers": hf.TopK(2)} if kind is not hf.ExperienceReplay else {}
    options |= {"regularizer": "kl"} if kind is hf.ConsistencyReplay else {}

    def learner(name):
        where = tmp_path / name if storage == "folder" else storage
        shared = {"buffer_size": 5, "replay": 0.5, "storage": where, "padding": padding, "buffer_policy": policy}
        return make(kind, reader(), **shared, **options)

    planned, ready = learner("planned"), learner("ready")
    for number, (x, y) in enumerate(ragged([5, 3, 8, 2, 6, 4] * 4) if padding else texts(24)):
        assert planned.observe(x, y) == one_by_one(ready, x, y)
        if number == 12:
            for each in (planned, ready):
                each.forget(torch.tensor([True, False, False, True, False])[: each.buffer.stored])
    assert_same_state(planned.model, ready.model, rtol=0, atol=0)
    one, other = planned.buffer.contents(), ready.buffer.contents()
    torch.testing.assert_close(tuple(one), tuple(other), rtol=0, atol=0)
    states = [each.buffer.state_dict() for each in (planned, ready)]
    assert torch.equal(states[0]["generator"], states[1]["generator"])
    assert int(states[0]["seen"]) == int(states[1]["seen"]) == states[0]["offered"]


def test_only_what_will_be_stored_is_encoded():
    learner, encoded = make(hf.ConsistencyReplay, reader(), replay=0.5, answers=hf.TopK(2), buffer_size=4), []
    store = learner.answers_for
    learner.answers_for = lambda outputs, logs=None: encoded.append(len(outputs)) or store(outputs, logs)
    for x, y in texts(60, size=4):
        learner.observe(x, y)
    assert encoded[0] == 4
    assert sum(encoded[-20:]) < 20
    encoded.clear()
    learner.losses(x, y)
    assert encoded == [4]


def test_a_promise_that_is_broken_is_refused():
    learner = make(hf.ConsistencyReplay, reader(), replay=0.5, answers=hf.TopK(2))
    batches = list(texts(3))
    learner.observe(*batches[0])
    first, _ = learner.losses(*batches[1], alone=True), learner.losses(*batches[2], alone=True)
    offered = learner.buffer.offered
    with pytest.raises(UsageError, match="the buffer was used between the losses of a minibatch and their commit"):
        learner.commit(first)
    assert learner.buffer.offered == offered


def test_a_step_that_is_refused_or_dropped_takes_no_numbers():
    learner = make(hf.ConsistencyReplay, reader(), answers=hf.TopK(2), replay=0.5)
    x, y = next(texts(1))
    before = learner.buffer.generator.get_state()
    learner.losses(x, y, alone=True)  # nothing is stored, so nothing is drawn
    with pytest.raises(UsageError, match="labels up to"):
        learner.losses(x, torch.full_like(y, WORDS), alone=True)
    assert torch.equal(learner.buffer.generator.get_state(), before)


@pytest.mark.parametrize("answers", [hf.TopK(2), hf.TopK(WORDS)])
@pytest.mark.parametrize("term", ["kl", "dino", "mse"])
def test_one_pass_gives_the_terms_of_separate_ones(term, answers):
    """A loss that is cross-entropy under another name takes the other way."""
    given = {"replay": 0.5, "regularizer": term, "answers": answers}
    once, apart = (
        make(hf.ConsistencyReplay, reader(), **given),
        make(hf.ConsistencyReplay, reader(), loss=F.cross_entropy, **given),
    )
    for x, y in texts(6):
        torch.testing.assert_close(once.observe(x, y).as_dict(), apart.observe(x, y).as_dict())
    assert_same_state(once.model, apart.model, rtol=1e-9, atol=1e-11)
