"""Replay as a scikit-learn estimator: scikit-learn's own checks, and what they do not ask."""

import json
import pickle
import sys
from importlib import import_module

import joblib
import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import holdfast as hf
from holdfast.estimators import ReplayClassifier, ReplayRegressor

KINDS = {
    "consistency": {},
    "replay": {"regularizer": None},
    "alone": {"buffer_size": None},
}


def not_applicable(estimator):
    """The checks that are expected to fail, with the reason."""
    minibatches = "a sample that comes twice comes in two minibatches, one of weight 2 in one"
    failing = {"check_sample_weight_equivalence_on_dense_data": minibatches}
    if isinstance(estimator, ReplayRegressor):
        failing["check_regressor_multioutput"] = "wants float64, but networks compute in float32 and say so"
    return failing


@parametrize_with_checks(
    [
        ReplayClassifier(epochs=5),
        ReplayClassifier(head="classifier", epochs=5),
        ReplayRegressor(epochs=10),
    ],
    expected_failed_checks=not_applicable,
)
def test_scikit_learn_accepts_it(estimator, check):
    # pytest shows those that need pandas or an array API as skipped.
    check(estimator)


def rows(count=60, classes=3, seed=0):
    """Points around one centre per class, with names as labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    return rng.normal(size=(count, 4)) + 4 * np.eye(4)[y], np.array(["ash", "beech", "cedar", "dogwood"])[y]


def weights(estimator):
    return [value.clone() for value in estimator.module_.state_dict().values()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_it_is_the_learner_and_nothing_else(settings):
    """The same steps done by hand with the same generators give the same bits."""
    x, y = rows(40)
    made = ReplayClassifier(batch_size=20, lr=0.01, random_state=5, **settings)
    made.partial_fit(x, y, classes=["ash", "beech", "cedar"])

    seed = int(np.random.RandomState(5).randint(np.iinfo(np.int32).max))
    with hf.rng.seeded_globally(seed, "init"):
        model = hf.MODELS["mlp"]((4,), 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if settings.get("buffer_size", 500) is None:
        learner = hf.LEARNERS["sgd"](model, optimizer)
    elif settings:
        learner = hf.ExperienceReplay(model, optimizer, buffer_size=500, seed=seed)
    else:
        learner = hf.ConsistencyReplay(model, optimizer, buffer_size=500, regularizer="mse", beta=0.5, seed=seed)
    order = torch.randperm(40, generator=hf.rng.generator(seed, "order"))
    numbers = torch.tensor([["ash", "beech", "cedar"].index(label) for label in y])
    for part in order.split(20):
        learner.observe(torch.tensor(x, dtype=torch.float32)[part], numbers[part])
    assert equal(weights(made), list(model.state_dict().values()))
    assert made.learner_.buffer is None or made.learner_.buffer.stored == 40


def test_labels_and_probabilities_go_together():
    x, y = rows()
    made = ReplayClassifier(random_state=0).fit(x, y)
    assert made.classes_.tolist() == ["ash", "beech", "cedar"]
    assert made.score(x, y) > 0.95
    probabilities = made.predict_proba(x)
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert (made.classes_[probabilities.argmax(axis=1)] == made.predict(x)).all()
    with torch.no_grad():
        by_hand = torch.softmax(made.module_(torch.tensor(x, dtype=torch.float32)), dim=1)
    assert np.allclose(probabilities, by_hand, atol=1e-6)


def test_one_random_state_gives_one_result():
    x, y = rows()
    first, second, other = (ReplayClassifier(random_state=seed, epochs=2).fit(x, y) for seed in (1, 1, 2))
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(other))
    before = torch.get_rng_state()
    ReplayClassifier(random_state=1, epochs=1).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())  # the caller's own randomness is left alone


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_pickled_estimator_learns_on_as_if_it_had_not_been(settings):
    x, y = rows(70)
    made = ReplayClassifier(random_state=3, batch_size=16, **settings).partial_fit(x, y, classes=np.unique(y))
    copied = pickle.loads(pickle.dumps(made))
    for one in (made, copied):
        one.partial_fit(x[::-1], y[::-1])
    assert equal(weights(made), weights(copied))
    assert (made.predict_proba(x) == copied.predict_proba(x)).all()


class Dropped(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Linear(*shape, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes))


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_dropout_follows_the_random_state_through_a_pickle(settings):
    x, y = rows(70)

    def made(copied):
        torch.rand(1)  # PyTorch's own generator is somewhere else each time
        before = torch.get_rng_state()
        one = ReplayClassifier(Dropped, random_state=3, epochs=2, **settings).fit(x, y)
        one = pickle.loads(pickle.dumps(one)) if copied else one
        one.partial_fit(x[::-1], y[::-1])
        assert torch.equal(torch.get_rng_state(), before)
        return weights(one)

    assert equal(made(copied=False), made(copied=False))
    assert equal(made(copied=False), made(copied=True))


def test_fit_is_followed_by_the_stream():
    x, y = rows(80)
    made = ReplayClassifier(random_state=0, epochs=3).fit(x[:40], y[:40])
    assert made.partial_fit(x[40:], y[40:]) is made
    assert made.learner_.buffer.offered == 3 * 40 + 40
    assert made.fit(x[:10], y[:10]).learner_.buffer.offered == 30  # fit starts anew


def test_settings_travel_through_clone_grid_and_pipeline():
    x, y = rows()
    settings = {"buffer_size": 7, "regularizer": "linf", "beta": 0.25, "optimizer": torch.optim.SGD}
    copied = clone(ReplayClassifier(**settings))
    assert {name: copied.get_params()[name] for name in settings} == settings
    search = GridSearchCV(
        make_pipeline(StandardScaler(), ReplayClassifier(epochs=3, random_state=0)),
        {"replayclassifier__lr": [1e-6, 0.01]},
        cv=2,
    ).fit(x, y)
    assert search.best_params_ == {"replayclassifier__lr": 0.01}
    assert search.score(x, y) > 0.9


def test_a_network_of_ones_own_sees_the_shape_of_the_samples():
    def network(shape, classes):
        assert shape == (1, 6, 6)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, classes)]
        return nn.Sequential(*layers)

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 33)  # one more than two minibatches of 16: BatchNorm cannot learn from one sample
    x = rng.normal(size=(33, 1, 6, 6)) + y[:, None, None, None]
    made = ReplayClassifier(network, batch_size=16, random_state=0).fit(x, y)
    assert made.score(x, y) > 0.9
    before = made.predict_proba(x)
    assert (made.predict_proba(x) == before).all()  # asking does not move the running statistics
    assert made.module_.training


def test_labels_that_were_not_announced_are_refused_before_anything_is_learned():
    x, y = rows()
    made = ReplayClassifier()
    with pytest.raises(hf.UsageError, match="classes must be given on the first call"):
        made.partial_fit(x, y)
    with pytest.raises(hf.UsageError, match=r"not among the classes \['ash', 'beech'\]: \['cedar'\]"):
        made.partial_fit(x, y, classes=["ash", "beech"])
    assert not hasattr(made, "learner_")
    made.partial_fit(x, y, classes=["ash", "beech", "cedar"])
    with pytest.raises(hf.UsageError, match="not those of the first call"):
        made.partial_fit(x, y, classes=["ash", "beech", "cedar", "dogwood"])
    before = weights(made)
    with pytest.raises(hf.UsageError, match="dogwood"):
        made.partial_fit(*rows(classes=4))
    assert equal(before, weights(made))


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_head_that_may_grow_takes_labels_as_they_come(settings):
    """In any order of arrival, `classes_` is sorted and probabilities go with it; old classes keep their outputs."""
    made = ReplayClassifier(head="classifier", random_state=0, lr=0.01, **settings)
    x, y = rows(400, classes=4)
    arrived = []
    for name in ("cedar", "ash", "dogwood", "beech"):
        for portion in np.array_split(np.flatnonzero(y == name), 3):
            made.partial_fit(x[portion], y[portion])
        arrived.append(name)
        assert made.classes_.tolist() == sorted(arrived)
        assert made.module_.classifier.out_features == len(arrived)
        # The classes of this moment by hand: output k belongs to the k-th label that arrived.
        outputs = made.module_(torch.tensor(x, dtype=torch.float32)).softmax(dim=1).detach().numpy()
        by_hand = outputs[:, [arrived.index(each) for each in sorted(arrived)]]
        np.testing.assert_allclose(made.predict_proba(x), by_hand, rtol=1e-5)
    if "buffer_size" not in settings:
        assert made.score(x, y) > 0.9


def test_classes_may_be_announced_to_a_head_that_may_grow():
    x, y = rows(classes=2)
    made = ReplayClassifier(head="classifier", random_state=0).partial_fit(x, y, classes=["beech", "yew"])
    assert made.classes_.tolist() == ["ash", "beech", "yew"]
    assert made.partial_fit(x, y, classes=["oak"]).classes_.tolist() == ["ash", "beech", "oak", "yew"]
    assert made.predict_proba(x).shape == (len(x), 4)
    with pytest.raises(hf.UsageError, match="labels are texts, these are numbers: give all"):
        made.partial_fit(x, np.ones(len(x), dtype=int))
    assert len(made.classes_) == 4


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_grown_estimator_is_pickled(settings):
    x, y = rows(120, classes=4)
    made = ReplayClassifier(head="classifier", random_state=3, **settings)
    made.partial_fit(x[y == "cedar"], y[y == "cedar"]).partial_fit(x[:60], y[:60])
    copied = pickle.loads(pickle.dumps(made))
    for one in (made, copied):
        one.partial_fit(x[60:], y[60:])
    assert equal(weights(made), weights(copied))
    assert (made.predict(x) == copied.predict(x)).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"head": "clasifier"}, "did you mean 'classifier'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"model": "mlpp"}, "did you mean 'mlp'"),
        ({"regularizer": "msee"}, "did you mean 'mse'"),
        ({"buffer_size": 0}, "buffer size must be at least 1"),
    ],
)
def test_settings_are_checked_when_used(settings, says):
    with pytest.raises(hf.UsageError, match=says):
        ReplayClassifier(**settings).fit(*rows())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adam"}, "optimizer must be a function or a class, not 'adam'"),
        ({"loss": "mse"}, "loss must be a function or a class, not 'mse'"),
        ({"class_weight": [1, 2, 3]}, r"class_weight must be a dict of weights by label, .* not \[1, 2, 3\]"),
    ],
)
def test_settings_of_another_kind_are_told(settings, says):
    with pytest.raises(hf.UsageError, match=says):
        ReplayClassifier(**settings).fit(*rows())


@pytest.mark.parametrize("outputs", [(1,), (4,), ()], ids=["one", "more", "none"])
def test_a_network_must_have_an_output_for_each_class_or_target(outputs):
    """A regressor's were broadcast, and it learned nothing; a classifier's left out probability."""

    def make(shape, count):
        last = nn.Linear(*shape, *outputs) if outputs else nn.Sequential(nn.Linear(*shape, 1), nn.Flatten(0))
        return nn.Sequential(last)

    x, y = rows()
    targets = np.stack([x[:, 0], x[:, 1]], axis=1)
    for kind, wanted, what in ((ReplayClassifier, y, "class"), (ReplayRegressor, targets, "target")):
        made = kind(make, epochs=1)
        with pytest.raises(hf.UsageError, match=f"one for each {what}. `model` is called"):
            made.fit(x, wanted)
        with pytest.raises(NotFittedError):
            made.predict(x)


def test_rate_and_weights_may_change_while_it_learns(tmp_path):
    """The old rate went on, and a file had a rate that was not in force."""
    x, y = rows()
    made = ReplayClassifier(random_state=0, epochs=1).fit(x, y)
    made.set_params(lr=0.25, alpha=2.0, beta=3.0)
    made.partial_fit(x, y)
    for one in (made, pickle.loads(pickle.dumps(made.set_params(lr=0.5, beta=4)))):
        assert [group["lr"] for group in one.learner_.optimizer.param_groups] == [0.5]
        assert (one.learner_.alpha, one.learner_.beta) == (2.0, 4)
    made.save(tmp_path / "saved")
    loaded = ReplayClassifier.load(tmp_path / "saved", lr=0.125)
    assert [group["lr"] for group in loaded.learner_.optimizer.param_groups] == [0.125]
    with pytest.raises(hf.UsageError, match="lr must be a finite number"):
        made.set_params(lr=-1.0).partial_fit(x, y)


def test_other_settings_may_not(tmp_path):
    """`partial_fit` ignored them, and what was saved or pickled with them could not be loaded."""
    x, y = rows()
    made = ReplayClassifier(random_state=0, epochs=1).fit(x, y)
    made.set_params(buffer_size=7, clip=1.0, epochs=2, batch_size=8)
    for use in (lambda: made.partial_fit(x, y), lambda: made.save(tmp_path / "saved"), lambda: pickle.dumps(made)):
        with pytest.raises(hf.UsageError, match="buffer_size, clip cannot change after the first samples"):
            use()
    made.set_params(buffer_size=500, clip=None).partial_fit(x, y).save(tmp_path / "saved")
    assert ReplayClassifier.load(tmp_path / "saved").batch_size == 8
    assert made.set_params(buffer_size=7).fit(x, y).learner_.buffer.capacity == 7


def test_a_setting_that_does_not_exist_is_told_at_loading(tmp_path):
    ReplayClassifier(epochs=1).fit(*rows()).save(tmp_path / "saved")
    with pytest.raises(hf.UsageError, match="unknown setting of ReplayClassifier 'alfa': did you mean 'alpha'"):
        ReplayClassifier.load(tmp_path / "saved", alfa=1.0)


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "holdfast.estimators")
    with pytest.raises(hf.HoldfastError, match=r"pip install 'holdfast\[sklearn\]'"):
        import_module("holdfast.estimators")


# --- saved, loaded, exported ---


def grown(**settings):
    """A classifier whose classes did not arrive in the order of their names, with the samples of all of them."""
    x, y = rows(400, classes=4)
    made = ReplayClassifier(head="classifier", random_state=0, lr=0.01, **settings)
    for name in ("cedar", "ash", "dogwood", "beech"):
        for portion in np.array_split(np.flatnonzero(y == name), 3):
            made.partial_fit(x[portion], y[portion])
    return made, x, y


def test_the_order_of_the_outputs_is_public():
    made, x, _ = grown()
    assert made.output_classes_.tolist() == ["cedar", "ash", "dogwood", "beech"]
    with torch.no_grad():
        largest = made.module_(torch.tensor(x, dtype=torch.float32)).argmax(dim=1)
    assert (made.output_classes_[largest] == made.predict(x)).all()


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_saved_classifier_learns_on_as_if_it_had_not_been(settings, tmp_path):
    made, x, y = grown(**settings)
    made.save(tmp_path / "trees")
    loaded = ReplayClassifier.load(tmp_path / "trees")
    assert loaded.get_params() == made.get_params()
    assert loaded.classes_.tolist() == ["ash", "beech", "cedar", "dogwood"]
    for one in (made, loaded):
        one.partial_fit(x[::-1], y[::-1])
    assert equal(weights(made), weights(loaded))
    assert (made.predict_proba(x) == loaded.predict_proba(x)).all()


def test_a_saved_regressor_learns_on_as_if_it_had_not_been(tmp_path):
    x, y = course(60, -1, 1)
    made = ReplayRegressor(random_state=0, epochs=2).fit(x, 1000 * y)
    made.save(tmp_path / "course")
    loaded = ReplayRegressor.load(tmp_path / "course")
    for one in (made, loaded):
        one.partial_fit(x, 2000 * y)
    assert equal(weights(made), weights(loaded))
    assert (made.predict(x) == loaded.predict(x)).all()
    with pytest.raises(hf.CheckpointError, match="of a ReplayRegressor, not of a ReplayClassifier"):
        ReplayClassifier.load(tmp_path / "course")


@pytest.mark.parametrize("labels", [[3, 1, 2], [True, False], [2.0, 1.0], ["b", "a"]])
def test_labels_come_back_with_their_type(labels, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.resize(labels, 20)
    made = ReplayClassifier(epochs=1, random_state=np.int64(3)).fit(x, y)
    made.save(tmp_path / "saved")
    loaded = ReplayClassifier.load(tmp_path / "saved")
    assert loaded.classes_.dtype == made.classes_.dtype
    assert (loaded.predict(x) == made.predict(x)).all()


def test_functions_are_given_again(tmp_path):
    x, y = rows()
    made = ReplayClassifier(Dropped, optimizer=torch.optim.SGD, class_weight={"ash": 2.0}, epochs=1).fit(x, y)
    made.save(tmp_path / "saved")
    with pytest.raises(hf.UsageError, match=r"Give them again: .*load\(path, model=..., optimizer=...\)"):
        ReplayClassifier.load(tmp_path / "saved")
    loaded = ReplayClassifier.load(tmp_path / "saved", model=Dropped, optimizer=torch.optim.SGD)
    assert loaded.class_weight == {"ash": 2.0}
    assert (loaded.predict_proba(x) == made.predict_proba(x)).all()
    with pytest.raises(hf.UsageError, match="does not fit this one"):
        ReplayClassifier.load(tmp_path / "saved", model="mlp", optimizer=torch.optim.SGD)


def test_a_file_of_something_else_is_refused(tmp_path):
    made, _, _ = grown()
    made.learner_.save(tmp_path / "learner")
    with pytest.raises(hf.CheckpointError, match="of a learner, not of a ReplayClassifier"):
        ReplayClassifier.load(tmp_path / "learner")
    state = {"parameters": {}, "again": [], "fitted": {"learner_": 3}}
    hf.checkpoint.write(tmp_path / "made up", "ReplayClassifier", state)
    with pytest.raises(hf.CheckpointError, match="not what a ReplayClassifier saves"):
        ReplayClassifier.load(tmp_path / "made up")


def test_a_learner_is_not_loaded_into_an_estimator_with_other_labels(tmp_path):
    made, x, y = grown()
    made.learner_.save(tmp_path / "learner")
    other = ReplayClassifier(head="classifier", random_state=0).partial_fit(x[y == "ash"], y[y == "ash"])
    before = weights(other)
    with pytest.raises(hf.UsageError, match=r"stand for \['cedar', .* this one for \['ash'\]. Save and load"):
        other.learner_.load(tmp_path / "learner")
    assert equal(before, weights(other))
    made.partial_fit(x[::-1], y[::-1])
    made.learner_.load(tmp_path / "learner")  # the same labels in the same order
    assert made.score(x, y) > 0.9


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_exported_classifier_has_its_columns_in_the_order_of_classes(ending, tmp_path):
    made, x, y = grown()
    inputs = x.astype(np.float32)
    assert made.export(tmp_path / f"trees.{ending}").difference < 1e-4
    if ending == "onnx":
        session = onnxruntime.InferenceSession(tmp_path / "trees.onnx")
        (logits,) = session.run(None, {"input": inputs})
        about = session.get_modelmeta().custom_metadata_map["holdfast"]
    else:
        files = {"holdfast": ""}
        answer = torch.export.load(tmp_path / "trees.pt2", extra_files=files).module()
        logits, about = answer(torch.from_numpy(inputs)).detach().numpy(), files["holdfast"]
    labels = np.array(json.loads(about)["classes"])
    assert labels.tolist() == made.classes_.tolist()
    assert (labels[logits.argmax(axis=1)] == made.predict(x)).all()
    assert np.mean(labels[logits.argmax(axis=1)] == y) > 0.9


def test_an_exported_regressor_answers_in_the_units_of_the_targets(tmp_path):
    x, y = course(60, -1, 1)
    made = ReplayRegressor(random_state=0, epochs=2).fit(x, 1000 * y + 500)
    made.export(tmp_path / "course.pt2")
    answers = torch.export.load(tmp_path / "course.pt2").module()(torch.tensor(x, dtype=torch.float32))
    np.testing.assert_allclose(answers.detach()[:, 0], made.predict(x), rtol=1e-3, atol=0.1)


def test_export_says_what_to_do_with_an_estimator():
    made, x, _ = grown()
    with pytest.raises(hf.UsageError, match=r"not a ReplayClassifier. .* exports itself: estimator.export\(path\)"):
        hf.export(made, torch.tensor(x), "m.onnx")
    with pytest.raises(NotFittedError):
        ReplayClassifier().export("m.onnx")


# --- weights and options of the learner ---


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_sample_weights_decide_whom_to_believe(settings):
    x, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 2  # nothing to see in x
    for chosen in (0, 1):
        for kind in (ReplayClassifier, ReplayRegressor):
            made = kind(random_state=0, epochs=5, lr=0.01, **settings).fit(x, y, np.where(y == chosen, 9.0, 1.0))
            assert abs(made.predict(x) - chosen).mean() < 0.4


def test_weights_of_one_and_of_zero():
    x, y = rows(64)
    plain, ones, weighed = (ReplayClassifier(random_state=0, epochs=2, batch_size=16) for _ in range(3))
    plain.fit(x, y)
    ones.fit(x, y, np.ones(64))
    for one, two in zip(weights(plain), weights(ones), strict=True):
        torch.testing.assert_close(one, two)
    weighed.fit(x, y, np.arange(64) % 2)
    assert weighed.learner_.buffer.offered == 64  # two passes over the other half
    with pytest.raises(hf.UsageError, match="Give them from the first call on"):
        plain.partial_fit(x, y, sample_weight=np.ones(64))
    with pytest.raises(hf.UsageError, match="Give them from the first call on"):
        plain.set_params(class_weight={"ash": 2.0}).partial_fit(x, y)
    assert weighed.partial_fit(x, y).learner_.buffer.offered == 128  # none given: 1 each


def test_class_weights_by_label_even_of_labels_to_come():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 3)), np.array(["ash", "beech", "cedar"])[np.arange(300) % 3]
    made = ReplayClassifier(head="classifier", class_weight={"cedar": 9.0}, random_state=0, lr=0.01)
    for portion in (y != "cedar", y == "cedar", y == y):
        made.partial_fit(x[portion], y[portion])
    assert np.mean(made.predict(x) == "cedar") > 0.9
    before = weights(made)
    made.set_params(class_weight={"ash": 0.0}).partial_fit(x[y == "ash"], y[y == "ash"])
    assert equal(before, weights(made))
    with pytest.raises(hf.UsageError, match="must be at least 0"):
        made.set_params(class_weight={"ash": -1.0}).partial_fit(x, y)
    rare = np.concatenate([np.flatnonzero(y == "ash"), np.flatnonzero(y == "beech")[:10]])
    plain, balanced = (
        ReplayClassifier(class_weight=weight, random_state=0, epochs=3).fit(x[rare], y[rare])
        for weight in (None, "balanced")
    )
    assert np.mean(plain.predict(x) == "beech") < 0.05 < 0.1 < np.mean(balanced.predict(x) == "beech")
    with pytest.raises(hf.UsageError, match="needs all samples at once"):
        balanced.partial_fit(x[rare], y[rare])


def smooth(outputs, targets, reduction="mean"):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.5, reduction=reduction)


def test_a_loss_of_ones_own_with_a_growing_head():
    made, x, y = grown(loss=smooth)
    assert made.score(x, y) > 0.8
    assert made.predict_proba(x).max() < grown()[0].predict_proba(x).max() - 0.1
    weighed = ReplayClassifier(loss=smooth, random_state=0, epochs=3).fit(x, y, np.ones(len(x)))
    assert weighed.score(x, y) > 0.9
    with pytest.raises(hf.UsageError, match="must take reduction='none'"):
        ReplayClassifier(loss=nn.CrossEntropyLoss()).fit(x, y, np.ones(len(x)))


def test_options_reach_the_learner(tmp_path):
    x, y = rows(64)
    seen = []

    def view(samples):
        seen.append(len(samples))
        return samples + 0.1

    made = ReplayClassifier(clip=0.5, augment=view, storage=tmp_path / "buffer", epochs=1, random_state=0).fit(x, y)
    assert seen[-2:] == [32, 96]
    assert made.learner_.clip == 0.5
    assert made.learner_.buffer.stored == 64
    assert list((tmp_path / "buffer").iterdir())
    before = len(seen)
    made.predict(x)
    assert len(seen) == before
    made.save(tmp_path / "saved")
    made.learner_.buffer.close()  # as the end of a process would
    loaded = ReplayClassifier.load(tmp_path / "saved", augment=view, storage=tmp_path / "buffer")
    assert (loaded.predict_proba(x) == made.predict_proba(x)).all()
    assert loaded.learner_.buffer.stored == 64
    loaded.learner_.buffer.close()
    with pytest.raises(hf.UsageError, match="holds samples of an estimator that was saved"):
        clone(made).fit(x, y)


@pytest.mark.parametrize("kind", [ReplayClassifier, ReplayRegressor])
def test_a_second_fit_starts_anew_in_the_same_folder(kind, tmp_path):
    x, y = rows(64)
    y = x[:, 0] if kind is ReplayRegressor else y
    made = kind(storage=tmp_path / "buffer", epochs=1, random_state=0)
    expected = made.fit(x, y).predict(x)
    made.partial_fit(x, y)
    assert (made.fit(x, y).predict(x) == expected).all()
    assert made.learner_.buffer.stored == 64


# --- regression ---


def course(count, low, high, seed=0):
    """A sine over one feature, seen between `low` and `high` only."""
    x = np.random.default_rng(seed).uniform(low, high, size=(count, 1))
    return x, np.sin(3 * x[:, 0])


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_the_regressor_is_the_learner_with_squared_errors(settings):
    x, y = course(40, -1, 1)
    made = ReplayRegressor(batch_size=20, lr=0.01, random_state=5, **settings).partial_fit(x, y)
    seed = int(np.random.RandomState(5).randint(np.iinfo(np.int32).max))
    with hf.rng.seeded_globally(seed, "init"):
        model = hf.MODELS["mlp"]((1,), 1)
    common = (model, torch.optim.Adam(model.parameters(), lr=0.01))
    loss = nn.functional.mse_loss
    if settings.get("buffer_size", 500) is None:
        learner = hf.LEARNERS["sgd"](*common, loss=loss)
    elif settings:
        learner = hf.ExperienceReplay(*common, buffer_size=500, loss=loss, seed=seed)
    else:
        learner = hf.ConsistencyReplay(*common, buffer_size=500, beta=0.5, loss=loss, seed=seed)
    order = torch.randperm(40, generator=hf.rng.generator(seed, "order"))
    scaled = (y - y.mean()) / y.std()  # the estimator does that by itself
    for part in order.split(20):
        learner.observe(*(torch.tensor(each, dtype=torch.float32)[part] for each in (x, scaled[:, None])))
    for own, by_hand in zip(made.module_.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, by_hand, rtol=1e-3, atol=1e-5)


def test_the_regressor_remembers_what_came_first():
    def early(**settings):
        made = ReplayRegressor(lr=0.01, batch_size=16, random_state=0, **settings)
        for low in (-1.0, -0.5, 0.0, 0.5):
            for seed in range(4):
                made.partial_fit(*course(160, low, low + 0.5, seed))
        return made.score(*course(200, -1, -0.5, seed=9))

    assert early(buffer_size=200, regularizer=None) > 0.7
    assert early(buffer_size=200, beta=0.1) > 0.7
    assert early(buffer_size=None) < 0  # worse than the mean would be


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 3)])
def test_targets_come_back_in_the_form_they_were_learned_in(shape):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=shape)
    made = ReplayRegressor(epochs=1, random_state=0).fit(x, y)
    assert made.predict(x).shape == shape
    copied = pickle.loads(pickle.dumps(made))
    assert (copied.predict(x) == made.predict(x)).all()
    with pytest.raises(hf.UsageError, match="y has 2 targets per sample"):
        made.partial_fit(x, rng.normal(size=(30, 2)))


def test_estimators_in_threads_are_those_that_were_fitted_alone():
    def network(shape, classes):
        return nn.Sequential(nn.Linear(*shape, 40), nn.Dropout(0.5), nn.Linear(40, classes))

    def fitted(seed):
        return weights(ReplayClassifier(network, random_state=seed, epochs=3).fit(*rows()))

    before, alone = torch.get_rng_state(), [fitted(seed) for seed in range(4)]
    together = joblib.Parallel(n_jobs=4, backend="threading")(joblib.delayed(fitted)(seed) for seed in range(4))
    assert all(map(equal, alone, together))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_targets_of_any_size_are_learned(settings):
    x, y = course(400, -1, 1)
    small = ReplayRegressor(lr=0.01, random_state=0, epochs=10, **settings).fit(x, y)
    large = ReplayRegressor(lr=0.01, random_state=0, epochs=10, **settings).fit(x, 1e6 * y + 3e6)
    assert small.score(x, y) > 0.9
    assert large.score(x, 1e6 * y + 3e6) > 0.9
    constant = ReplayRegressor(random_state=0, epochs=3, **settings).fit(x, np.full(400, 3.3e6))
    np.testing.assert_allclose(constant.predict(x), 3.3e6, rtol=1e-5)


def test_mean_and_deviation_are_those_of_all_targets_so_far():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 2)), 100 * rng.normal(size=(90, 3)) + [5, 50, 5000]
    made = ReplayRegressor(random_state=0)
    for portion in np.split(np.arange(90), [1, 40]):
        made.partial_fit(x[portion], y[portion])
    np.testing.assert_allclose(made.module_.mean, y.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(made.module_.variance.sqrt(), y.std(axis=0), rtol=1e-4)


def test_a_regularizer_that_does_nothing_for_one_target():
    x, y = course(40, -1, 1)
    with pytest.raises(hf.UsageError, match="kl does nothing where the model has one output"):
        ReplayRegressor(regularizer="kl").fit(x, y)
    ReplayRegressor(regularizer="kl", epochs=1).fit(x, np.stack([y, -y], 1))


def test_targets_of_weight_0_do_not_move_the_scale():
    x, y = course(40, -1, 1)
    weight = np.arange(40) % 2
    nonsense = np.where(weight, y, -1e6)
    weighed, half = (ReplayRegressor(random_state=0) for _ in range(2))
    weighed.partial_fit(x, nonsense, weight)
    half.partial_fit(x[1::2], y[1::2], np.ones(20))
    assert equal(weights(weighed), weights(half))


def test_a_forged_estimator_whose_labels_contradict_each_other(tmp_path):
    """The checksum of a checkpoint can be computed by anyone."""
    made = ReplayClassifier(buffer_size=5, epochs=1, random_state=0).fit([[0.0], [1.0]], ["a", "b"])
    for labels in (np.array(["b", "a"]), np.array([["a", "b"]]), {"a": 0}):
        made.classes_ = labels
        made.save(tmp_path / "kept")
        with pytest.raises(hf.CheckpointError, match="not what a ReplayClassifier saves"):
            ReplayClassifier.load(tmp_path / "kept")
