"""The published numbers: all there, and each at home in exactly the experiments that show it."""

import csv
from importlib.resources import files

from holdfast.experiments import EXPERIMENTS, Published, published

TABLES = ("table1", "long-sequences", "low-buffer", "forward-transfer", "alpha", "beta")


def rows():
    text = files("holdfast.experiments").joinpath("published.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def test_examples_read_off_the_paper():
    assert published("table1", "seq-tinyimagenet", 500, "linf", "accuracy") == Published(20.47, 0.99)
    assert published("table1", "rot-mnist", None, "sgd", "accuracy") == Published(70.76, 5.61)
    assert published("table_alpha", "seq-cifar10/alpha=2", 500, "er", "last_task_probability") == Published(
        0.5291, None
    )
    assert published("table_beta", "seq-tinyimagenet/beta=1.5", 500, "dino", "accuracy") == Published(13.55, 0.56)
    assert published("table1", "perm-mnist", 200, "er", "accuracy") is None


def test_every_published_number_has_its_cell():
    assert len(rows()) == 258
    cells = [cell for name in TABLES for cell in EXPERIMENTS[name].cells]
    assert len(cells) == 258
    assert all(cell.published is not None for cell in cells)
    assert not any(cell.published.source for cell in cells)
    shown = sorted(cell.published.mean for cell in cells)
    assert shown == sorted(float(row["mean"]) for row in rows())
