"""States that are damaged, forged or of something else: one sentence each, and nothing changes."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.buffer.layout import FIELDS, FOLDER_FIELDS
from holdfast.rng import generator

NONSENSE = [
    None,
    True,
    -1,
    0,
    3,
    2**70,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    b"x",
    [],
    ["x"],
    [["x"]],
    [None] * 4,
    {},
    {"x": "x"},
    {"x": "x", "y": "x"},
    {"x": {"a": "nowhere"}, "y": "y"},
    {"x": 3, "y": "y"},
    {"x": [], "y": "y"},
    (),
    torch.tensor(5),
    torch.tensor(-5),
    torch.tensor(math.nan),
    torch.zeros(5),
    torch.zeros(0, dtype=torch.int64),
    torch.arange(5),
    torch.arange(4) + 100,
    torch.arange(4) - 2,
    torch.zeros(4, dtype=torch.int64),
    torch.zeros(16, dtype=torch.uint8),
    torch.zeros(5056, dtype=torch.uint8),
    torch.zeros(4, 4, dtype=torch.int32),
    torch.zeros(2, 3, dtype=torch.int32),
    torch.eye(4).to_sparse(),
    torch.zeros(4, device="meta"),
    [torch.zeros(4)] * 4,
    [torch.zeros(())] * 4,
    [torch.zeros(4, 0), torch.zeros(4, 1), torch.zeros(4), torch.zeros(4)],
    [torch.zeros(4, device="meta")] * 4,
    [torch.zeros(3, 2), torch.zeros(4), torch.zeros(4), torch.zeros(4, 3)],
]


def filled(storage, seed=0, count=4):
    buffer = hf.Reservoir(4, generator=generator(seed, "buffer"), storage=storage)
    ids = torch.arange(count)
    buffer.add({"a": torch.full((count, 2), 1.0 + seed), "b": ids}, ids + seed, torch.ones(count, 3))
    return buffer


def snapshot(buffer):
    return repr(buffer.state_dict()), repr(buffer.contents()), buffer.stored


def attempt(buffer, state):
    """Load; a refusal must be a sentence and leave the buffer as it was, else it must work."""
    before = snapshot(buffer)
    try:
        buffer.load_state_dict(state)
    except hf.HoldfastError:
        assert snapshot(buffer) == before
        return False
    if buffer.stored:
        drawn = buffer.sample(2)
        buffer.add(drawn.x, drawn.y, drawn.logits)
    buffer.state_dict()
    return True


@pytest.mark.parametrize("place", ["memory", "folder"])
@pytest.mark.parametrize("key", [*FIELDS, *FOLDER_FIELDS])
def test_a_field_of_nonsense_or_none(tmp_path, place, key):
    good = filled(tmp_path / "good" if place == "folder" else "device")
    state = copy.deepcopy(good.state_dict())
    if key not in state:
        pytest.skip("a state in memory has no such field")
    own = good if place == "folder" else filled("device", seed=1)
    accepted = [value for value in NONSENSE if attempt(own, {**state, key: value})]
    assert accepted == (["", "x"] if key == "folder" else [])
    attempt(own, {name: value for name, value in state.items() if name != key})
    assert attempt(own, state)


@pytest.mark.parametrize("state", NONSENSE, ids=lambda value: type(value).__name__)
def test_no_state_at_all(state):
    with pytest.raises(hf.UsageError, match=r"not the saved state of a buffer: .*intact copy"):
        filled("device").load_state_dict(state)


def test_fields_that_contradict_each_other(tmp_path):
    state = copy.deepcopy(filled(tmp_path / "one").state_dict())
    again = filled(tmp_path / "other")
    plain = copy.deepcopy(filled("device").state_dict())
    for changes in ({"offered": 5}, {"offered": 3, "seen": torch.tensor(3)}, {"seen": torch.tensor(9)}):
        for buffer, good in ((filled("device", seed=1), plain), (again, state)):
            with pytest.raises(hf.UsageError, match="contradicts itself"):
                buffer.load_state_dict({**good, **changes})
    with pytest.raises(hf.UsageError, match="contradicts itself"):
        filled("device").load_state_dict(
            {**plain, "offered": -1, "seen": torch.tensor(-1), "columns": []} | {"names": [], "form": {}}
        )
    for changes in (
        {"names": [*plain["names"][:3], plain["names"][0]]},
        {"names": [[]] * 4},
        {"names": plain["names"][:3]},
        {"form": {**plain["form"], "x": {"a": "x['a']", "b": "x['a']"}}},
        {"form": {**plain["form"], "x": {"b": "x['a']", "a": "x['b']"}}},
    ):
        with pytest.raises(hf.UsageError, match="'names' and 'form' do not say"):
            filled("device").load_state_dict({**plain, **changes})


def test_two_slots_in_one_row_of_a_folder(tmp_path):
    buffer = filled(tmp_path / "buffer")
    state = copy.deepcopy(buffer.state_dict())
    twice = {key: state[key].clone() for key in ("rows", "stamps", "sums")}
    for value in twice.values():
        value[..., 1] = value[..., 0]
    with pytest.raises(hf.StorageError, match="does not hold the samples of this state"):
        buffer.load_state_dict({**state, **twice})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_several_fields_of_nonsense(data):
    state = copy.deepcopy(filled("device").state_dict())
    for key in data.draw(st.lists(st.sampled_from([*FIELDS, *FOLDER_FIELDS]), min_size=1, max_size=4)):
        state[key] = data.draw(st.sampled_from(NONSENSE))
    attempt(filled("device", seed=1), state)


def test_a_forged_state_in_a_folder_is_refused_when_it_is_opened(tmp_path):
    from holdfast import checkpoint

    buffer = filled(tmp_path / "buffer")
    buffer.commit()
    buffer.close()
    path = tmp_path / "buffer" / "state.safetensors"
    good = checkpoint.read(path, "buffer").state
    for key in good:
        checkpoint.write(path, "buffer", {name: value for name, value in good.items() if name != key})
        with pytest.raises(hf.HoldfastError, match=r"not the saved state|this one in memory|contradicts|does not"):
            hf.Reservoir(4, storage=tmp_path / "buffer")
