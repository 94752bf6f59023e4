import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import config as config_module
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.regularizers import REGULARIZERS

BETA_FROM_BENCHMARK = ("l1", "l2", "linf", "mse", "kl")
BETA_OF_ITS_OWN = {"mi": 1.0, "simclr": 0.05, "byol": 1.0, "dino": 1.0, "barlow": 1.0, "simsiam": 1.0}

# The protocol's table, row by row: benchmark, method, then per buffer size
# (lr, batch size, replay size, epochs, alpha, beta); None where the method has no such number.
CONSISTENCY = {
    ("rot-mnist", 200): (0.1, 128, 128, 1, 0.5, 1.0),
    ("rot-mnist", 500): (0.2, 128, 128, 1, 1.0, 0.5),
    ("rot-mnist", 5120): (0.2, 128, 128, 1, 0.5, 0.5),
    ("mnist-360", 200): (0.2, 16, 16, 1, 1.0, 0.5),
    ("mnist-360", 500): (0.2, 16, 16, 1, 1.0, 0.5),
    ("mnist-360", 1000): (0.2, 16, 128, 1, 1.0, 0.2),
    ("seq-cifar10", 200): (0.03, 32, 32, 50, 0.5, 0.1),
    ("seq-cifar10", 500): (0.03, 32, 32, 50, 0.5, 0.2),
    ("seq-cifar10", 5120): (0.03, 32, 32, 50, 1.0, 0.1),
    ("seq-cifar100", 200): (0.03, 32, 32, 50, 0.5, 0.1),
    ("seq-cifar100", 500): (0.03, 32, 32, 50, 0.5, 0.2),
    ("seq-cifar100", 5120): (0.03, 32, 32, 50, 1.0, 0.1),
    ("seq-tinyimagenet", 200): (0.03, 32, 32, 100, 1.0, 0.1),
    ("seq-tinyimagenet", 500): (0.03, 32, 32, 100, 0.5, 0.2),
    ("seq-tinyimagenet", 5120): (0.03, 32, 32, 100, 0.5, 0.1),
}
ER = {
    ("rot-mnist", 200): (0.2, 128, 128, 1),
    ("rot-mnist", 500): (0.2, 128, 128, 1),
    ("rot-mnist", 5120): (0.2, 128, 128, 1),
    ("mnist-360", 200): (0.2, 32, 16, 1),
    ("mnist-360", 500): (0.2, 32, 16, 1),
    ("mnist-360", 1000): (0.2, 32, 16, 1),
    ("seq-cifar10", 200): (0.1, 32, 32, 50),
    ("seq-cifar10", 500): (0.1, 32, 32, 50),
    ("seq-cifar10", 5120): (0.1, 32, 32, 50),
    ("seq-cifar100", 200): (0.1, 32, 32, 50),
    ("seq-cifar100", 500): (0.1, 32, 32, 50),
    ("seq-cifar100", 5120): (0.1, 32, 32, 50),
    ("seq-tinyimagenet", 200): (0.1, 32, 32, 100),
    ("seq-tinyimagenet", 500): (0.03, 32, 32, 100),
    ("seq-tinyimagenet", 5120): (0.1, 32, 32, 100),
}
TUNED = {("seq-cifar10", 200, "l1"): 0.01, ("seq-cifar10", 500, "l1"): 0.02}  # beta, found on a validation split
WITHOUT_BUFFER = {  # lr, batch size, epochs
    "rot-mnist": (0.2, 128, 1),
    "mnist-360": (0.1, 4, 1),
    "seq-cifar10": (0.1, 32, 50),
    "seq-cifar100": (0.1, 32, 50),
    "seq-tinyimagenet": (0.03, 32, 100),
}
SHAPE = {  # model, tasks
    "rot-mnist": ("mlp", 20),
    "perm-mnist": ("mlp", 20),
    "seq-mnist": ("mlp", 5),
    "mnist-360": ("mlp", 1),
    "seq-cifar10": ("resnet18", 5),
    "seq-cifar100": ("resnet18", 5),
    "seq-tinyimagenet": ("resnet18", 10),
}


