"""What is stored of outputs: types, the largest logits, functions of one's own; against loops over positions."""

import re
from copy import deepcopy
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.buffer import Draw
from holdfast.errors import UsageError
from holdfast.learners import DarkReplay, FunctionDistance
from holdfast.learners.answers import LIMIT, answers_of
from holdfast.learners.positions import IGNORED, Positions
from holdfast.regularizers import compares, kind_of
from learners.conftest import assert_same_state, network, stream
from learners.test_positions import WORDS, make, pictures, reader, segmenter, sgd, texts, watch

TOKENS = Positions(-1)
FORMS = {
    "outputs as they are": None,
    "outputs in torch.bfloat16": torch.bfloat16,
    "TopK(k=2)": hf.TopK(2),
    "TopK(k=3)": hf.TopK(3),
    "what a function makes of outputs": (torch.Tensor.half, torch.Tensor.double),
}


def draw_of(stored, counted):
    """A draw of what is stored of outputs, of which these positions count: the others have no label."""
    return Draw(None, torch.zeros_like(counted, dtype=torch.int64).masked_fill(~counted, IGNORED), stored)


def outputs_like(shape, classes, seed, scale=3.0):
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, classes, generator=draw, dtype=torch.float64)


def buckets(logits, indices):
    """The probability of each of these classes, and of all others together, in plain numbers."""
    whole = sum(exp(each) for each in logits)
    kept = [exp(logits[index]) / whole for index in indices]
    return [*kept, sum(exp(each) / whole for number, each in enumerate(logits) if number not in indices)]


# --- the largest logits ----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    classes=st.integers(1, 6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_what_is_stored_of_each_position(shape, classes, seed, data):
    k, class_dim = data.draw(st.integers(1, classes)), data.draw(st.sampled_from([-1, *range(1, len(shape) + 1)]))
    outputs = outputs_like(shape, classes, seed)
    stored = answers_of(hf.TopK(k), Positions(class_dim)).store(outputs.movedim(-1, class_dim))
    assert {name: each.dtype for name, each in stored.items()} == {
        "values": torch.float16,
        "indices": torch.int32,
        "rest": torch.float16,
        "classes": torch.int32,
    }
    assert stored["classes"].tolist() == [classes] * shape[0]
    values, indices, rest = (stored[name].flatten(0, len(shape) - 1) for name in ("values", "indices", "rest"))
    for logits, top, places, other in zip(outputs.flatten(0, -2).tolist(), values, indices, rest, strict=True):
        order = sorted(range(classes), key=lambda c: -logits[c])[:k]
        assert places.tolist() == order
        assert top.tolist() == pytest.approx([logits[c] for c in order], rel=1e-3, abs=1e-3)
        left = [exp(logits[c]) for c in range(classes) if c not in order]
        expected = log(sum(left)) if left else -LIMIT
        assert other.item() == pytest.approx(expected, rel=1e-3, abs=2e-3)


@settings(max_examples=30, deadline=None)
@given(classes=st.integers(1, 7), seed=st.integers(0, 1000), data=st.data())
def test_a_softmax_of_what_is_compared_has_the_exact_buckets(classes, seed, data):
    k = data.draw(st.integers(1, classes))
    then, now = outputs_like((2, 3), classes, seed), outputs_like((2, 3), classes, seed + 1)
    counted = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) < 0.7
    answers = answers_of(hf.TopK(k), TOKENS)
    drawn = draw_of(answers.store(then), counted)
    stored = drawn.logits
    current, past = answers.compare(now, drawn, "probabilities")
    columns = min(k + 1, classes)  # no rest where the stored classes are all there are
    assert current.shape == past.shape == (int(counted.sum()), columns)
    rows = zip(now[counted], then[counted], stored["indices"][counted], current, past, strict=True)
    for new, old, indices, one, other in rows:
        assert one.softmax(0).tolist() == pytest.approx(buckets(new.tolist(), indices.tolist())[:columns])
        assert other.softmax(0).tolist() == pytest.approx(buckets(old.tolist(), indices.tolist())[:columns], abs=5e-3)
    logits, _ = answers.compare(now, drawn, "numbers")
    torch.testing.assert_close(logits, current[:, :k])
    kl = hf.REGULARIZERS["kl"](current, past)
    slow = [
        sum(q * log(q / p) for p, q in zip(one.softmax(0).tolist(), other.softmax(0).tolist(), strict=True) if q)
        for one, other in zip(current, past, strict=True)
    ]
    assert kl.item() == pytest.approx(sum(slow) / max(1, len(slow)) / columns, abs=1e-9) or not slow


