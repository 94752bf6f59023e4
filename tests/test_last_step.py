"""benchmarks/last_step.py: random numbers as a GPU draws them, and what a last step does."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.bench import made_up
from holdfast.data import ImageSet
from holdfast.models import MODELS


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    known = "narrow" in MODELS
    module = importlib.import_module("last_step")
    if not known and "narrow" not in MODELS:  # another test imported it and took the network away again
        importlib.reload(importlib.import_module("long_runs"))
    yield module
    MODELS._entries.pop("narrow", None)


@pytest.mark.parametrize(
    ("counter", "seed", "numbers"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_numbers_that_its_authors_published(script, counter, seed, numbers):
    found = script.philox([np.array([each], dtype=np.uint64) for each in counter], seed)
    assert tuple(int(each[0]) for each in found) == numbers


def test_a_permutation_has_every_sample_once_and_another_offset_another_order(script):
    first, second = (script.permutation(script.SAMPLES, 7, offset) for offset in (0, script.DRAWS))
    for found in (first, second):
        assert sorted(found) == list(range(script.SAMPLES))
    assert np.mean(first == second) < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_minibatches_have_as_many_samples_of_the_second_class_as_wanted(script):
    second = torch.arange(100) % 4 == 0
    for wanted in (0, 3, 16):
        rows = script.drawn(second, wanted, 16, torch.Generator().manual_seed(0))
        assert len(set(rows.tolist())) == 16
        assert second[rows].sum() == wanted


def test_every_kind_of_minibatch_is_tried_from_one_state(script, monkeypatch, tmp_path):
    def few(config, root):
        made = made_up(config, samples=config.train_limit)
        return replace(
            made, tasks=tuple(replace(task, test=ImageSet(*(part[:20] for part in task.test))) for task in made.tasks)
        )

    monkeypatch.setattr(script, "make_benchmark", few)
    monkeypatch.setattr(script, "SHARES", (2, 8))
    lines = list(script.tried(tmp_path, 0, epochs=1, images=80, times=2))
    assert [(line["samples"], line["of_second_class"]) for line in lines[::2]] == [(16, 2), (16, 8), (32, 4), (32, 16)]
    assert all(line["gradient"] > 0 for line in lines)
    assert lines == list(script.tried(tmp_path, 0, epochs=1, images=80, times=2))
