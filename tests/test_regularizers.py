"""Each regularizer against a slow float64 loop, scipy or torch's own function; gradients by finite differences."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.nn import functional as F

from holdfast.registry import Registry
from holdfast.regularizers import REGULARIZERS
from holdfast.rng import generator
from holdfast.testing import check_regularizer

NAMES = list(REGULARIZERS)
SHAPES = [(1, 2), (1, 10), (2, 2), (3, 5), (7, 10), (16, 100)]


def logits(rows, classes, seed=0, scale=2.0, dtype=torch.float64):
    draw = generator(seed, f"logits {rows} {classes}")
    current, stored = (scale * torch.randn(rows, classes, generator=draw, dtype=torch.float64) for _ in range(2))
    return current.to(dtype), stored.to(dtype)


# --- oracles: plain loops over lists of floats ------------------------------------------------------------------------


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(row):
    length = math.sqrt(dot(row, row))
    return [value / length for value in row]


def softmax(row):
    top = max(row)
    powers = [math.exp(value - top) for value in row]
    return [power / math.fsum(powers) for power in powers]


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def row_mean(function):
    return lambda c, s: mean(function(a, b) for a, b in zip(c, s, strict=True))


def differences(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def slow_kl(a, b):
    now, then = softmax(a), softmax(b)
    return math.fsum(q * math.log(q / p) for p, q in zip(now, then, strict=True)) / len(a)


def slow_mi(c, s):
    classes = range(len(c[0]))
    now, then = [softmax(row) for row in c], [softmax(row) for row in s]
    joint = [[math.fsum(p[i] * q[j] for p, q in zip(now, then, strict=True)) for j in classes] for i in classes]
    joint = [[(joint[i][j] + joint[j][i]) / 2 for j in classes] for i in classes]
    total = math.fsum(map(math.fsum, joint))
    joint = [[max(value / total, np.finfo(float).eps) for value in row] for row in joint]
    across = [math.fsum(row) for row in joint]
    down = [math.fsum(joint[i][j] for i in classes) for j in classes]
    return -math.fsum(joint[i][j] * math.log(joint[i][j] / (across[i] * down[j])) for i in classes for j in classes)


def slow_simclr(c, s, temperature=0.5):
    rows = [unit(row) for row in [*c, *s]]
    terms = []
    for i, row in enumerate(rows):
        partner = (i + len(c)) % len(rows)
        others = [math.exp(dot(row, other) / temperature) for k, other in enumerate(rows) if k != i]
        terms.append(math.log(math.fsum(others)) - dot(row, rows[partner]) / temperature)
    return mean(terms)


def slow_dino(a, b, student=0.1, teacher=0.06):
    target = softmax([value / teacher for value in unit(b)])
    answer = softmax([value / student for value in unit(a)])
    return -math.fsum(t * math.log(p) for t, p in zip(target, answer, strict=True))


def slow_barlow(c, s, diagonal=0.5, off_diagonal=0.05):
    classes = range(len(c[0]))
    now, then = [unit(row) for row in c], [unit(row) for row in s]
    total = 0.0
    for i in classes:
        for j in classes:
            correlation = mean(p[i] * q[j] for p, q in zip(now, then, strict=True))
            total += diagonal * (1 - correlation) ** 2 if i == j else off_diagonal * correlation**2
    return total


SLOW = {
    "l1": row_mean(lambda a, b: math.fsum(abs(d) for d in differences(a, b))),
    "l2": row_mean(lambda a, b: math.dist(a, b)),
    "linf": row_mean(lambda a, b: max(abs(d) for d in differences(a, b))),
    "mse": row_mean(lambda a, b: mean(d * d for d in differences(a, b))),
    "kl": row_mean(slow_kl),
    "mi": slow_mi,
    "simclr": slow_simclr,
    "byol": row_mean(lambda a, b: math.dist(unit(a), unit(b)) ** 2),
    "dino": row_mean(slow_dino),
    "barlow": slow_barlow,
    "simsiam": row_mean(lambda a, b: -dot(unit(a), unit(b))),
}


def test_every_regularizer_of_the_package_has_an_oracle():
    assert {name for name in NAMES if REGULARIZERS[name].__module__ == "holdfast.regularizers"} == set(SLOW)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SLOW)
def test_value_is_that_of_the_slow_loop(name, shape):
    for seed in range(3):
        current, stored = logits(*shape, seed)
        expected = SLOW[name](current.tolist(), stored.tolist())
        assert REGULARIZERS[name](current, stored).item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", SLOW)
def test_value_in_float32(name):
    current, stored = logits(16, 10)
    expected = SLOW[name](current.tolist(), stored.tolist())
    value = REGULARIZERS[name](current.float(), stored.float())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- oracles: libraries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "p"), [("l1", 1), ("l2", 2), ("linf", float("inf"))])
def test_norms_against_torch(name, p):
    current, stored = logits(9, 7)
    expected = F.pairwise_distance(current, stored, p=p, eps=0).mean()
    torch.testing.assert_close(REGULARIZERS[name](current, stored), expected)


def test_kl_against_scipy_divided_by_classes():
    current, stored = logits(9, 7)
    then, now = special.softmax(stored.numpy(), axis=1), special.softmax(current.numpy(), axis=1)
    expected = np.mean(stats.entropy(then, now, axis=1)) / 7
    assert REGULARIZERS["kl"](current, stored).item() == pytest.approx(expected)


def test_kl_has_its_direction():
    current, stored = logits(9, 7)
    assert REGULARIZERS["kl"](current, stored) != pytest.approx(REGULARIZERS["kl"](stored, current).item(), rel=1e-3)


def test_mi_of_sure_answers_is_the_entropy_of_the_classes():
    """Both always name the same of 4 classes, each equally often: log 4. Unrelated uniform answers: 0."""
    sure = 100 * torch.eye(4, dtype=torch.float64).repeat(3, 1)
    assert REGULARIZERS["mi"](sure, sure).item() == pytest.approx(-math.log(4), abs=1e-10)
    flat = torch.zeros(12, 4, dtype=torch.float64)
    assert REGULARIZERS["mi"](flat, sure).item() == pytest.approx(0, abs=1e-10)


def test_mi_against_scipy_entropies():
    current, stored = logits(30, 6)
    joint = special.softmax(current.numpy(), axis=1).T @ special.softmax(stored.numpy(), axis=1)
    joint = (joint + joint.T) / (2 * joint.sum())
    information = stats.entropy(joint.sum(0)) + stats.entropy(joint.sum(1)) - stats.entropy(joint.ravel())
    assert REGULARIZERS["mi"](current, stored).item() == pytest.approx(-information)


def test_byol_and_simsiam_against_torch():
    current, stored = logits(9, 7)
    cosine = F.cosine_similarity(current, stored).mean()
    torch.testing.assert_close(REGULARIZERS["byol"](current, stored), 2 - 2 * cosine)
    torch.testing.assert_close(REGULARIZERS["simsiam"](current, stored), -cosine)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (2, 3), (4, 5)])
@pytest.mark.parametrize("name", SLOW)
def test_gradient_by_finite_differences(name, shape):
    current, stored = logits(*shape, seed=1)
    current.requires_grad_()
    assert torch.autograd.gradcheck(lambda c: REGULARIZERS[name](c, stored), (current,), eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("simclr", {"temperature": 0.2}),
        ("dino", {"student": 0.3, "teacher": 0.2}),
        ("barlow", {"diagonal": 1.0, "off_diagonal": 1.0}),
    ],
)
def test_hyperparameters_are_used(name, options):
    current, stored = logits(6, 5)
    slow = {"simclr": slow_simclr, "barlow": slow_barlow, "dino": row_mean(partial(slow_dino, **options))}[name]
    expected = slow(current.tolist(), stored.tolist(), **({} if name == "dino" else options))
    value = REGULARIZERS[name](current, stored, **options)
    assert value.item() == pytest.approx(expected)
    for option in options:
        fewer = {key: number for key, number in options.items() if key != option}
        assert REGULARIZERS[name](current, stored, **fewer).item() != pytest.approx(expected, rel=1e-6)


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["l1", "l2", "linf", "mse", "kl", "byol"])
@pytest.mark.parametrize("shape", SHAPES)
def test_zero_where_nothing_changed_and_positive_elsewhere(name, shape):
    current, stored = logits(*shape)
    assert REGULARIZERS[name](stored, stored).item() == pytest.approx(0, abs=1e-15)
    assert REGULARIZERS[name](current, stored).item() > 1e-9
    nudged = stored.clone()
    nudged[-1, 0] += 1e-3
    assert REGULARIZERS[name](nudged, stored).item() > 0


@pytest.mark.parametrize("name", ["l1", "l2", "linf", "mse", "kl"])
def test_gradient_is_zero_where_nothing_changed(name):
    _, stored = logits(4, 5)
    current = stored.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(REGULARIZERS[name](current, stored), current)
    assert gradient.abs().max() < 1e-15


def test_mse_is_squared_l2_by_classes_in_each_row():
    current, stored = logits(8, 6)
    for row in range(8):
        c, s = current[row : row + 1], stored[row : row + 1]
        torch.testing.assert_close(REGULARIZERS["mse"](c, s), REGULARIZERS["l2"](c, s) ** 2 / 6)


def test_norms_are_ordered():
    current, stored = logits(8, 6)
    l1, l2, linf = (REGULARIZERS[name](current, stored) for name in ("l1", "l2", "linf"))
    assert linf < l2 < l1 < 6 * linf


def test_byol_is_the_squared_distance_of_normalised_rows():
    current, stored = logits(8, 6)
    apart = F.normalize(current) - F.normalize(stored)
    torch.testing.assert_close(REGULARIZERS["byol"](current, stored), apart.square().sum(1).mean())
    torch.testing.assert_close(REGULARIZERS["byol"](-stored, stored).item(), 4.0)


@pytest.mark.parametrize("name", ["byol", "simsiam", "dino", "simclr", "barlow"])
def test_scale_of_the_rows_does_not_matter_to_the_normalising_ones(name):
    current, stored = logits(8, 6)
    scales = torch.rand(8, 1, generator=generator(0, "scales"), dtype=torch.float64) * 10 + 0.1
    expected = REGULARIZERS[name](current, stored)
    torch.testing.assert_close(REGULARIZERS[name](current * scales, stored / scales), expected)


@pytest.mark.parametrize("name", ["kl", "mi"])
def test_a_constant_added_to_a_row_does_not_matter_to_those_of_softmax(name):
    current, stored = logits(8, 6)
    torch.testing.assert_close(REGULARIZERS[name](current + 3, stored - 2), REGULARIZERS[name](current, stored))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_the_rows_does_not_matter(name):
    current, stored = logits(8, 6)
    order = torch.randperm(8, generator=generator(0, "order"))
    torch.testing.assert_close(REGULARIZERS[name](current[order], stored[order]), REGULARIZERS[name](current, stored))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"mi", "barlow"}))
def test_the_pairing_of_the_rows_does_matter(name):
    current, stored = logits(8, 6)
    assert REGULARIZERS[name](current, stored.roll(1, 0)).item() != pytest.approx(
        REGULARIZERS[name](current, stored).item(), rel=1e-6
    )


@pytest.mark.parametrize("name", ["dino", "simclr"])
def test_these_have_a_floor_above_zero(name):
    """Even for answers that did not change. (simclr's only for B > 1: one pair has no negatives.)"""
    for shape in ((2, 2), (7, 10), (16, 100)):
        _, stored = logits(*shape)
        assert REGULARIZERS[name](stored, stored).item() > 1e-3


def test_simclr_of_one_pair_is_zero():
    assert REGULARIZERS["simclr"](*logits(1, 10)).item() == pytest.approx(0, abs=1e-12)


def test_dino_floor_is_the_entropy_of_the_teacher():
    """The least over all students: reached where both temperatures are one and the answers agree."""
    _, stored = logits(5, 4)
    teacher = special.softmax(F.normalize(stored).numpy() / 0.06, axis=1)
    value = REGULARIZERS["dino"](stored, stored, student=0.06)
    assert value.item() == pytest.approx(np.mean(stats.entropy(teacher, axis=1)))


def test_barlow_of_perfect_correlation_is_zero():
    """B = C one-hot rows scaled so that X is the identity divided by B: only the diagonal's shortfall remains."""
    rows = torch.eye(5, dtype=torch.float64)
    assert REGULARIZERS["barlow"](rows, rows).item() == pytest.approx(0.5 * 5 * (1 - 1 / 5) ** 2)
    one = torch.ones(6, 1, dtype=torch.float64)
    assert REGULARIZERS["barlow"](one, one).item() == pytest.approx(0)


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    check_regularizer(REGULARIZERS[name], classes=(2, 10, 100))


def test_contract_with_options():
    check_regularizer(partial(REGULARIZERS["simclr"], temperature=0.1))


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_description(name):
    assert len(REGULARIZERS.describe(name)) > 10


def test_an_unknown_one_never_runs_something_else():
    with pytest.raises(ValueError, match="unknown regularizer 'mes': did you mean 'mse'"):
        REGULARIZERS["mes"]


# Each breaks the contract in one way; what it must be told.
BROKEN: Registry = Registry("broken regularizer")


@BROKEN.register("for identical logits .* the gradient is not finite")
def square_root_at_zero(current, stored):
    return (current - stored).square().sum(1).sqrt().mean()


@BROKEN.register("for current zero logits .* the (value|gradient) is")
def division_by_the_norm(current, stored):
    return (current / current.square().sum(1, keepdim=True).sqrt() - stored).square().mean()


@BROKEN.register(r"1e4 logits .* the (value is (nan|inf)|gradient is not finite)")
def naive_softmax(current, stored):
    return ((current.exp() / current.exp().sum(1, keepdim=True)) - stored.softmax(1)).square().mean()


@BROKEN.register(r"logits of shape \(1, 2\), the (value is nan|gradient is not finite)")
def variance_over_the_batch(current, stored):
    difference = current - stored
    return (difference - difference.mean(0)).square().sum() / (len(current) - 1)


@BROKEN.register("it must be one number")
def one_value_per_row(current, stored):
    return (current - stored).square().mean(1)


@BROKEN.register("returns float, not a tensor")
def python_number(current, stored):
    return 1.0


@BROKEN.register("carries no gradient")
def detached(current, stored):
    return (current.detach() - stored).square().mean()


@BROKEN.register("does not depend on the current logits")
def of_the_stored_only(current, stored):
    return stored.square().mean() * torch.ones((), requires_grad=True)


@BROKEN.register("gradient is 0 everywhere")
def constant(current, stored):
    return (0 * current).sum()


@BROKEN.register("a smaller value must mean more consistent answers")
def wrong_sign(current, stored):
    return F.cosine_similarity(current, stored).mean()


@BROKEN.register("changes the stored logits in place")
def overwrites_stored(current, stored):
    stored.mul_(0.5)
    return (current - stored).square().mean()


@BROKEN.register("changes the current logits in place")
def overwrites_current(current, stored):
    current.data.mul_(0.5)
    return (current - stored).square().mean()


@BROKEN.register("asks for a gradient of the stored logits")
def wants_gradient_of_stored(current, stored):
    return (current - stored.requires_grad_()).square().mean()


@BROKEN.register("draws from torch's global generator")
def random_rows(current, stored):
    keep = torch.rand(len(current), 1)
    return (keep * (current - stored)).square().mean()


CALLS = []


@BROKEN.register("the next time")
def remembers(current, stored):
    CALLS.append(1)
    return (current - stored).square().mean() * len(CALLS) + len(CALLS)


@BROKEN.register("asks for the value of a tensor .*item")
def waits_for_item(current, stored):
    return (current - stored).square().mean() * (1 + abs(stored.sum().item()))


@BROKEN.register("asks for the value of a tensor .*branch")
def branches_on_a_value(current, stored):
    return (current - stored).abs().mean() if stored.sum() > 0 else (current - stored).square().mean()


@BROKEN.register("asks for the value of a tensor .*boolean indexing")
def indexes_by_mask(current, stored):
    return (current - stored)[stored > -1e9].square().mean()


@BROKEN.register("the value is torch.float64")
def another_type(current, stored):
    return (current.double() - stored).square().mean()


@BROKEN.register("hyper-parameters need defaults, but margin have none")
def required_hyperparameter(current, stored, *, margin):
    return (current - stored).abs().mean() + margin


@pytest.mark.parametrize("message", BROKEN, ids=lambda message: BROKEN[message].__name__)
def test_the_contract_can_be_broken(message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_regularizer(BROKEN[message])
    assert f"regularizer '{BROKEN[message].__name__}'" in str(caught.value)


def test_the_contract_looks_at_the_classes_asked_for():
    def not_for_three(current, stored):
        return (current - stored).square().mean() / (current.shape[1] - 3)

    check_regularizer(not_for_three, classes=(4,))
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check_regularizer(not_for_three, classes=(4, 3))