@pytest.mark.parametrize("k", [1, 3, WORDS])
@pytest.mark.parametrize("term", ["kl", "dino", "mse", "linf", "byol"])
def test_gradients_of_the_buckets_are_exact(k, term):
    """Against finite differences; also where nothing is left for the rest."""
    answers = answers_of(hf.TopK(k), TOKENS)
    drawn = draw_of(answers.store(outputs_like((1, 2), WORDS, 0)), torch.ones(1, 2, dtype=torch.bool))
    kind = kind_of(hf.REGULARIZERS[term])

    def distance(now):
        return hf.REGULARIZERS[term](*answers.compare(now, drawn, kind))

    assert torch.autograd.gradcheck(distance, outputs_like((1, 2), WORDS, 1).requires_grad_())


@pytest.mark.parametrize("term", ["kl", "dino"])
def test_the_largest_of_all_classes_are_all_logits(term):
    """The same distance and gradient as of whole outputs, but for what is lost in half precision."""
    then, counted, found = outputs_like((1, 2), WORDS, 0), torch.ones(1, 2, dtype=torch.bool), []
    for answers in (answers_of(hf.TopK(WORDS), TOKENS), answers_of(None, TOKENS)):
        now = outputs_like((1, 2), WORDS, 1).requires_grad_()
        drawn = draw_of(answers.store(then), counted)
        distance = hf.REGULARIZERS[term](*answers.compare(now, drawn, "probabilities"))
        found.append((distance.detach(), *torch.autograd.grad(distance, now)))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-3)


def test_logits_beyond_half_precision_stay_finite():
    outputs = torch.tensor([[[1e6, -1e6, 3.0, -torch.inf]]])
    stored = answers_of(hf.TopK(3), TOKENS).store(outputs)
    assert stored["values"].tolist() == [[[LIMIT, 3.0, -LIMIT]]]
    assert stored["rest"].isfinite().all()


@pytest.mark.parametrize("gap", [2.0, 5.0, 15.0, 40.0, 1000.0])
def test_a_rest_of_any_size_in_single_precision(gap):
    """The stored rest is that of double precision, or too small to matter; and the term has a finite gradient."""
    outputs = torch.tensor([[[gap, 1.0, 0.5, -2.0, 0.0]]])
    answers = answers_of(hf.TopK(1), TOKENS)
    stored = answers.store(outputs)
    whole = outputs.double().logsumexp(-1)
    exact = (outputs.double()[..., 1:].logsumexp(-1) - whole).exp()
    found = (stored["rest"].double() - whole).exp()
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-7)
    now = torch.zeros(1, 1, 5, requires_grad=True)
    pair = answers.compare(now, draw_of(stored, torch.ones(1, 1, dtype=torch.bool)), "probabilities")
    hf.REGULARIZERS["kl"](*pair).backward()
    assert now.grad.isfinite().all()


def test_top_20_of_512_tokens_take_less_than_64_kilobytes():
    stored = answers_of(hf.TopK(20), TOKENS).store(torch.randn(2, 512, 60))
    assert sum(each[0].nbytes for each in stored.values()) < 64_000


@pytest.mark.parametrize(("model", "stream", "class_dim"), [(reader, texts, -1), (segmenter, pictures, 1)])
@pytest.mark.parametrize("term", ["kl", "dino", "l1", "l2", "linf", "mse", "byol"])
def test_a_learner_with_the_largest_logits(term, model, stream, class_dim):
    """The consistency term is the regularizer of the buckets, or of the logits, of the supervised positions."""
    learner = make(hf.ConsistencyReplay, model(), class_dim=class_dim, regularizer=term, answers=hf.TopK(2))
    drawn = watch(learner)
    for x, y in stream(4):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    one, rows = drawn[-2], []
    now = before(one.x).movedim(class_dim, -1)
    for place in (one.y != IGNORED).nonzero().tolist():
        at = tuple(place)
        logits, indices = now[at], one.logits["indices"][at].tolist()
        new, old = [logits[c] for c in indices], one.logits["values"][at].double().tolist()
        if term in ("kl", "dino"):
            others = [logits[c] for c in range(len(logits)) if c not in indices]
            new, old = [*new, torch.stack(others).logsumexp(0)], [*old, one.logits["rest"][at].item()]
        rows.append((torch.stack(new), torch.tensor(old, dtype=torch.float64)))
    expected = hf.REGULARIZERS[term](*(torch.stack(each) for each in zip(*rows, strict=True)))
    torch.testing.assert_close(losses.consistency, expected.detach())


