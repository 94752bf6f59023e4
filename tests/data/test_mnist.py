import gzip
import hashlib
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import data
from holdfast.data.mnist import Mnist, parse_idx
from holdfast.errors import DataError


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, contents):
    """The small data set made of these unpacked files, checksums right."""
    checksums = {}
    for name, content in contents.items():
        packed = gzip.compress(content)
        (folder / name).write_bytes(packed)
        checksums[name] = "sha256:" + hashlib.sha256(packed).hexdigest()
    return Mnist(folder, checksums)


@pytest.fixture
def arrays(rng):
    return {
        "train-images-idx3-ubyte.gz": rng.integers(0, 256, (6, 28, 28), np.uint8),
        "train-labels-idx1-ubyte.gz": rng.integers(0, 10, 6, np.uint8),
        "t10k-images-idx3-ubyte.gz": rng.integers(0, 256, (3, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte.gz": rng.integers(0, 10, 3, np.uint8),
    }


def test_small_files_come_back_as_written(arrays, tmp_path):
    loaded = write_mnist(tmp_path, {name: idx(a) for name, a in arrays.items()}).load(tmp_path, None)
    for split, prefix in ((loaded.train, "train"), (loaded.test, "t10k")):
        assert np.array_equal(split.images.squeeze(1), arrays[f"{prefix}-images-idx3-ubyte.gz"])
        assert split.images.dtype == torch.uint8
        assert np.array_equal(split.labels, arrays[f"{prefix}-labels-idx1-ubyte.gz"])
        assert split.labels.dtype == torch.int64


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes([0, 0, 8, 1]),
        bytes([0, 0, 8, 1, 0, 0, 0, 3]) + b"ab",
        bytes([0, 0, 8, 1, 0, 0, 0, 3]) + b"abcd",
        bytes([0, 0, 13, 1, 0, 0, 0, 3]) + b"abc",  # floats
        bytes([0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 1]) + b"abc",
    ],
)
def test_idx_of_the_wrong_kind_or_length_is_refused(content):
    with pytest.raises(DataError, match="some/file"):
        parse_idx(content, 1, Path("some/file"))


@pytest.mark.parametrize("damage", ["altered", "truncated", "gone"])
def test_damage_names_the_file(arrays, tmp_path, damage):
    source = write_mnist(tmp_path, {name: idx(a) for name, a in arrays.items()})
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "altered" else content[:-9])
    with pytest.raises(DataError, match=path.name):
        source.load(tmp_path, None)
    found = source.status(tmp_path, verify=True)
    assert found.state == "damaged"
    assert path.name in found.detail
    with pytest.raises(DataError, match="installing Holdfast again"):
        source.fetch(tmp_path, None)


def test_half_a_gzip_with_the_right_checksum_is_refused(arrays, tmp_path):
    name = "train-labels-idx1-ubyte.gz"
    source = write_mnist(tmp_path, {name: idx(a) for name, a in arrays.items()})
    half = (tmp_path / name).read_bytes()[:-9]
    (tmp_path / name).write_bytes(half)
    source = Mnist(tmp_path, {**source.checksums, name: "sha256:" + hashlib.sha256(half).hexdigest()})
    with pytest.raises(DataError, match=name):
        source.load(tmp_path, None)


@pytest.mark.parametrize("labels", [[1, 2], [1, 2, 10]])
def test_labels_that_do_not_fit_the_images_are_refused(arrays, tmp_path, labels):
    arrays["t10k-labels-idx1-ubyte.gz"] = np.array(labels, np.uint8)
    with pytest.raises(DataError, match="t10k"):
        write_mnist(tmp_path, {name: idx(a) for name, a in arrays.items()}).load(tmp_path, None)


def test_the_bundled_files_are_mnist(tmp_path):
    mnist = data.load("mnist", tmp_path / "nowhere", download=False)
    assert mnist.train.images.shape == (60_000, 1, 28, 28)
    assert mnist.test.images.shape == (10_000, 1, 28, 28)
    assert mnist.classes == len(mnist.class_names) == 10
    assert mnist.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.train.images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert mnist.train.images.float().std() / 255 == pytest.approx(0.3081, abs=1e-4)


def test_the_bundled_files_verify(tmp_path):
    found = data.status("mnist", tmp_path, verify=True)
    assert (found.state, found.size) == ("bundled", 11_369_320)
    assert data.fetch("mnist", tmp_path) == found.path
    assert (found.path / "LICENSE.md").is_file()


def test_the_registered_set_takes_a_copy_of_the_files(tmp_path):
    bundled = data.status("mnist").path
    shutil.copytree(bundled, tmp_path / "mnist")
    assert Mnist(tmp_path / "mnist").status(tmp_path, verify=True).state == "bundled"
