"""The kernels of BatchNorm against torch's own, one minibatch at a time in float64.

On a GPU they run as they are; elsewhere Triton interprets them (conftest.py asks for it): all but their speed is seen.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from holdfast.models import GroupedBatchNorm, GroupedForward, ResNet18, group_batchnorm
from holdfast.models.batchnorm import fused, normalized_relu
from holdfast.rng import generator, seeded_globally

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Older ones do not interpret loops whose length is an argument.
pytest.importorskip("triton", minversion=None if DEVICE == "cuda" else "3.7")
KINDS = {"plain": (False, False), "relu": (True, False), "shortcut": (True, True)}


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    """Interpreted kernels serve tensors on a CPU; on a GPU, convolutions are as exact as there."""
    monkeypatch.setattr(fused, "compiles_for", lambda device: device.type == DEVICE)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def randn(*shape, seed=0):
    """Channels last, as the kernels want it."""
    drawn = torch.randn(*shape, generator=generator(seed, f"values {shape}")).to(DEVICE)
    return drawn.movedim(1, -1).contiguous().movedim(-1, 1)


def case(groups, samples, channels, rest, kind, *, seed=0, dtype=torch.float32):
    """Input, weight, bias, shortcut or None, and the gradient of the output."""
    relu, shortcut = KINDS[kind]
    shape = (groups * samples, channels, *rest)
    x = (randn(*shape, seed=seed) + 3 * randn(1, channels, *[1] * len(rest), seed=seed)).to(dtype)
    weight, bias = randn(2, channels, seed=seed)
    weight = weight.abs() + 0.5
    added = randn(*shape, seed=seed + 1).to(dtype) if shortcut else None
    dy = randn(*shape, seed=seed + 2).to(dtype)
    if relu:  # a value that rounding moves across the ReLU's edge has another gradient
        before, _, _ = reference(x, weight, bias, added, dy, groups, relu=False)
        dy[before.abs() < 1e-3] = 0
    return x, weight, bias, added, dy


def reference(x, weight, bias, shortcut, dy, groups, relu):
    """Output, gradients, means and variances in float64, one minibatch at a time."""
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias, shortcut) if tensor is not None]
    parts = leaves[0].chunk(groups)
    out = torch.cat([F.batch_norm(part, None, None, leaves[1], leaves[2], training=True) for part in parts])
    out = out + leaves[3] if shortcut is not None else out
    out = out.relu() if relu else out
    axes = [0, *range(2, x.dim())]
    found = [(part.mean(axes), part.var(axes, correction=0)) for part in parts]
    statistics = torch.stack([torch.stack(each) for each in zip(*found, strict=True)]).detach()
    return out.detach(), torch.autograd.grad(out, leaves, dy.double()), statistics


def kernels(x, weight, bias, shortcut, dy, groups, relu):
    """The same with the kernels."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias, shortcut) if tensor is not None]
    added = leaves[3] if shortcut is not None else None
    out, statistics = fused.batchnorm(*leaves[:3], groups=groups, eps=1e-5, relu=relu, shortcut=added)
    assert not statistics.requires_grad
    return out.detach(), torch.autograd.grad(out, leaves, dy), statistics


def compare(groups, samples, channels, rest, kind, *, step=1e-5, **options):
    """Within `step` of the largest number that each result is made of."""
    relu, _ = KINDS[kind]
    inputs = case(groups, samples, channels, rest, kind, **options)
    expected, slopes, statistics = reference(*inputs, groups, relu)
    got, got_slopes, got_statistics = kernels(*inputs, groups, relu)
    steepest = float((inputs[1].abs().max() / statistics[1].min().sqrt()).clamp_min(1))
    torch.testing.assert_close(got.double(), expected, rtol=step, atol=step * steepest)
    torch.testing.assert_close(got_statistics.double(), statistics, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got_slopes, slopes, strict=True):
        terms = 4 * steepest * (len(inputs[0]) if theirs.dim() == 1 else 1)
        torch.testing.assert_close(ours.double(), theirs, rtol=step, atol=step * terms)
    return got, got_slopes


