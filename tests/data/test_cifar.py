import dataclasses
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import data
from holdfast.data.cifar import Cifar, unpickle
from holdfast.data.files import Archive
from holdfast.errors import DataError

from .conftest import cifar_pickle, md5

NAMES = [b"cat", b"dog"]


class Small:
    """A CIFAR of two training batches; `source` expects exactly the `files` held now."""

    def __init__(self, root, rng):
        self.root = root
        self.images = rng.integers(0, 256, (9, 3072), np.uint8)
        self.labels = [0, 1, 1, 0, 1, 0, 0, 1, 1]
        batches = {"one": slice(0, 4), "two": slice(4, 7), "test": slice(7, 9)}
        self.files = {name: self.batch(self.images[s], self.labels[s]) for name, s in batches.items()}
        self.files["meta"] = cifar_pickle({b"names": NAMES})

    @staticmethod
    def batch(images, labels):
        return cifar_pickle({b"data": images, b"labels": labels, b"batch_label": b"a batch"})

    @property
    def source(self):
        sums = {name: md5(content) for name, content in self.files.items()}
        return Cifar(
            archive=Archive("http://example.org/small.tar.gz", "md5:0", 0),
            folder="small",
            train={name: sums[name] for name in ("one", "two")},
            test={"test": sums["test"]},
            meta={"meta": sums["meta"]},
            label_key=b"labels",
            names_key=b"names",
        )

    def write_folder(self):
        (self.root / "small").mkdir()
        for name, content in self.files.items():
            (self.root / "small" / name).write_bytes(content)
        return self.source

    def write_archive(self, extra=()):
        with tarfile.open(self.root / "small.tar.gz", "w:gz") as tar:
            for name, content in [*extra, *((f"small/{n}", c) for n, c in self.files.items())]:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        archive = (self.root / "small.tar.gz").read_bytes()
        source = self.source
        return dataclasses.replace(source, archive=dataclasses.replace(source.archive, checksum=md5(archive)))


@pytest.fixture
def small(tmp_path, rng):
    return Small(tmp_path, rng)


def assert_same(loaded, small):
    assert np.array_equal(torch.cat([loaded.train.images, loaded.test.images]).flatten(1), small.images)
    assert torch.cat([loaded.train.labels, loaded.test.labels]).tolist() == small.labels
    assert loaded.train.images.shape == (7, 3, 32, 32)
    assert (loaded.train.images.dtype, loaded.train.labels.dtype) == (torch.uint8, torch.int64)
    assert (loaded.classes, loaded.class_names) == (2, ("cat", "dog"))


def test_folder_comes_back_as_written(small):
    source = small.write_folder()
    assert_same(source.load(small.root, None), small)
    assert source.status(small.root, verify=False).state == "present"
    found = source.status(small.root, verify=True)
    assert (found.state, found.size) == ("verified", sum(map(len, small.files.values())))
    assert source.fetch(small.root, None) == small.root / "small"


def test_archive_comes_back_as_written_and_nothing_is_unpacked(small):
    source = small.write_archive(extra=[("../escaped", b"x"), ("/tmp/escaped", b"x"), ("small/unexpected", b"x")])
    assert_same(source.load(small.root, None), small)
    assert [path.name for path in small.root.iterdir()] == ["small.tar.gz"]
    assert not (small.root.parent / "escaped").exists()
    assert source.status(small.root, verify=True).state == "verified"
    assert source.fetch(small.root, None) == small.root / "small.tar.gz"


@pytest.mark.parametrize("damage", ["altered", "truncated", "gone"])
def test_damaged_folder_names_the_file(small, damage):
    source = small.write_folder()
    path = small.root / "small" / "two"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "altered" else content[:-1])
    with pytest.raises(DataError, match=r"small.two"):
        source.load(small.root, None)
    assert source.status(small.root, verify=True).state == "damaged"
    with pytest.raises(DataError, match="Delete the folder"):
        source.fetch(small.root, None)