def example(**changes):
    values = {"benchmark": "rot-mnist", "method": "mse", "buffer_size": 200}
    return RunConfig(**{**values, **changes})


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("benchmark", "buffer_size"), CONSISTENCY)
@pytest.mark.parametrize("method", [*BETA_FROM_BENCHMARK, *BETA_OF_ITS_OWN])
def test_preset_of_every_regularizer(benchmark, buffer_size, method):
    lr, batch, replay, epochs, alpha, beta = CONSISTENCY[benchmark, buffer_size]
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size)
    assert (config.benchmark, config.method, config.buffer_size) == (benchmark, method, buffer_size)
    assert (config.lr, config.batch_size, config.replay_size, config.epochs) == (lr, batch, replay, epochs)
    tuned = TUNED.get((benchmark, buffer_size, method), BETA_OF_ITS_OWN.get(method, beta))
    assert (config.alpha, config.beta) == (alpha, tuned)
    assert (config.model, config.tasks) == SHAPE[benchmark]


@pytest.mark.parametrize(("buffer_size", "beta"), [(50, 0.01), (200, 0.01), (499, 0.01), (500, 0.02), (5120, 0.1)])
def test_what_was_tuned_holds_for_its_column_only(buffer_size, beta):
    assert RunConfig.preset("seq-cifar10", "l1", buffer_size=buffer_size).beta == beta


@pytest.mark.parametrize(("benchmark", "buffer_size"), ER)
def test_preset_of_er(benchmark, buffer_size):
    config = RunConfig.preset(benchmark, "er", buffer_size=buffer_size)
    assert (config.lr, config.batch_size, config.replay_size, config.epochs) == ER[benchmark, buffer_size]
    assert config.alpha == 1, "outside the alpha table, er's halves weigh the same"
    assert (config.model, config.tasks) == SHAPE[benchmark]


@pytest.mark.parametrize("benchmark", WITHOUT_BUFFER)
@pytest.mark.parametrize("method", ["sgd", "joint"])
@pytest.mark.parametrize("buffer_size", [None, 1, 200, 5120])
def test_preset_without_buffer_ignores_its_size(benchmark, method, buffer_size):
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size)
    assert (config.lr, config.batch_size, config.epochs) == WITHOUT_BUFFER[benchmark]
    assert config.buffer_size is None
    assert config == RunConfig.preset(benchmark, method)
    assert (config.model, config.tasks) == SHAPE[benchmark]


def test_every_registered_regularizer_is_in_the_tables_above():
    ours = {name for name, function in REGULARIZERS.items() if function.__module__ == "holdfast.regularizers"}
    assert ours == {*BETA_FROM_BENCHMARK, *BETA_OF_ITS_OWN}


@pytest.mark.parametrize("method", ["mse", "er", "simclr"])
@pytest.mark.parametrize("benchmark", SHAPE)
@pytest.mark.parametrize(("size", "column"), [(1, 200), (100, 200), (199, 200), (499, 200), (501, 500), (10**6, 5120)])
def test_other_buffer_sizes_use_the_column_below_and_small_ones_the_smallest(benchmark, method, size, column):
    given = RunConfig.preset(benchmark, method, buffer_size=size)
    assert given == RunConfig.preset(benchmark, method, buffer_size=column).change(buffer_size=size)


def test_preset_takes_changes_and_a_seed():
    config = RunConfig.preset("rot-mnist", "linf", buffer_size=500, seed=3, epochs=2, lr=0.5)
    assert (config.seed, config.epochs, config.lr, config.alpha) == (3, 2, 0.5, 1.0)
    with pytest.raises(UsageError, match="unknown setting 'epoch': did you mean 'epochs'"):
        RunConfig.preset("rot-mnist", "linf", epoch=2)


def test_preset_of_a_method_or_benchmark_from_elsewhere(monkeypatch):
    monkeypatch.setitem(REGULARIZERS._entries, "huber", lambda current, stored: (current - stored).mean())
    assert RunConfig.preset("seq-cifar10", "huber") == RunConfig.preset("seq-cifar10", "mse").change(method="huber")
    assert RunConfig.preset("my-stream", "mse").model == "mlp"
    assert RunConfig.preset("my-stream", "simclr").beta == 0.05


@pytest.mark.parametrize(
    ("benchmark", "method", "says"),
    [
        ("rot-mnist", "linff", "unknown method 'linff': did you mean 'linf'"),
        ("rot-mnist", "replay", "unknown method 'replay'"),
        ("rot-mnst", "linf", "unknown benchmark 'rot-mnst': did you mean 'rot-mnist'"),
        ("seq-cifar-10", "linf", "did you mean 'seq-cifar10'"),
    ],
)
def test_a_slip_in_a_name_is_noticed(benchmark, method, says):
    with pytest.raises(UsageError, match=says):
        RunConfig.preset(benchmark, method)


