"""Plain training against p -= lr * gradient."""

import pytest
import torch
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners import LEARNERS, Joint, Parts, PlainSgd, Sgd, make_learner, method_names
from holdfast.regularizers import REGULARIZERS
from learners.conftest import (
    CLASSES,
    accuracies,
    assert_same_state,
    blobs,
    cross_entropies,
    descend,
    network,
    plain_copy,
    stream,
)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm", "grouped"])
@pytest.mark.parametrize("learner_class", [Sgd, Joint])
def test_ten_steps(kind, learner_class):
    model = network(kind)
    reference = plain_copy(kind, model)
    learner = learner_class(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in stream(10):
        loss = cross_entropies(reference(x), y).mean()
        losses = learner.observe(x, y)
        torch.testing.assert_close(losses.total, loss.detach())
        torch.testing.assert_close(losses.current, loss.detach())
        assert losses.replay == 0
        assert losses.consistency == 0
        descend(reference, loss, 0.1)
    assert_same_state(model, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
def test_plain_sgd_is_torchs(kind):
    model = network(kind)
    copy = plain_copy(kind, model)
    ours, torchs = PlainSgd(model.parameters(), 0.1), torch.optim.SGD(copy.parameters(), lr=0.1)
    next(iter(model.parameters())).requires_grad_(False)  # frozen: it has no gradient and stays as it is
    next(iter(copy.parameters())).requires_grad_(False)
    for x, y in stream(10):
        for network_, optimizer in ((model, ours), (copy, torchs)):
            optimizer.zero_grad()
            F.cross_entropy(network_(x), y).backward()
            optimizer.step()
    assert_same_state(model, copy, rtol=1e-12, atol=1e-14)


def test_only_joint_wants_everything_at_once():
    assert {name for name, learner in LEARNERS.items() if learner.all_at_once} == {"joint"}
    assert Sgd.buffer is None


def test_augment_is_applied():
    model = network("mlp", torch.float32)
    learner = Sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), augment=lambda x: x.float() / 255)
    x, y = torch.randint(0, 256, (4, 1, 6, 6), dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
    expected = F.cross_entropy(model(x.float() / 255), y)
    torch.testing.assert_close(learner.observe(x, y).total, expected.detach())


def test_losses_carry_no_gradient():
    model = network("mlp")
    learner = Sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not any(term.requires_grad for term in learner.observe(*next(stream(1))).as_dict().values())


def test_bfloat16_gives_float32_logits_close_to_full_precision():
    model = network("mlp", torch.float32)
    learner = Sgd(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bfloat16")
    x, _ = next(stream(1, dtype=torch.float32))
    logits = learner.forward(x)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, model(x))
    torch.testing.assert_close(logits, model(x), rtol=0.05, atol=0.05)


def test_sgd_forgets(linear):
    training, x, y = blobs()
    learner = Sgd(linear, torch.optim.SGD(linear.parameters(), lr=0.3))
    for batch in training:
        learner.observe(*batch)
    first, second = accuracies(linear, x, y)
    assert first < 20
    assert second > 95


@pytest.mark.parametrize("labels", [[0, 1, 2, CLASSES], [-1, 0, 1, 2]])
def test_label_out_of_range(labels):
    model = network("mlp")
    before = plain_copy("mlp", model)
    learner = Sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"labels up to 5 .*outputs are 0\.\.4.*head=|label -1 names no output"):
        learner.observe(torch.zeros(4, 1, 6, 6, dtype=torch.float64), torch.tensor(labels))
    assert_same_state(model, before, rtol=0, atol=0)


def test_lengths_must_agree():
    model = network("mlp")
    learner = Sgd(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.zeros(4, 1, 6, 6, dtype=torch.float64)
    with pytest.raises(UsageError, match="4 inputs need as many labels"):
        learner.observe(x, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match="one dimension"):
        learner.observe(x, torch.zeros(4, 1, dtype=torch.int64))
    with pytest.raises(UsageError, match="at least one sample"):
        learner.observe(x[:0], torch.zeros(0, dtype=torch.int64))


def parts() -> Parts:
    model = network("mlp", torch.float32)
    return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: x, torch.Generator())


def test_methods_are_the_learners_and_the_regularizers():
    names = method_names()
    assert {"sgd", "joint", "er", *REGULARIZERS} <= set(names)
    assert "consistency" not in names
    for name in names:
        config = RunConfig.preset("rot-mnist", name, buffer_size=50)
        assert isinstance(
            make_learner(config, parts()), LEARNERS[name] if name in LEARNERS else LEARNERS["consistency"]
        )


def test_unknown_method_names_the_nearest():
    with pytest.raises(UsageError, match="unknown method 'lnif': did you mean 'linf'"):
        make_learner(RunConfig.preset("rot-mnist", "lnif"), parts())
