"""The forgetting monitor: right numbers, no disturbance, one warning per drop."""

import json
import math
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.monitor import Reading
from holdfast.report.draw.history import lines


class Answers(nn.Module):
    """A model whose answers a test decides: the share of right ones among samples labelled 0."""

    def __init__(self):
        super().__init__()
        self.share = 1.0

    def forward(self, x):
        right = torch.arange(len(x)) < self.share * len(x)
        return torch.stack([right.float(), 1 - right.float()], dim=1)


def watched(**options):
    """A monitor of one slice of 100 samples, and a function that sets its accuracy in percent and checks."""
    model = Answers()
    monitor = hf.ForgettingMonitor(model, batch_size=100, **options)
    monitor.add("old", torch.zeros(100, 1), torch.zeros(100, dtype=torch.int64))

    def at(percent):
        model.share = percent / 100
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            (reading,) = monitor.check()
        assert all(issubclass(one.category, hf.ForgettingWarning) for one in told)
        return reading, [str(one.message) for one in told]

    return monitor, at


def network(dtype=torch.float32):
    torch.manual_seed(0)
    body = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)]
    return nn.Sequential(*body).to(dtype)


class Frame:
    """As far as the monitor looks at pandas: a table that becomes an array."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return np.asarray(self.values)


@pytest.mark.parametrize("form", [Frame, np.asarray, list])
def test_tables_and_labels_that_are_texts(form):
    model, names = network().eval(), ["elm", "ash", "oak", "fir"]  # the model's outputs, not sorted
    x, y = torch.randn(50, 6), torch.randint(0, 4, (50,))
    expected = hf.ForgettingMonitor(model).add("old", x, y)
    table = (Frame if form is list else form)(x.double().numpy())  # a model of float32 gets float32
    monitor = hf.ForgettingMonitor(model, classes=np.array(names))
    assert monitor.add("old", table, form([names[label] for label in y])) == expected
    assert hf.ForgettingMonitor(model).add("old", table, form(y.numpy())) == expected
    numbered = hf.ForgettingMonitor(model, classes=[30, 10, 20, 40])
    assert numbered.add("old", x, torch.tensor([30, 10, 20, 40])[y]) == expected
    with pytest.raises(hf.UsageError, match=r"the labels 'yew' are not among the classes \['elm', 'ash'"):
        monitor.add("new", table, form(["yew"] * 50))
    with pytest.raises(hf.UsageError, match=r"labels are texts. .* clf.output_classes_"):
        hf.ForgettingMonitor(model).add("old", table, form([names[label] for label in y]))


def test_a_table_of_something_else_than_numbers():
    with pytest.raises(hf.UsageError, match="arrays and DataFrames of numbers"):
        hf.ForgettingMonitor(network()).add("old", Frame([["a", 1.0]]), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_accuracy_and_calibration_are_those_of_torchmetrics(dtype, batch_size):
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    model = network(dtype)
    x, y = torch.randn(50, 6, dtype=dtype), torch.randint(0, 4, (50,))
    reading = hf.ForgettingMonitor(model, batch_size=batch_size).add("task 1", x, y)
    logits = deepcopy(model).eval()(x).detach().double()
    accuracy = multiclass_accuracy(logits, y, num_classes=4, average="micro")
    error = multiclass_calibration_error(logits.softmax(dim=1), y, num_classes=4, n_bins=15)
    # Rows of another batch size may round differently; bfloat16 has three digits.
    near = {"abs": 3.0} if dtype is torch.bfloat16 else {"rel": 1e-4}
    assert reading.score == pytest.approx(100 * float(accuracy), **near)
    assert reading.ece == pytest.approx(100 * float(error), **near)


def test_learning_goes_on_as_if_nothing_had_been_measured():
    def train(every):
        model = network()
        model[0].eval()  # a part that its owner keeps frozen
        learner = hf.ConsistencyReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=20)
        draw = torch.Generator().manual_seed(1)
        monitor = hf.ForgettingMonitor(model, every=every, drop=100)
        monitor.add("old", torch.randn(30, 6, generator=draw), torch.randint(0, 4, (30,), generator=draw))
        torch.manual_seed(2)  # Dropout draws from the global generator
        for _ in range(8):
            learner.observe(torch.randn(5, 6, generator=draw), torch.randint(0, 4, (5,), generator=draw))
            monitor.observe()
        return model, monitor

    (left_alone, _), (measured, monitor) = train(1000), train(1)
    assert len(monitor.history) == 9
    for name, value in left_alone.state_dict().items():
        assert torch.equal(value, measured.state_dict()[name]), name
    assert [module.training for module in measured] == [False, True, True, True, True]


@pytest.mark.parametrize("where", ["model", "view"])
def test_what_works_in_place_leaves_the_slice_alone(where):
    shift = lambda x: x.sub_(0.5)  # noqa: E731
    model = network()
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(30, 6, generator=draw), torch.randint(0, 4, (30,), generator=draw)
    given, expected = x.clone(), hf.evaluate(model, {"old": (x - 0.5, y)})["old"]
    if where == "model":
        model.register_forward_pre_hook(lambda _, args: (shift(*args),))
    monitor = hf.ForgettingMonitor(model, view=shift if where == "view" else None)
    readings = [monitor.add("old", x, y), *monitor.check(), *monitor.check()]
    assert [each.score for each in readings] == [expected] * 3
    assert torch.equal(x, given)


def test_a_drop_is_told_once_and_again_only_after_a_recovery():
    monitor, at = watched(drop=5)
    assert not at(96)[1]
    assert not at(95)[1]  # exactly 5 points is not more than 5
    reading, told = at(90)
    assert reading.dropped
    assert reading.drop == pytest.approx(10)
    assert told == ["'old' is being forgotten: 90.00 at step 0, 10.00 below its best of 100.00."]
    assert not at(60)[1]
    assert at(96)[0].dropped  # within 5 points, but not yet half of the way back
    assert not at(94)[1]
    assert not at(98)[0].dropped
    assert len(at(94)[1]) == 1
    assert [row["dropped"] for row in monitor.rows()] == [False, False, False, True, True, True, True, False, True]


def test_the_best_is_the_best_so_far():
    monitor, at = watched(drop=5)
    monitor.model.share = 0.5
    monitor.add("new", torch.zeros(100, 1), torch.zeros(100, dtype=torch.int64))
    monitor.remove("old")
    assert [at(percent)[0].best for percent in (40, 80, 70)] == [50, 80, 80]


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=30),
    st.integers(1, 30),
)
def test_warnings_follow_the_rule_whatever_the_course(course, drop):
    _, at = watched(drop=drop)
    best, down, expected = 100, False, []
    for percent in course:
        best = max(best, percent)
        now = best - percent > (drop / 2 if down else drop)
        expected.append(now and not down)
        down = now
    assert [bool(at(percent)[1]) for percent in course] == expected


def test_the_callback_comes_first_and_the_history_before_it():
    seen = []
    model = Answers()
    monitor = hf.ForgettingMonitor(model, drop=5, on_drop=lambda reading: seen.append((reading, len(monitor.history))))
    for name in ("a", "b"):
        monitor.add(name, torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64))
    model.share = 0.5
    with pytest.raises(hf.ForgettingWarning, match="'a' is being forgotten"):  # warnings are errors in tests
        monitor.check(step=7)
    assert [(reading.slice, reading.step, count) for reading, count in seen] == [("a", 7, 4), ("b", 7, 4)]


def test_warnings_point_at_the_caller():
    monitor, _ = watched(every=1)
    monitor.model.share = 0.0
    with pytest.warns(hf.ForgettingWarning) as told:
        monitor.observe()
    assert told[0].filename == __file__


def test_it_measures_every_so_many_steps():
    monitor, _ = watched(every=3)
    assert [len(monitor.observe()) for _ in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert [reading.step for reading in monitor.history] == [0, 3, 6]
    assert monitor.check()[0].step == 7
    assert monitor.check(step=20)[0].step == 20
    assert monitor.add("later", torch.zeros(4, 1), LABELS).step == 20


def test_inputs_of_any_structure_and_a_view():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            left, right = x["pair"]
            return self.layer(left + right) + x["shift"]

    model = Two()
    x = {
        "pair": (torch.randint(0, 9, (11, 3), dtype=torch.uint8), torch.randint(0, 9, (11, 3), dtype=torch.uint8)),
        "shift": torch.randn(11, 2),
    }
    y = torch.randint(0, 2, (11,))

    def view(batch):
        return batch | {"pair": tuple(part / 10 for part in batch["pair"])}

    reading = hf.ForgettingMonitor(model, view=view, batch_size=4).add("nested", x, y)
    assert reading.score == pytest.approx(100 * float((model(view(x)).argmax(1) == y).double().mean()))


def test_regression_slices_have_a_score_of_their_own():
    model = nn.Linear(2, 1)
    x, y = torch.randn(20, 2), torch.randn(20, 1)

    def score(outputs, targets):
        return -(outputs - targets).square().mean()

    monitor = hf.ForgettingMonitor(model, batch_size=6)
    reading = monitor.add("sensor", x, y, score=score, drop=0.5)
    assert reading.score == pytest.approx(-(model(x) - y).square().mean().item())
    assert reading.ece is None
    assert set(monitor.values()) == {"sensor/score"}
    with torch.no_grad():
        model.bias += 100
    with pytest.warns(hf.ForgettingWarning, match="'sensor'"):
        monitor.check()


def test_outputs_may_have_structure_where_a_score_reads_them():
    class Heads(nn.Module):
        def forward(self, x):
            return {"mean": x.sum(1), "spread": (x.amax(1), x.amin(1))}

    def score(outputs, y):
        assert [len(outputs["mean"]), *map(len, outputs["spread"])] == [5, 5, 5]
        return -(outputs["mean"] - y).abs().max()

    x = torch.randn(5, 3)
    assert hf.ForgettingMonitor(Heads(), batch_size=2).add("s", x, x.sum(1), score=score).score == 0


def test_a_model_that_diverged_has_dropped():
    model = nn.Linear(2, 2)
    monitor = hf.ForgettingMonitor(model, drop=5)
    x = torch.randn(8, 2)
    monitor.add("old", x, model(x).argmax(1))
    monitor.add("scored", x, x, score=lambda outputs, _: outputs.sum(), drop=1e9)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    with pytest.warns(hf.ForgettingWarning) as told:
        old, scored = monitor.check()
    assert len(told) == 2
    assert (old.score, old.dropped, scored.dropped) == (0, True, True)
    assert math.isnan(old.ece)
    assert [(row["score"], row["ece"]) for row in monitor.rows()[-2:]] == [(0, None), (None, None)]
    json.dumps(monitor.to_dict(), allow_nan=False)


def test_a_history_continues_where_it_was():
    monitor, at = watched(drop=5)
    at(80)
    monitor.steps = 12
    kept = json.loads(json.dumps(monitor.to_dict()))
    later, at_later = watched(drop=5)
    later.load_dict(kept)
    assert later.history == monitor.history
    assert later.steps == 12
    assert at_later(80) == (Reading("old", 12, 80, 100, at_later(80)[0].ece, True), [])  # told before


@pytest.mark.parametrize(
    "damage", [{"steps": math.inf}, {"step": "two"}, {"score": "high"}, {"best": []}, {"ece": {}}, {"slice": ...}]
)
def test_a_damaged_history_is_refused_and_changes_nothing(damage):
    """Some were taken, and ended the first measurement that followed."""
    row = {"slice": "a", "step": 3, "score": 50.0, "best": None, "ece": None, "dropped": False}
    values = {"steps": 7, "history": [{**row, **damage}]} | ({} if "steps" not in damage else damage)
    if damage == {"slice": ...}:
        del values["history"][0]["slice"]
    monitor = hf.ForgettingMonitor(nn.Linear(2, 2))
    monitor.add("a", torch.zeros(4, 2), torch.zeros(4).long())
    before = monitor.to_dict()
    with pytest.raises(hf.UsageError, match="not the history of a monitor"):
        monitor.load_dict(values)
    assert monitor.to_dict() == before


def test_a_history_goes_into_a_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    learner = hf.ExperienceReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=4)
    monitor = hf.ForgettingMonitor(model)
    monitor.add("old", torch.randn(8, 2), torch.randint(0, 2, (8,)))
    learner.save(tmp_path / "here", {"monitor": monitor.to_dict()})
    assert learner.load(tmp_path / "here")["monitor"] == monitor.to_dict()


def test_the_table_says_it_at_a_glance():
    monitor, at = watched(drop=5)
    at(80)
    head, row = monitor.table().splitlines()
    assert head.split() == ["slice", "step", "score", "best", "drop", "ECE"]
    assert row.split() == ["old", "0", "80.00", "100.00", "20.00", f"{monitor.history[-1].ece:.2f}", "dropped"]


def test_the_figure_has_a_line_per_slice_and_a_ring_per_drop(tmp_path):
    monitor, _ = watched(drop=5)
    monitor.add("other", torch.zeros(10, 1), torch.ones(10, dtype=torch.int64))
    monitor.model.share = 0.7
    with pytest.warns(hf.ForgettingWarning, match="old"):
        monitor.check(step=10)
    monitor.check(step=20)
    assert lines(monitor.rows()) == {
        "old": ([0, 10, 20], [100, 70, 70], [False, True, False]),
        "other": ([0, 10, 20], [0, 30, 30], [False, False, False]),
    }
    figure = monitor.figure(title="two slices")
    (panel,) = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}
    assert drawn == {"old": [100, 70, 70], "other": [0, 30, 30]}
    (rings,) = panel.collections
    assert rings.get_offsets().tolist() == [[10, 70]]
    figure.savefig(tmp_path / "figure.png")
    hf.ForgettingMonitor(Answers()).figure().savefig(tmp_path / "empty.png")


LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (torch.zeros(4, 2), LABELS[:3], r"same number of rows, at least one, not \[3, 4\]"),
        (torch.zeros(0, 2), LABELS[:0], r"at least one, not \[0\]"),
        ([1.0, 2.0], LABELS, "must be tensors"),
        ({"a": torch.zeros(4, 2), "b": torch.zeros(5)}, LABELS, r"not \[4, 5\]"),
        (torch.zeros(4, 2), LABELS + 7, "labels must lie in 0..2"),
        (torch.zeros(4, 2), LABELS.float(), "class indices"),
        (torch.zeros(4, 2), torch.zeros(4, 5), r"one label per sample.*score="),
        (torch.zeros(4, 2), {"a": LABELS}, r"one label per sample.*score="),
        (torch.tensor(1.0), LABELS, "one row per sample"),
    ],
)
def test_a_slice_that_cannot_be_measured_is_refused_and_not_kept(x, y, says):
    monitor = hf.ForgettingMonitor(nn.Linear(2, 3))
    with pytest.raises(hf.UsageError, match=says):
        monitor.add("bad", x, y)
    assert monitor.slices == []
    assert monitor.history == []


def test_outputs_that_are_no_logits_ask_for_a_score():
    with pytest.raises(hf.UsageError, match=r"the model gives \(4, 1\).*score="):
        hf.ForgettingMonitor(nn.Linear(2, 1)).add("bad", torch.zeros(4, 2), LABELS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop": 0}, "drop must be"),
        ({"drop": math.nan}, "drop must be"),
        ({"every": 0}, "every must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"bins": 0}, "bins must be at least 1"),
    ],
)
def test_settings_are_checked(options, says):
    with pytest.raises(hf.UsageError, match=says):
        hf.ForgettingMonitor(nn.Linear(2, 2), **options)


def test_a_learner_is_no_model():
    model = nn.Linear(2, 2)
    learner = hf.ExperienceReplay(model, torch.optim.SGD(model.parameters(), lr=0.1), buffer_size=3)
    with pytest.raises(hf.UsageError, match=r"not a ExperienceReplay. Of a learner, give learner.evaluated\(\)"):
        hf.ForgettingMonitor(learner)
    hf.ForgettingMonitor(learner.evaluated())


def test_names_are_checked():
    monitor, _ = watched()
    with pytest.raises(hf.UsageError, match="watched already"):
        monitor.add("old", torch.zeros(4, 1), LABELS)
    with pytest.raises(hf.UsageError, match="no slice 'new' is watched; there are: old"):
        monitor.remove("new")
    with pytest.raises(hf.UsageError, match="not the history of a monitor"):
        monitor.load_dict({"steps": 3})


# --- drift -----------------------------------------------------------------------------------------------------------


def losses(seed, count, mean=0.3, deviation=0.1):
    return (mean + deviation * torch.randn(count, generator=torch.Generator().manual_seed(seed))).tolist()


def test_no_alarm_while_losses_stay_or_fall():
    for seed in range(20):
        drift = hf.DriftMonitor(lambda: pytest.fail("no drift"))
        falling = [loss + 2 * 0.98**step for step, loss in enumerate(losses(seed, 1000))]
        assert not any(map(drift.observe, falling))
        assert drift.alarms == []


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_an_alarm_soon_after_losses_rose_whatever_their_unit(scale):
    for seed in range(20):
        heard = []
        drift = hf.DriftMonitor(lambda heard=heard: heard.append(True))
        for loss in losses(seed, 200) + losses(seed + 100, 100, mean=1.0):
            drift.observe(scale * loss)
        assert len(heard) == len(drift.alarms) == 1
        assert 200 < drift.alarms[0] <= 210


def test_outliers_are_no_alarm():
    drift = hf.DriftMonitor()
    for step, loss in enumerate(losses(0, 500)):
        assert not drift.observe(torch.tensor(1000.0 if step % 40 == 30 else loss))


def test_constant_losses_are_no_alarm():
    drift = hf.DriftMonitor()
    assert not any(drift.observe(0.5) for _ in range(200))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_count_as_large_ones(broken):
    """One is an outlier, a dozen are an alarm; those at the beginning are left out, as nothing is known yet."""
    drift = hf.DriftMonitor()
    for step, loss in enumerate(losses(0, 200)):
        assert not drift.observe(broken if step in (0, 20, 100) else loss)
    assert [drift.observe(broken) for _ in range(12)].count(True) == 1
    for loss in losses(1, 100) + losses(2, 20, mean=1.0):
        drift.observe(loss)
    assert len(drift.alarms) == 2


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": float("nan")}, {"memory": 1}])
def test_drift_settings_that_make_no_sense(options):
    with pytest.raises(hf.UsageError, match="threshold"):
        hf.DriftMonitor(**options)


def test_a_learner_whose_buffer_is_emptied_when_the_rule_changes_learns_the_new_one():
    found = {}
    for emptied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        learner = hf.ConsistencyReplay(model, optimizer, buffer_size=300)
        drift = hf.DriftMonitor(learner.forget_all if emptied else None)
        for step in range(200):
            x = torch.randn(32, 6)
            drift.observe(learner.observe(x, ((x[:, 0] > 0) ^ (step >= 100)).long()).current)
        x = torch.randn(1000, 6)
        found[emptied] = float((model(x).argmax(1) == (x[:, 0] < 0)).double().mean())
    assert found[True] > 0.9 > found[False] + 0.05