@pytest.mark.parametrize("method", ["model", "lr", "tasks", "epochs", "200"])
def test_a_method_named_like_a_setting_does_not_confuse_the_tables(method, monkeypatch):
    monkeypatch.setitem(REGULARIZERS._entries, method, lambda current, stored: (current - stored).mean())
    assert RunConfig.preset("seq-cifar10", method) == RunConfig.preset("seq-cifar10", "mse").change(method=method)


@pytest.mark.parametrize("benchmark", SHAPE)
@pytest.mark.parametrize("buffer_size", [200, 500])
def test_derpp_is_another_name_for_mse(benchmark, buffer_size):
    config = RunConfig.preset(benchmark, "derpp", buffer_size=buffer_size)
    assert config == RunConfig.preset(benchmark, "mse", buffer_size=buffer_size)
    assert config.fingerprint == RunConfig.preset(benchmark, "mse", buffer_size=buffer_size).fingerprint
    assert (config.method, example(method="derpp"), example().change(method="derpp")) == ("mse", example(), example())


def test_a_method_registered_under_an_alias_is_meant_by_it(monkeypatch):
    monkeypatch.setitem(REGULARIZERS._entries, "derpp", lambda current, stored: (current - stored).mean())
    assert RunConfig.preset("rot-mnist", "derpp").method == "derpp"


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epochs", "batch_size", "replay_size", "buffer_size", "tasks", "train_limit"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "3", True, float("nan")])
def test_counts_must_be_whole_and_positive(name, value):
    with pytest.raises(UsageError, match=f"{name.replace('_', ' ')} must be a whole number of at least 1"):
        example(**{name: value})


@pytest.mark.parametrize("name", ["epochs", "batch_size", "replay_size"])
def test_some_counts_are_required(name):
    with pytest.raises(UsageError, match="whole number"):
        example(**{name: None})


