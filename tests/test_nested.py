"""Nested inputs: taken apart and put together again, whatever the nesting."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.nested import concat, leaves, outline, rebuild, rows, split, transform

SHAPES = st.sampled_from([(), (2,), (1, 3)])
DTYPES = st.sampled_from([torch.float32, torch.uint8, torch.int64, torch.bool])
LEAVES = st.builds(lambda shape, dtype: ("leaf", shape, dtype), SHAPES, DTYPES)
KEYS = st.text("ab'[]0", min_size=1, max_size=4)


def lists(inner):
    """Lists that hold more than dicts alone, which are refused."""
    return st.lists(inner, min_size=1, max_size=3).filter(
        lambda items: not all(isinstance(item, dict) for item in items)
    )


FORMS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(KEYS, inner, min_size=1, max_size=3)
        | lists(inner)
        | lists(inner).map(lambda items: ("tuple", items))
    ),
    max_leaves=6,
)


def make(form, count, seed=0):
    """Samples of this form, whose numbers differ from leaf to leaf and row to row."""
    draw = torch.Generator().manual_seed(seed)

    def build(form):
        match form:
            case ("leaf", shape, dtype):
                return torch.randint(0, 255, (count, *shape), generator=draw).to(dtype)
            case ("tuple", items):
                return tuple(map(build, items))
            case dict():
                return {key: build(item) for key, item in form.items()}
        return [build(item) for item in form]

    return build(form)


def same(one, other):
    """Equal types, keys in equal order, equal tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other))


@given(FORMS, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_taken_apart_and_put_together(form, count):
    value = make(form, count)
    assert rows(value) == count
    named = leaves(value, "x")
    assert same(rebuild(outline(value, "x"), named), value)
    for name, leaf in named.items():
        assert eval(name, {"x": value}) is leaf  # noqa: S307  # a name is how one would write it


@given(FORMS, st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_split_is_concat_undone(form, sizes):
    parts = [make(form, size, seed) for seed, size in enumerate(sizes)]
    whole = concat(parts)
    assert rows(whole) == sum(sizes)
    assert all(map(same, split(whole, sizes), parts))


@given(FORMS)
@settings(max_examples=50, deadline=None)
def test_transform_reaches_every_leaf(form):
    value = make(form, 3)
    doubled = transform(lambda part: part.double() * 2, value)
    assert outline(doubled, "x") == outline(value, "x")
    for name, leaf in leaves(value, "x").items():
        assert torch.equal(leaves(doubled, "x")[name], leaf.double() * 2)


def test_the_order_of_keys_is_the_first_ones():
    one, other = {"b": torch.zeros(1), "a": torch.ones(1)}, {"a": torch.ones(2), "b": torch.zeros(2)}
    whole = concat([one, other])
    assert list(whole) == ["b", "a"]
    assert torch.equal(whole["b"], torch.zeros(3))
    assert torch.equal(whole["a"], torch.ones(3))


def test_any_mapping_is_a_dict():
    assert same(transform(torch.neg, OrderedDict(a=torch.ones(2))), {"a": -torch.ones(2)})


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": torch.ones(2), "b": [torch.ones(3)]}, r"x\['a'\] has 2, x\['b'\]\[0\] has 3"),
        ({"a": torch.ones(2), "b": torch.tensor(1.0)}, r"x\['b'\] is a single number"),
        (torch.tensor(1.0), "x is a single number"),
        ({"a": torch.ones(2), "b": "text"}, r"x\['b'\] is of type str"),
        ([torch.ones(2), None], r"x\[1\] is of type NoneType"),
        (Pair(torch.ones(2), torch.ones(2)), "x is of type Pair"),
        ({"a": ()}, r"x\['a'\] is empty"),
        ({1: torch.ones(2)}, "x has the key 1: the keys of inputs must be texts"),
    ],
)
def test_what_is_no_minibatch(value, message):
    with pytest.raises(UsageError, match=message):
        rows(value)


def boxes(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return {"boxes": torch.rand(count, 4, generator=draw), "labels": torch.randint(0, 9, (count,), generator=draw)}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 4, 2), (1,)], ids=str)
def test_one_dict_per_sample_is_refused(kind, counts):
    """As detectors want their targets: three images with three boxes each look like six columns of three samples."""
    targets = kind(boxes(count, seed) for seed, count in enumerate(counts))
    for function in (rows, transform_nothing, lambda value, name: outline({"y": value}, name)):
        with pytest.raises(UsageError, match=rf"y.* is a {kind.__name__} of dicts.* mix the samples"):
            function(targets, "y")


def transform_nothing(value, name):
    return transform(lambda part: part, value, name)


def test_a_learner_refuses_one_dict_per_sample():
    model = torch.nn.Linear(5, 2)
    learner = hf.ExperienceReplay(
        model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=4, loss=lambda out, y: out.square().mean(1)
    )
    with pytest.raises(UsageError, match="y is a list of dicts"):
        learner.observe(torch.rand(3, 5), [boxes(3, seed) for seed in range(3)])


def test_a_list_that_holds_a_dict_among_others_is_read_as_columns():
    assert rows([torch.ones(2), {"a": torch.ones(2)}]) == 2
