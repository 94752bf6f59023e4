"""Folders of stored samples: continue, or say what is wrong."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import holdfast as hf

from .hunt import altered, damaged, fuzz


def filled(path):
    buffer = hf.Reservoir(5, storage=path)
    for step in range(4):
        buffer.add({"a": torch.full((3, 2), float(step)), "b": torch.arange(3)}, torch.arange(3), torch.rand(3, 4))
    buffer.commit()
    buffer.close()


def use(path):
    """Open the folder, draw from it, add to it."""
    buffer = hf.Reservoir(5, storage=path)
    try:
        draw = buffer.sample(5)
        buffer.add({"a": torch.zeros(3, 2), "b": torch.arange(3)}, torch.arange(3), torch.rand(3, 4))
        return tuple(draw.x["a"].shape), buffer.stored
    finally:
        buffer.close()


SCRATCH = tempfile.TemporaryDirectory()
GOOD = Path(SCRATCH.name) / "good"
filled(GOOD)
FILES = {path.name: path.read_bytes() for path in sorted(GOOD.iterdir())}


def with_one_changed(name, content, place):
    folder = place / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOOD, folder)
    (folder / name).write_bytes(content)
    return folder


def attempt(folder):
    """What came of using the folder. Opening one writes to it, so that `hunt.outcome` does not fit here."""
    try:
        return use(folder)
    except hf.HoldfastError as error:
        return error


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
def test_damaged_files(name):
    @fuzz(damaged(FILES[name]), examples=25)
    def check(content, place):
        value = attempt(with_one_changed(name, content, place))
        assert isinstance(value, hf.HoldfastError) or value == ((5, 2), 5)

    with tempfile.TemporaryDirectory() as place:
        check(25, Path(place))


def test_descriptions_of_something_else():
    @fuzz(altered(json.loads(FILES["buffer.json"])), examples=60)
    def check(content, place):
        attempt(with_one_changed("buffer.json", content, place))

    with tempfile.TemporaryDirectory() as place:
        check(60, Path(place))


@pytest.mark.parametrize("name", list(FILES))
def test_missing_files(tmp_path, name):
    folder = with_one_changed(name, b"", tmp_path)
    (folder / name).unlink()
    attempt(folder)


def test_a_whole_folder_is_read(tmp_path):
    """Else the tests above would pass with a reader that refuses everything."""
    shutil.copytree(GOOD, tmp_path / "folder")
    assert use(tmp_path / "folder") == ((5, 2), 5)
