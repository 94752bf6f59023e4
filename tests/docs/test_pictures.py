"""The pictures of the concept pages: drawn from the numbers beside them, which the library computed."""

import pytest
from PIL import Image

from .blocks import ROOT


@pytest.fixture(scope="module")
def script():
    import make_pictures

    return make_pictures


def names():
    return sorted(path.stem for path in (ROOT / "docs" / "pictures").glob("*.json"))


def test_every_picture_is_there_and_used(script):
    drawn = {path.stem for path in script.FOLDER.glob("*.svg")} - {"step"}  # that one has no numbers
    assert sorted(script.PICTURES) == names() == sorted(drawn)
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "concepts").glob("*.md"))
    for name in [*names(), "step"]:
        assert f"](../pictures/{name}.svg)" in pages


@pytest.mark.parametrize("name", names())
def test_a_picture_is_what_its_numbers_give(script, name):
    assert script.render(name, script.saved(name)) == (script.FOLDER / f"{name}.svg").read_bytes(), (
        "run `make pictures`"
    )


def test_the_demo_for_a_phone_is_part_of_the_demo(script):
    with Image.open(script.DEMO) as demo, Image.open(script.DEMO.with_stem("demo-phone")) as phone:
        assert script.for_a_phone(demo).tobytes() == phone.tobytes(), "run `make pictures`"
        assert 0.5 < phone.width / demo.width < 0.6


def test_the_reservoir_is_computed_anew(script):
    """Nothing in it depends on the machine, so that the saved numbers must come out exactly."""
    assert script.compute_reservoir() == script.saved("reservoir")
    for seen, held in zip(script.saved("reservoir")["seen"], script.saved("reservoir")["held"], strict=True):
        assert sum(held) == min(seen, 200)


def test_consistency_in_small(script):
    numbers = script.compute_consistency(limit=320)
    assert len(numbers["image"]) == len(numbers["image"][0]) == 28
    assert numbers["label"] in (0, 1)
    assert numbers["drift"]["linf"][-1] < numbers["drift"]["er"][-1]
    script.render("consistency", numbers)


def test_batchnorm_in_small(script):
    numbers = script.compute_batchnorm(limit=320, seeds=1)
    assert numbers["runs"]["apart"] != numbers["runs"]["together"], "the two ways must be two"
    assert all(20 < value <= 100 for runs in numbers["runs"].values() for value in runs[0])
    script.render("batchnorm", numbers)


def test_runs_in_small(script):
    numbers = script.compute_runs(("sgd", "er", "linf"), train_limit=640)
    assert numbers["sgd"]["accuracy"] < numbers["er"]["accuracy"]
    assert sum(numbers["er"]["count"]) == 10_000
    assert sum(numbers["er"]["tasks"]) == pytest.approx(1)
    script.render("matrices", numbers)
    script.render("trust", numbers)


def test_calibration_in_small(script):
    numbers = script.compute_calibration(("er", "mse"), train_limit=640)
    assert list(numbers["seq-mnist"]) == ["er", "mse"]
    for each in numbers["seq-mnist"].values():
        assert abs(each["excess"]) <= each["ece"] + 0.01, "no mean of differences exceeds the mean of their sizes"
    assert numbers["seq-cifar10"] == script.saved("calibration")["seq-cifar10"], "the results folder has changed"
    script.render("calibration", numbers)


def test_what_the_pages_say_of_the_pictures_is_so(script):
    """The sentences that would have to change with the numbers."""
    drift = script.saved("consistency")["drift"]
    assert max(drift["linf"]) < 2.5 < drift["er"][-1]
    final = script.saved("batchnorm")["final"]
    assert final["together"] > final["apart"]
    runs = script.saved("trust")
    assert runs["er"]["ece"] > runs["linf"]["ece"]
    assert runs["er"]["tasks"][-1] > runs["linf"]["tasks"][-1] > 0.2
    assert runs["linf"]["accuracy"] > runs["er"]["accuracy"] > runs["sgd"]["accuracy"]
    digits, pictures = script.saved("calibration")["seq-mnist"], script.saved("calibration")["seq-cifar10"]
    assert {name for name, each in digits.items() if each["ece"] > digits["er"]["ece"]} == {
        *("l1", "l2"),
        *("kl", "mi", "simclr"),
    }
    assert {name for name, each in digits.items() if each["excess"] < 0} == {"l1", "l2", "linf", "mse"}
    assert max(digits, key=lambda name: digits[name]["gap"]) == "er"
    assert max(pictures, key=lambda name: pictures[name]["ece"]) == "er"
    assert min(pictures, key=lambda name: pictures[name]["ece"]) == "mse"
    assert all(each["excess"] > 0 for each in pictures.values())
    assert all(abs(share - 40) <= 6 for share in script.saved("reservoir")["held"][-1])


@pytest.mark.slow
def test_the_numbers_come_out_again(script):
    """On the same machine to the last digit; here, as closely as machines agree."""
    import json

    for name, (compute, _) in script.PICTURES.items():
        found, kept = json.loads(json.dumps(compute())), script.saved(name)
        assert json.dumps(_rounded(found)) == json.dumps(_rounded(kept)), name


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 1) if isinstance(value, float) else value