def test_der_with_the_largest_logits():
    learner = make(DarkReplay, reader(), answers=hf.TopK(3))
    for x, y in texts(4):
        losses = learner.observe(x, y)
    assert losses.consistency > 0


def test_a_buffer_of_the_largest_logits_is_saved_and_loaded(tmp_path):
    learners = [make(hf.ConsistencyReplay, reader(), regularizer="kl", answers=hf.TopK(3)) for _ in range(2)]
    batches = list(texts(6))
    for x, y in batches[:3]:
        learners[0].observe(x, y)
    learners[0].save(tmp_path / "file")
    learners[1].load(tmp_path / "file")
    for x, y in batches[3:]:
        assert learners[0].observe(x, y) == learners[1].observe(x, y)


@pytest.mark.parametrize("term", ["mi", "simclr", "barlow"])
def test_regularizers_that_need_all_classes_are_refused_by_name(term):
    with pytest.raises(
        UsageError, match=f"{term} compares rows or classes with each other, of which TopK stores a part"
    ):
        make(hf.ConsistencyReplay, reader(), regularizer=term, answers=hf.TopK(2))


def test_a_regularizer_of_ones_own_gets_logits_unless_it_says_otherwise():
    widths = []

    def mine(current, stored, *, power=2):
        widths.append(current.shape[1])
        return (current - stored).abs().pow(power).mean()

    for function in (mine, compares("probabilities")(lambda current, stored: mine(current, stored))):
        learner = make(hf.ConsistencyReplay, reader(), regularizer=function, answers=hf.TopK(2))
        for x, y in texts(2):
            learner.observe(x, y)
    assert widths == [2, 3]
    with pytest.raises(UsageError, match="unknown kind of regularizer 'logit': did you mean 'logits'"):
        compares("logit")


# --- types and functions of one's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_answers_in_another_type(dtype):
    learner = make(hf.ConsistencyReplay, reader(), regularizer="kl", answers=dtype)
    drawn = watch(learner)
    for x, y in texts(4):
        before = deepcopy(learner.model)
        losses = learner.observe(x, y)
    one = drawn[-2]
    assert one.logits.dtype == dtype
    supervised = one.y != IGNORED
    expected = hf.REGULARIZERS["kl"](before(one.x)[supervised], one.logits[supervised].float())
    torch.testing.assert_close(losses.consistency, expected.detach())


def test_a_pair_of_functions():
    """Signs and sizes in two tensors, one of them half as wide."""

    def encode(outputs):
        return {"signs": outputs > 0, "sizes": outputs.abs().half()}

    def decode(stored):
        return torch.where(stored["signs"], 1.0, -1.0) * stored["sizes"].double()

    model, twin = network("mlp"), network("mlp")
    learner = hf.ConsistencyReplay(model, sgd(model), buffer_size=20, answers=(encode, decode))
    plain = hf.ConsistencyReplay(twin, sgd(twin), buffer_size=20, answers=torch.float16)
    for x, y in stream(5):
        assert learner.observe(x, y) == plain.observe(x, y)
    assert set(learner.buffer.contents().logits) == {"signs", "sizes"}


def test_fdr_stores_answers_in_another_type_too():
    model = network("mlp")
    learner = FunctionDistance(model, sgd(model), buffer_size=20, answers=torch.bfloat16)
    batches = list(stream(3))
    learner.end_task(*(torch.cat(each) for each in zip(*batches, strict=True)))
    assert learner.buffer.contents().logits.dtype == torch.bfloat16
    assert learner.observe(*batches[0]).consistency > 0


