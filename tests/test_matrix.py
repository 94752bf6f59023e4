"""The accuracy matrix of one's own stream, against the metrics of runs and against numbers worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import metrics

NAMES = ["a", "b", "c", "d"]


def filled(values, learned=NAMES):
    made = hf.AccuracyMatrix()
    for name, row in zip(learned, values, strict=True):
        known = {slice: value for slice, value in zip(NAMES, row, strict=True) if not math.isnan(value)}
        made.add(known, learned=name)
    return made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("triangle", [True, False])
def test_a_square_matrix_has_the_numbers_of_a_run(seed, triangle):
    """With the slices still to come, as a run measures them, and without."""
    values = 100 * torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if triangle:
        values[~torch.ones(4, 4, dtype=torch.bool).tril()] = torch.nan
    made = filled(values.tolist())
    assert torch.equal(made.tensor.nan_to_num(-1), values.nan_to_num(-1))
    assert made.accuracy == pytest.approx(metrics.accuracy(values))
    assert made.forgetting == pytest.approx(metrics.forgetting(values))
    assert made.backward_transfer == pytest.approx(metrics.backward_transfer(values))


def test_a_stream_without_boundaries():
    made = filled([[90, 50, math.nan, math.nan], [70, 80, math.nan, math.nan], [60, 75, 30, math.nan]], [None] * 3)
    assert made.slices == ["a", "b", "c"]
    assert made.accuracy == 55
    assert made.forgetting == (30 + 5) / 2, "c was never measured before, so it cannot have dropped"
    assert made.backward_transfer == (-30 + 25) / 2


def test_slices_that_are_learned_again_or_not_measured_any_more():
    made = hf.AccuracyMatrix([("a", {"a": 90.0}), ("b", {"a": 50.0, "b": 80.0}), ("a", {"a": 95.0, "b": 60.0})])
    assert (made.forgetting, made.backward_transfer) == (20, -20)
    made.add({"b": 70.0}, learned="b")
    assert math.isnan(made.forgetting), "of a, nothing is known now"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("learned", [NAMES, [None] * 4], ids=["tasks", "no tasks"])
def test_nan_is_an_accuracy_that_was_not_measured(seed, learned):
    """Whether slices that were not tested yet are left out or NaN, all numbers are the same."""
    random = torch.Generator().manual_seed(seed)
    values = 100 * torch.rand(4, 4, dtype=torch.float64, generator=random)
    untested = torch.rand(4, 4, generator=random) < 0.4
    values[untested & ~torch.eye(4, dtype=torch.bool)] = torch.nan
    left_out = filled(values.tolist(), learned)
    given = hf.AccuracyMatrix(
        [(name, dict(zip(NAMES, row, strict=True))) for name, row in zip(learned, values.tolist(), strict=True)]
    )
    assert given.slices == NAMES
    assert torch.equal(given.tensor.nan_to_num(-1), values.nan_to_num(-1))
    for number in ("accuracy", "forgetting", "backward_transfer"):
        assert getattr(given, number) == pytest.approx(getattr(left_out, number), nan_ok=True), number


def test_a_task_that_was_nan_before_it_was_learned():
    made = hf.AccuracyMatrix([("a", {"a": 90.0, "b": math.nan}), ("b", {"a": 70.0, "b": 80.0})])
    assert (made.accuracy, made.forgetting, made.backward_transfer) == (75, 20, -20)
    made.add({"a": 60.0, "b": 50.0, "c": math.nan})
    assert (made.accuracy, made.forgetting, made.backward_transfer) == (55, 30, -30)
    made.add({"a": math.nan, "b": 50.0})
    assert (made.accuracy, made.forgetting) == (50, 30), "of a, nothing is known now"


def test_nothing_is_defined_at_the_beginning():
    made = hf.AccuracyMatrix()
    assert math.isnan(made.accuracy)
    assert made.tensor.shape == (0, 0)
    made.add({"a": 90.0}, learned="a")
    assert made.accuracy == 90
    assert math.isnan(made.forgetting)
    assert math.isnan(made.backward_transfer)


def test_what_it_shows():
    made = hf.AccuracyMatrix([("March", {"March": 98.0}), (None, {"March": 7.25, "April": 100.0})])
    assert str(made) == "after  March  April\nMarch   98.0      -\nrow 2    7.2  100.0"
    assert repr(made) == "AccuracyMatrix(2 rows, 2 slices)"
    with pytest.raises(hf.UsageError, match="does not have the slice 'May' that was learned; it has \\['April'\\]"):
        made.add({"April": 1.0}, learned="May")


def test_accuracies_are_those_of_a_loop_and_the_model_stays_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).train()
    slices = {name: (torch.randint(0, 256, (n, 5)), torch.randint(0, 3, (n,))) for name, n in (("a", 7), ("b", 30))}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = hf.evaluate(model, slices, view=lambda x: x.float() / 255, batch_size=4)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    for name, (x, y) in slices.items():
        right = sum(int(model(one[None].float() / 255).argmax()) == int(label) for one, label in zip(x, y, strict=True))
        assert found[name] == pytest.approx(100 * right / len(y))


def test_labels_may_be_texts():
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    x = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    slices = {"a": (torch.tensor(x), ["no", "yes", "no"])}
    assert hf.evaluate(model, slices, classes=["no", "yes"])["a"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8])
@pytest.mark.parametrize("array", [np.asarray, torch.from_numpy])
def test_labels_of_any_whole_type(kind, array):
    x, y = np.eye(3, dtype=np.float32), np.arange(3).astype(kind)
    assert hf.evaluate(nn.Identity(), {"a": (torch.from_numpy(x), array(y))})["a"] == 100.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_arrays_of_floats_become_what_the_model_computes_with(dtype):
    model = nn.Linear(2, 2).to(dtype)
    slices = {"a": (np.eye(2), np.arange(2)), "b": ({"x": np.eye(2)}, np.arange(2))}
    found = hf.evaluate(model, slices, view=lambda x: x["x"] if isinstance(x, dict) else x)
    assert found["a"] == found["b"]


def test_it_goes_through_a_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    learner = hf.ExperienceReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=4)
    made = hf.AccuracyMatrix([("a", {"a": 90.0}), (None, {"a": 50.0, "b": 80.0})])
    learner.save(tmp_path / "state", {"rows": made.rows})
    again = hf.AccuracyMatrix(learner.load(tmp_path / "state")["rows"])
    assert again.rows == made.rows


class PreTrainedModel(nn.Module):
    """A model is known to be one of transformers by the name of this class."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, values=None, scale=None):
        return SimpleNamespace(logits=self.layer(values * scale))


def test_a_model_that_takes_its_inputs_by_name():
    model = PreTrainedModel()
    values, scale = torch.randn(7, 3), torch.rand(7, 1)
    labels = model.layer(values * scale).argmax(1)
    labels[0] = 1 - labels[0]
    found = hf.evaluate(model, {"all": ({"values": values, "scale": scale}, labels)}, batch_size=3)
    assert found["all"] == pytest.approx(100 * 6 / 7)
