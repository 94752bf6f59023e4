import sys
from pathlib import Path

import pytest

from holdfast import data
from holdfast.data.files import checked, data_root
from holdfast.errors import DataError, UsageError


def test_the_four_data_sets_are_registered_and_described():
    assert set(data.DATASETS) >= {"mnist", "cifar10", "cifar100", "tinyimagenet"}
    assert all(data.DATASETS.describe(name) for name in data.DATASETS)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        data.load("cifar-10")


@pytest.mark.parametrize(
    ("name", "file", "address"),
    [
        ("cifar10", "cifar-10-python.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"),
        ("tinyimagenet", "tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
    ],
)
def test_a_missing_set_says_which_file_to_put_where(name, file, address, tmp_path):
    found = data.status(name, tmp_path, verify=True)
    assert (found.state, found.path, found.size) == ("missing", tmp_path / file, 0)
    with pytest.raises(DataError) as caught:
        data.load(name, tmp_path, download=False)
    assert address in str(caught.value)
    assert str(tmp_path / file) in str(caught.value)


def test_root_is_the_argument_then_the_variable_then_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path / "argument") == tmp_path / "argument"
    assert data_root("~/argument") == Path.home() / "argument"
    assert data_root() == tmp_path / "variable"
    monkeypatch.setenv("HOLDFAST_DATA", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_root() == tmp_path / "holdfast"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "holdfast"


@pytest.mark.parametrize(
    ("platform", "expected"), [("darwin", "Library/Caches/holdfast"), ("win32", "AppData/Local/holdfast")]
)
def test_root_on_other_systems(monkeypatch, platform, expected):
    for variable in ("HOLDFAST_DATA", "LOCALAPPDATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert data_root() == Path.home() / expected


def test_checksum_of_an_altered_file_names_the_file():
    md5_of_abc = "md5:900150983cd24fb0d6963f7d28e17f72"
    assert checked(b"abc", md5_of_abc, Path("some/file")) == b"abc"
    with pytest.raises(DataError, match="some/file"):
        checked(b"abd", md5_of_abc, Path("some/file"))