@pytest.mark.parametrize("answers", [torch.int8, "half", (1, 2), (len,), 20])
def test_answers_that_make_no_sense(answers):
    with pytest.raises(UsageError, match="answers must be a floating-point type such as"):
        answers_of(answers, None)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (hf.ExperienceReplay, {"answers": torch.bfloat16}, "ExperienceReplay stores no outputs: leave out answers"),
        (hf.ExperienceReplay, {"answers": hf.TopK(2)}, "stores no outputs"),
        (hf.ConsistencyReplay, {"answers": hf.TopK(2), "class_dim": None}, "give class_dim, which says where"),
        (
            hf.ConsistencyReplay,
            {"answers": torch.bfloat16, "class_dim": None, "head": "classifier"},
            "cannot grow with the head",
        ),
    ],
)
def test_answers_that_do_not_go_with_the_rest(kind, options, says):
    with pytest.raises(UsageError, match=says):
        make(kind, reader(), **options)


def test_top_k_needs_a_number():
    with pytest.raises(UsageError, match="at least 1 logit of each position, not 0"):
        hf.TopK(0)


# --- errors, before anything moves -----------------------------------------------------------------------------------


def refused(learner, says, x, y):
    """The step is refused with this sentence, and the learner is as it was."""
    before, state, offered = deepcopy(learner.model), learner.buffer.generator.get_state(), learner.buffer.offered
    with pytest.raises(UsageError, match=says):
        learner.observe(x, y)
    assert_same_state(learner.model, before, rtol=0, atol=0)
    assert torch.equal(learner.buffer.generator.get_state(), state)
    assert learner.buffer.offered == offered


def test_more_logits_than_classes():
    learner = make(hf.ConsistencyReplay, reader(), answers=hf.TopK(WORDS + 1))
    refused(learner, rf"TopK\({WORDS + 1}\) asks for more logits than the {WORDS} classes have", *next(texts(1)))


@pytest.mark.parametrize("answers", [None, torch.bfloat16, hf.TopK(3)])
def test_another_vocabulary_than_when_the_buffer_was_written(answers, tmp_path):
    learner = make(hf.ConsistencyReplay, reader(), regularizer="kl", answers=answers)
    for x, y in texts(3):
        learner.observe(x, y)
    state = learner.buffer.state_dict()
    other = make(hf.ConsistencyReplay, reader(words=WORDS + 2), regularizer="kl", answers=answers)
    other.buffer.load_state_dict(state)
    refused(other, f"the model now has .*{WORDS + 2} outputs, but the buffer holds logits of .*{WORDS}", x, y)


@pytest.mark.parametrize(("wrote", "reads"), [(None, hf.TopK(2)), (hf.TopK(2), None)])
def test_other_answers_than_when_the_buffer_was_written(wrote, reads):
    learner = make(hf.ConsistencyReplay, reader(), answers=wrote)
    for x, y in texts(3):
        learner.observe(x, y)
    other = make(hf.ConsistencyReplay, reader(), answers=reads)
    other.buffer.load_state_dict(learner.buffer.state_dict())
    refused(other, "the buffer holds other answers than", x, y)


@pytest.mark.parametrize("wrote", FORMS)
@pytest.mark.parametrize("reads", FORMS)
def test_a_learner_loads_answers_of_its_own_form_alone(wrote, reads):
    learner, other = (make(hf.ConsistencyReplay, reader(), answers=FORMS[each]) for each in (wrote, reads))
    learner.observe(*next(texts(1)))
    state = learner.state_dict()
    if wrote == reads:
        other.load_state_dict(state)
        return
    before = repr(other.state_dict())
    with pytest.raises(UsageError, match=rf"the saved learner stores {re.escape(wrote)}, this one {re.escape(reads)}"):
        other.load_state_dict(state)
    assert repr(other.state_dict()) == before


# --- how a model is called -------------------------------------------------------------------------------------------


class Returned:
    """As transformers' ModelOutput: the logits are one attribute of several."""

    def __init__(self, logits):
        self.logits, self.hidden_states = logits, None


class PreTrainedModel(nn.Module):
    """As a model of transformers: called by keywords, and found by the name of its class."""

    def __init__(self):
        super().__init__()
        self.inner = reader()

    def forward(self, input_ids, attention_mask=None):
        assert isinstance(input_ids, torch.Tensor)
        return Returned(self.inner(input_ids))


class Wrapped(PreTrainedModel):
    """One of its subclasses."""


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = reader()

    def forward(self, ids):
        return {"scores": self.inner(ids)}