def test_truncated_archive_is_refused(small):
    source = small.write_archive()
    path = small.root / "small.tar.gz"
    path.write_bytes(path.read_bytes()[:-3000])
    assert source.status(small.root, verify=True).state == "damaged"
    with pytest.raises(DataError, match=r"small\.tar\.gz is damaged"):
        source.load(small.root, None)


def test_archive_without_a_file_or_with_another_content_is_refused(small):
    source = small.write_archive()
    small.files["two"] += b"more"
    small.write_archive()
    with pytest.raises(DataError, match="two is damaged or altered"):
        source.load(small.root, None)
    del small.files["two"]
    with tarfile.open(small.root / "small.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match="does not contain meta, one, test, two"):
        source.load(small.root, None)


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_malicious_pickle_is_refused_even_with_the_right_checksum(small, tmp_path):
    marker = tmp_path / "marker"
    small.files["one"] = pickle.dumps({b"data": Evil(marker)})
    source = small.write_folder()
    with pytest.raises(DataError, match=r"one is not a CIFAR file: it refers to (posix|nt)\.mkdir"):
        source.load(small.root, None)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["eval", "getattr", "open"])
def test_builtins_are_not_within_reach(name):
    with pytest.raises(DataError, match=name):
        unpickle(f"cbuiltins\n{name}\n.".encode(), Path("some/file"))


@pytest.mark.parametrize("content", [b"", b"junk", cifar_pickle([1]), cifar_pickle({})[:-1]])
def test_broken_pickle_is_refused(content):
    with pytest.raises(DataError, match="some/file"):
        unpickle(content, Path("some/file"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one", Small.batch(np.zeros((2, 3000), np.uint8), [0, 1])),
        ("one", Small.batch(np.zeros((2, 3072), np.float32), [0, 1])),
        ("one", Small.batch(np.zeros((2, 3072), np.uint8), [0])),
        ("one", Small.batch(np.zeros((2, 3072), np.uint8), [0, 2])),
        ("test", cifar_pickle({b"data": 1})),
        ("meta", cifar_pickle({b"names": 3})),
        ("meta", cifar_pickle({})),
    ],
)
def test_contents_of_the_wrong_shape_are_refused(small, name, content):
    small.files[name] = content
    source = small.write_folder()
    with pytest.raises(DataError, match=rf"small.{name}"):
        source.load(small.root, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "classes", "means", "first"),
    [
        ("cifar10", 10, (0.4914, 0.4822, 0.4465), ["frog", "truck", "truck", "deer", "automobile"]),
        ("cifar100", 100, (0.5071, 0.4865, 0.4409), ["cattle", "dinosaur", "apple", "boy", "aquarium_fish"]),
    ],
)
def test_the_published_files(real_root, name, classes, means, first):
    assert data.status(name, real_root, verify=True).state == "verified"
    loaded = data.load(name, real_root, download=False)
    assert loaded.train.images.shape == (50_000, 3, 32, 32)
    assert loaded.test.images.shape == (10_000, 3, 32, 32)
    assert loaded.train.labels.bincount().tolist() == [50_000 // classes] * classes
    assert loaded.test.labels.bincount().tolist() == [10_000 // classes] * classes
    assert loaded.classes == len(loaded.class_names) == classes
    assert [loaded.class_names[label] for label in loaded.train.labels[:5]] == first
    found = [loaded.train.images[:, channel].double().mean().item() / 255 for channel in range(3)]
    assert found == pytest.approx(means, abs=1e-4)


@pytest.mark.slow
def test_a_published_folder_packed_again_is_read_as_an_archive(real_root, tmp_path):
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(real_root / "cifar-100-python", "cifar-100-python")
    packed, unpacked = (data.load("cifar100", root, download=False) for root in (tmp_path, real_root))
    assert torch.equal(packed.train.images, unpacked.train.images)
    assert torch.equal(packed.test.labels, unpacked.test.labels)