@pytest.mark.parametrize("name", ["lr", "alpha", "beta"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", None])
def test_weights_must_be_finite_and_not_negative(name, value):
    with pytest.raises(UsageError, match=f"{name} must be a finite number of at least 0"):
        example(**{name: value})


@pytest.mark.parametrize("value", [1.5, "1", None, True, 2**63, -(2**63)])  # results hold no larger numbers
def test_seed_must_be_whole(value):
    with pytest.raises(UsageError, match="seed must be a whole number"):
        example(seed=value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.1", None])
def test_options_must_be_finite_numbers(value):
    with pytest.raises(UsageError, match=r"regularizer\.temperature must be a finite number"):
        example(options=(("temperature", value),))


@pytest.mark.parametrize("method", ["er", "mse"])
def test_methods_with_a_buffer_need_its_size(method):
    with pytest.raises(UsageError, match=f"method '{method}' needs a buffer size"):
        example(method=method, buffer_size=None)


def test_whether_a_method_from_elsewhere_has_a_buffer_is_not_known():
    """A result can be read without the plugin that has its method."""
    for size in (None, 50):
        config = example(method="a-learner-from-elsewhere", buffer_size=size)
        assert config.buffer_size == size
        assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("method", ["sgd", "joint"])
def test_methods_without_a_buffer_have_none_however_they_are_made(method):
    assert example(method=method).buffer_size is None
    assert example().change(method=method).buffer_size is None
    assert RunConfig.preset("rot-mnist", method, buffer_size=500).buffer_size is None


def test_precision_is_checked():
    assert example(precision="bfloat16").precision == "bfloat16"
    with pytest.raises(UsageError, match="unknown precision 'float23': did you mean 'float32'"):
        example(precision="float23")


def test_it_is_frozen_and_hashable():
    config = example()
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0
    assert len({config, example(), example(seed=1), example(options={"temperature": 1})}) == 3


def test_change_leaves_the_original():
    config = example()
    assert config.change(lr=0.7).lr == 0.7
    assert config == example()
    with pytest.raises(UsageError, match="unknown setting 'bufer_size': did you mean 'buffer_size'"):
        config.change(bufer_size=3)
    with pytest.raises(UsageError, match="epochs must be"):
        config.change(epochs=0)


def test_title():
    assert example(seed=2).title == "rot-mnist mse, buffer 200, seed 2"
    assert example(method="sgd").title == "rot-mnist sgd, seed 0"


# --- key=value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr=0.5", "lr", 0.5),
        ("lr=1", "lr", 1.0),
        ("lr=1e-3", "lr", 0.001),
        ("epochs=3", "epochs", 3),
        ("epochs=1e2", "epochs", 100),
        ("seed=-1", "seed", -1),
        ("seed=9007199254740993", "seed", 2**53 + 1),  # no float64 holds it
        ("tasks=none", "tasks", 20),
        ("tasks=None", "tasks", 20),
        ("train_limit=none", "train_limit", None),
        ("train_limit=", "train_limit", None),
        ("train_limit=100", "train_limit", 100),
        ("model=resnet18", "model", "resnet18"),
        ("precision=bfloat16", "precision", "bfloat16"),
    ],
)
def test_parse_gives_values_of_the_right_type(text, name, value):
    parsed = getattr(example(tasks=2).parse([text]), name)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_usual_number_of_tasks_has_one_fingerprint():
    usual = RunConfig.preset("rot-mnist", "mse", buffer_size=200)
    assert usual.parse(["tasks=none"]).fingerprint == usual.fingerprint
    own = RunConfig(benchmark="one-of-my-own", method="mse", buffer_size=200, tasks=3)
    assert own.parse(["tasks=none"]).tasks is None


def test_parse_applies_several_and_the_last_wins():
    config = example().parse(["lr=0.5", "epochs=2", "lr=0.25"])
    assert config == example(lr=0.25, epochs=2)
    assert example().parse([]) == example()


def test_parse_options_of_the_regularizer():
    config = example(method="dino").parse(["regularizer.teacher=0.07", "regularizer.student=0.2", "lr=0.5"])
    assert config.options == (("student", 0.2), ("teacher", 0.07))
    assert config.lr == 0.5
    assert config.parse(["regularizer.student=0.3"]).options == (("student", 0.3), ("teacher", 0.07))


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0.5", 0.5), ("-1e-3", -0.001), ("True", True), ("false", False), ("late", "late"), ("", None)],
)
def test_a_setting_whose_default_is_none_is_what_it_looks_like(text, value):
    found = dict(example().parse([f"own={text}"], {"own": None}).settings)
    assert found == ({} if value is None else {"own": value})
    assert type(found.get("own")) is type(value)
    assert example(settings=(("own", 7),)).parse(["own=none"], {"own": None}) == example()


def test_a_setting_that_no_text_can_give():
    with pytest.raises(UsageError, match=r"sizes is \(1, 2\) by default, and a run can set numbers, words, true and"):
        example().parse(["sizes=3"], {"sizes": (1, 2)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "'lr' is not of the form key=value"),
        ("lrr=1", "unknown setting 'lrr': did you mean 'lr'"),
        ("regulariser.temperature=1", "did you mean 'regularizer.NAME'"),
        ("options=3", "unknown setting 'options'"),
        ("=3", "unknown setting ''"),
        ("lr=fast", "lr must be a number, not 'fast'"),
        ("lr=none", "lr must be a number, not 'none'"),
        ("lr=nan", "lr must be a finite number"),
        ("epochs=1.5", "epochs must be a whole number, not '1.5'"),
        ("epochs=inf", "epochs must be a whole number, not 'inf'"),
        ("epochs=nan", "epochs must be a whole number, not 'nan'"),
        ("epochs=+-3", "epochs must be a number"),
        ("epochs=0", "epochs must be a whole number of at least 1"),
        ("epochs=none", "epochs must be a number"),
        ("seed=none", "seed must be a number"),
        ("buffer_size=500", "buffer_size decides the preset"),
        ("method=kl", "method decides the preset"),
        ("benchmark=mnist-360", "benchmark decides the preset"),
        ("regularizer.temperature=hot", "regularizer.temperature must be a number"),
        ("regularizer.temperature=nan", "regularizer.temperature must be a finite number"),
    ],
)
def test_parse_says_what_is_wrong(text, message):
    with pytest.raises(UsageError) as caught:
        example().parse([text])
    assert message in str(caught.value)


# --- dictionaries and fingerprints -----------------------------------------------------------------------------------