@pytest.mark.parametrize("kind", [hf.ExperienceReplay, hf.ConsistencyReplay])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Wrapped, {}),
        (Wrapped, {"outputs": lambda returned: returned.logits}),
        (Scorer, {"call": lambda m, x: m(x["input_ids"]), "outputs": lambda returned: returned["scores"]}),
        (Scorer, {"call": lambda m, x: m(x["input_ids"])["scores"]}),
    ],
)
def test_models_that_are_called_otherwise(kind, model, options):
    plain, other = make(kind, reader()), make(kind, model(), **options)
    for x, y in texts(4):
        mask = torch.ones_like(x)
        assert plain.observe(x, y) == other.observe({"input_ids": x, "attention_mask": mask}, y)
    assert_same_state(plain.model, other.model.inner, rtol=0, atol=0)


def test_a_pretrained_model_may_also_get_a_tensor():
    make(hf.ExperienceReplay, Wrapped()).observe(*next(texts(1)))


def test_outputs_that_are_no_tensor():
    learner = make(hf.ExperienceReplay, Scorer())
    with pytest.raises(UsageError, match=r"the model returns a dict; .* outputs=lambda returned: returned\['scores'\]"):
        learner.observe(*next(texts(1)))


# --- samples of different length -------------------------------------------------------------------------------------


def ragged(lengths, seed=0):
    """Minibatches of texts that differ in length; 0 fills them up, and their labels are -100 there."""
    draw = torch.Generator().manual_seed(seed)
    for length in lengths:
        sizes = torch.randint(1, length + 1, (4,), generator=draw).tolist()
        sizes[0] = length
        x, y = torch.zeros(4, length, dtype=torch.int64), torch.full((4, length), IGNORED)
        for row, size in enumerate(sizes):
            x[row, :size] = torch.randint(1, WORDS, (size,), generator=draw)
            y[row, :size] = torch.randint(WORDS, (size,), generator=draw)
        yield x, y


@pytest.mark.parametrize("answers", [None, torch.bfloat16, hf.TopK(3)])
@pytest.mark.parametrize("kind", [hf.ConsistencyReplay, DarkReplay, hf.ExperienceReplay])
def test_lengths_change_nothing(kind, answers):
    """A stream of minibatches of any lengths teaches what it teaches filled up to the longest beforehand."""
    options = {} if kind is hf.ExperienceReplay else {"answers": answers}
    options |= {"regularizer": "kl"} if kind is hf.ConsistencyReplay else {}
    padding = {"x": 0, "y": IGNORED}
    short = make(kind, reader(), buffer_size=6, padding=padding, **options)
    even = make(kind, reader(), buffer_size=6, **options)
    for x, y in ragged([5, 3, 8, 2, 6, 8, 4]):
        wide = torch.zeros(4, 8, dtype=torch.int64), torch.full((4, 8), IGNORED)
        wide[0][:, : x.shape[1]], wide[1][:, : y.shape[1]] = x, y
        one, other = short.observe(x, y), even.observe(*wide)
        torch.testing.assert_close(one.as_dict(), other.as_dict(), rtol=1e-9, atol=1e-11)
    assert_same_state(short.model, even.model, rtol=1e-8, atol=1e-10)


def test_pending_minibatches_of_different_length():
    """Several losses before one step: each minibatch is stored as it came, once its turn comes."""
    learner = make(hf.ConsistencyReplay, reader(), answers=hf.TopK(2), padding={"x": 0, "y": IGNORED}, buffer_size=30)
    batches = list(ragged([5, 3, 8]))
    pending = [learner.losses(x, y) for x, y in batches]
    for losses in pending:
        learner.commit(losses)
    stored = learner.buffer.contents()
    for number, (x, y) in enumerate(batches):
        for row in range(4):
            length = int((y[row] != IGNORED).sum())
            assert torch.equal(stored.x[4 * number + row, :length], x[row, :length])
            assert torch.equal(stored.y[4 * number + row, :length], y[row, :length])
            expected = learner.model(x[row : row + 1])[0, :length].topk(2).values
            torch.testing.assert_close(stored.logits["values"][4 * number + row, :length], expected.detach().half())


def test_lengths_need_classes_last():
    with pytest.raises(UsageError, match="class_dim=-1"):
        make(hf.ConsistencyReplay, segmenter(), class_dim=1, padding={"x": 0})