@given(
    groups=st.integers(1, 4),
    samples=st.integers(2, 9),
    channels=st.integers(1, 40),
    rest=st.sampled_from([(), (3,), (4, 5), (2, 3, 2)]),
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_any_shape(groups, samples, channels, rest, kind, seed):
    compare(groups, samples, channels, rest, kind, seed=seed)


@pytest.mark.parametrize(
    ("groups", "samples", "channels", "side", "kind"),
    [
        *((3, 16, 32, 8, kind) for kind in KINDS),
        (1, 40, 32, 8, "shortcut"),  # which does what the other kinds do and more
        (2, 13, 33, 7, "shortcut"),
    ],
)
def test_several_pieces(groups, samples, channels, side, kind):
    """A group's sums come from several programs, the last of which may have less to do or nothing."""
    compare(groups, samples, channels, (side, side), kind)


def test_a_mean_far_from_zero():
    x, ones = randn(30, 8, 4, 4) + 1000, torch.ones(8, device=DEVICE)
    expected, _, statistics = reference(x, ones, ones, None, x, 3, relu=False)
    got, _, got_statistics = kernels(x, ones, ones, None, x, 3, relu=False)
    torch.testing.assert_close(got_statistics.double(), statistics, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_so(kind):
    """A run that has lost its way must not go on with zeros behind a ReLU."""
    x, *others = case(2, 8, 4, (3, 3), kind)
    x[3, 1, 0, 0] = torch.nan
    got, slopes, statistics = kernels(x, *others, 2, KINDS[kind][0])
    for found in (got, slopes[0]):
        assert found[:8, 1].isnan().all()
        assert found.isnan().sum() == found[:8, 1].numel()
    assert statistics.isnan().nonzero().tolist() == [[0, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    """Results are as near as their type allows; sums and parameters are in float32."""
    got, slopes = compare(3, 8, 24, (3, 3), kind, dtype=dtype, step=torch.finfo(dtype).eps)
    assert got.dtype == slopes[0].dtype == dtype
    assert slopes[1].dtype == slopes[2].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind):
    """As a penalty on gradients takes them."""
    relu, _ = KINDS[kind]
    x, weight, bias, shortcut, dy = case(2, 6, 5, (3, 2), kind)

    def penalty(normalize, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias, shortcut) if t is not None]
        out = normalize(leaves)
        gradients = torch.autograd.grad(out, leaves, dy.to(dtype), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves, allow_unused=True)

    def kernel(leaves):
        added = leaves[3] if shortcut is not None else None
        return fused.batchnorm(*leaves[:3], groups=2, eps=1e-5, relu=relu, shortcut=added)[0]

    def plain(leaves):
        out = torch.cat([F.batch_norm(part, None, None, *leaves[1:3], training=True) for part in leaves[0].chunk(2)])
        out = out + leaves[3] if shortcut is not None else out
        return out.relu() if relu else out

    for ours, theirs in zip(penalty(kernel, torch.float32), penalty(plain, torch.float64), strict=True):
        expected = torch.zeros(()) if theirs is None else theirs
        size = float(expected.abs().max()) or 1.0
        got = torch.zeros(()) if ours is None else ours
        torch.testing.assert_close(
            got.double() * torch.ones_like(expected), expected.double(), rtol=1e-3, atol=1e-4 * size
        )


def test_gradients_of_gradients_beside_frozen_parameters():
    x, weight, bias, shortcut, dy = case(2, 6, 5, (3, 2), "shortcut")
    for leaf in (x, shortcut):
        leaf.requires_grad_()
        out, _ = fused.batchnorm(x, weight, bias, groups=2, eps=1e-5, relu=True, shortcut=shortcut)
        (gradient,) = torch.autograd.grad(out, leaf, dy.requires_grad_(), create_graph=True)
        (again,) = torch.autograd.grad(gradient.square().sum(), dy)
        assert again.isfinite().all()
        assert again.any()
        leaf.requires_grad_(False)


def test_equal_inputs_give_equal_bits():
    inputs = case(3, 16, 32, (8, 8), "shortcut")
    first, second = kernels(*inputs, 3, True), kernels(*inputs, 3, True)
    assert all(torch.equal(a, b) for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_is_told_the_truth(kind):
    """torch's own checks of the operation: what it says about shapes, strides and gradients is what it does."""
    x, weight, bias, shortcut, _ = case(3, 4, 6, (3, 3), kind)
    leaves = [tensor if tensor is None else tensor.requires_grad_() for tensor in (x, weight, bias, shortcut)]
    torch.library.opcheck(fused._batchnorm, (*leaves, 3, 1e-5, KINDS[kind][0]))


# --- in a network -----------------------------------------------------------------------------------------------------


def network():
    """A ResNet-18 without most of its blocks: one that keeps the size of images, and one that halves it."""
    with seeded_globally(0, "network"):
        model = ResNet18((3, 8, 8), 10, width=4)
        model.blocks, model.classifier = model.blocks[1:3], nn.Linear(8, 10)
    return model.to(DEVICE).to(memory_format=torch.channels_last)


def counted(monkeypatch):
    """A list that grows with every use of the kernels."""
    uses, real = [], fused.batchnorm
    monkeypatch.setattr(fused, "batchnorm", lambda *a, **k: uses.append(k["groups"]) or real(*a, **k))
    return uses


@pytest.mark.parametrize(
    ("sizes", "compiled"),
    [((6, 6, 6), True), ((6, 6, 6), False), ((6,), False)],
    ids=["three-compiled", "three-eager", "one-eager"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler, about itself
def test_a_network_computes_what_it_did(sizes, compiled, monkeypatch):
    plain, grouped = network(), group_batchnorm(network())
    uses = counted(monkeypatch)
    monkeypatch.setattr(fused, "_plain_backward", None)  # only gradients of gradients need it
    x = randn(sum(sizes), 3, 8, 8)
    dy = randn(sum(sizes), 10, seed=1)
    network_ = torch.compile(grouped, backend="aot_eager", dynamic=False) if compiled else grouped
    for _ in range(2):  # the second pass finds what the first left
        outputs = torch.cat([plain(part) for part in x.split(list(sizes))])
        outputs.backward(dy)
        found = torch.cat(GroupedForward(grouped)(x, sizes, network_))
        found.backward(dy)
        torch.testing.assert_close(found, outputs, rtol=1e-3, atol=1e-3)
    assert set(uses) == {len(sizes)}
    assert compiled or len(uses) == 12
    for (name, ours), theirs in zip(grouped.named_parameters(), plain.parameters(), strict=True):
        size = float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-2, atol=1e-2 * size, msg=lambda m, n=name: f"{n}: {m}"
        )
    for (name, ours), theirs in zip(grouped.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    torch._dynamo.reset()


def test_where_there_are_no_kernels(monkeypatch):
    uses = counted(monkeypatch)
    norm = group_batchnorm(nn.BatchNorm2d(4)).to(DEVICE)
    x = randn(6, 4, 3, 3)
    GroupedForward(norm)(x, (2, 4))  # groups of several sizes
    GroupedForward(norm)(x.contiguous(), (3, 3))  # channels first
    GroupedForward(group_batchnorm(nn.BatchNorm2d(4, affine=False)).to(DEVICE))(x, (3, 3))
    norm.eval()(x)
    assert not uses


def test_what_does_not_fit_is_refused_as_ever():
    norm = group_batchnorm(nn.BatchNorm2d(4)).to(DEVICE)
    for x in (randn(6, 5, 3, 3), randn(6, 1, 1, 1)[:, 0, 0, 0]):
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            norm(x)
    with pytest.raises(ValueError, match="more than 1 value"):
        norm(randn(1, 4, 1, 1))


@pytest.mark.parametrize("shortcut", [randn(1, 4, 1, 1), randn(6, 4, 3, 3).double()], ids=["broadcast", "wider"])
def test_other_shortcuts_are_added_as_ever(shortcut):
    norm = group_batchnorm(nn.BatchNorm2d(4)).to(DEVICE)
    x = randn(6, 4, 3, 3)
    torch.testing.assert_close(normalized_relu(norm, x, shortcut), (norm(x) + shortcut).relu(), rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_samples_are_noticed():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x.reshape(-1, 4)).view(len(x), -1)

    plain = Frames().to(DEVICE)
    grouped = group_batchnorm(copy.deepcopy(plain))
    x = randn(6, 8)
    outputs = GroupedForward(grouped)(x, (3, 3))
    for ours, part in zip(outputs, x.split(3), strict=True):
        torch.testing.assert_close(ours, plain(part), rtol=1e-4, atol=1e-4)


def test_hooks_see_what_they_always_saw():
    model = group_batchnorm(network())
    seen = []
    model.bn.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(randn(4, 3, 8, 8))
    assert isinstance(model.bn, GroupedBatchNorm)
    assert seen[0].min() < 0  # before the ReLU