counts = st.integers(1, 10**6)
weights = st.floats(0, 100)
configs = st.builds(
    RunConfig,
    benchmark=st.sampled_from(["rot-mnist", "seq-cifar10", "x"]),
    method=st.sampled_from(["sgd", "er", "mse", "simclr"]),
    buffer_size=counts,
    seed=st.integers(1 - 2**63, 2**63 - 1),
    model=st.sampled_from(["mlp", "resnet18"]),
    tasks=st.none() | counts,
    epochs=counts,
    batch_size=counts,
    replay_size=counts,
    lr=weights | st.integers(0, 3),
    alpha=weights | st.integers(0, 3),
    beta=weights,
    precision=st.sampled_from(["float32", "bfloat16"]),
    train_limit=st.none() | counts,
    validation=st.floats(0, 0.99),
    options=st.dictionaries(
        st.sampled_from("abcd"), st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3)
    ),
)


@given(configs)
@settings(max_examples=100, deadline=None)
def test_round_trip_through_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    again = RunConfig.from_dict(values)
    assert again == config
    assert hash(again) == hash(config)
    assert again.fingerprint == config.fingerprint
    # Later fields are left out where they have no effect: the fingerprints of earlier results stay what they were.
    later = {"validation", "optimizer", "momentum", "weight_decay", "schedule", "settings"}
    assert set(values) | later == {field.name for field in fields(RunConfig)}
    assert {name for name in later if getattr(config, name)} - {"optimizer", "schedule"} == set(values) & later


@given(configs, configs)
@settings(max_examples=100, deadline=None)
def test_equal_fingerprints_mean_equal_configs(a, b):
    assert (a.fingerprint == b.fingerprint) == (a == b)


OTHER = {
    "benchmark": "perm-mnist",
    "method": "kl",
    "buffer_size": 201,
    "seed": 1,
    "model": "resnet18",
    "tasks": 3,
    "epochs": 2,
    "batch_size": 33,
    "replay_size": 33,
    "lr": 0.030000000000000002,
    "alpha": 0.99,
    "beta": 0.0,
    "precision": "bfloat16",
    "train_limit": 10,
    "validation": 0.1,
    "options": (("temperature", 1.0),),
    "optimizer": "adam",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "settings": (("decay", 0.9),),
}


@pytest.mark.parametrize("name", [field.name for field in fields(RunConfig)])
def test_every_field_changes_the_fingerprint(name):
    assert example(**{name: OTHER[name]}).fingerprint != example().fingerprint


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"lr": 1}, {"lr": 1.0}),
        ({"beta": -0.0}, {"beta": 0}),
        ({"options": (("b", 1), ("a", 2))}, {"options": (("a", 2.0), ("b", 1.0))}),
        ({"options": {"a": 1}}, {"options": [("a", 1.0)]}),
        ({"method": "sgd", "buffer_size": 200}, {"method": "sgd", "buffer_size": None}),
    ],
)
def test_equal_configs_share_a_fingerprint_however_they_are_written(one, same):
    assert example(**one) == example(**same)
    assert example(**one).fingerprint == example(**same).fingerprint


@pytest.mark.parametrize("share", [1, 1.5, -0.1, float("nan")])
def test_a_validation_share_lies_below_one(share):
    with pytest.raises(UsageError, match="validation must be"):
        example(validation=share)


def test_fingerprint_has_the_form_of_a_folder_name():
    assert len(example().fingerprint) == 16
    assert set(example().fingerprint) <= set("0123456789abcdef")


def test_fingerprint_depends_on_the_protocol(monkeypatch):
    before = example().fingerprint
    monkeypatch.setattr(config_module, "PROTOCOL", config_module.PROTOCOL + 1)
    assert example().fingerprint != before


def test_fingerprint_is_the_same_in_every_process():
    code = (
        "from holdfast.config import RunConfig;"
        "print(RunConfig.preset('rot-mnist', 'dino', options={'teacher': 0.07, 'student': 0.2}).fingerprint)"
    )
    ours = RunConfig.preset("rot-mnist", "dino", options={"student": 0.2, "teacher": 0.07}).fingerprint
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert answer.strip() == ours


def test_from_dict_refuses_what_it_does_not_know():
    with pytest.raises(UsageError, match="not settings of a run: learning_rate, warmth"):
        RunConfig.from_dict({**example().to_dict(), "warmth": 0.9, "learning_rate": 1})


def test_from_dict_fills_in_defaults():
    assert RunConfig.from_dict({"benchmark": "rot-mnist", "method": "mse", "buffer_size": 200}) == example()
