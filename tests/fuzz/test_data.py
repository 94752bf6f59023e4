"""Data sets: files that someone else made, downloaded or put in place by hand.

`presets.toml` and `published.csv` are not here: they are part of the package, like its code, and trusted like it.
"""

import functools
import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from holdfast.analysis import PublishedCorruptions
from holdfast.data.catalogue import Dataset, Status
from holdfast.data.cifar import Cifar, unpickle
from holdfast.data.cifar10c import CORRUPTIONS, Cifar10C
from holdfast.data.files import Archive, map_array
from holdfast.data.mnist import Mnist, parse_idx
from holdfast.data.tinyimagenet import CACHE, FOLDER, Contents, TinyImageNet, _decode_all, _read_cache
from holdfast.errors import DataError

from .hunt import damaged, fuzz, outcome

AT = Path("some/file")


def archive(name):
    return Archive(f"http://example.org/{name}", "md5:0", 0)


# --- MNIST ---


def idx(*shape, count=None):
    """An IDX file that announces a shape and holds so many bytes."""
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return header + bytes(np.prod(shape, dtype=int) if count is None else count)


numbers = st.integers(0, 3) | st.sampled_from([2**32 - 1, 2**31, 65536])


@fuzz(damaged(idx(2, 28, 28)) | st.tuples(numbers, numbers, numbers).map(lambda shape: idx(*shape, count=0)))
def test_idx(content, place):
    value = outcome(parse_idx, content, 3, AT)
    if not isinstance(value, DataError):
        assert value.shape == struct.unpack(">3I", content[4:16])
        assert value.numpy().tobytes() == content[16:]


LABELS = gzip.compress(idx(2))


@fuzz(damaged(gzip.compress(idx(2, 28, 28))))
def test_mnist_files(content, place):
    names = {"train-images-idx3-ubyte.gz": content, "train-labels-idx1-ubyte.gz": LABELS}
    names |= {"t10k-images-idx3-ubyte.gz": content, "t10k-labels-idx1-ubyte.gz": LABELS}
    for name, packed in names.items():
        (place / name).write_bytes(packed)
    sums = {name: "sha256:" + hashlib.sha256(packed).hexdigest() for name, packed in names.items()}
    for checksums in (sums, dict.fromkeys(names, "sha256:0")):
        value = outcome(Mnist(place, checksums).load, place, None)
        assert isinstance(value, Dataset | DataError)
    assert isinstance(value, DataError), "the checksum comes first"


# --- CIFAR ---


def cifar_pickle(value):
    return pickle.dumps(value, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


BATCH = cifar_pickle({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]})
NAMES = cifar_pickle({b"names": [b"cat", b"dog"]})


@fuzz(damaged(BATCH), examples=200)
def test_cifar_pickles(content, place):
    value = outcome(unpickle, content, AT)
    assert isinstance(value, dict | DataError)


@fuzz(
    st.dictionaries(
        st.sampled_from([b"data", b"labels", b"names"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=9) | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(), inner, max_size=2),
            max_leaves=5,
        )
        | st.sampled_from([np.zeros((2, 3072), np.uint8), np.zeros((2, 3072)), np.zeros((0, 3072), np.uint8)]),
    )
)
def test_cifar_batches_of_other_content(values, place):
    """Whole pickles with the right checksum and the wrong values."""
    value = outcome(load_cifar, place, cifar_pickle(values), NAMES)
    assert isinstance(value, Dataset | DataError)
    assert isinstance(outcome(load_cifar, place, BATCH, cifar_pickle(values)), Dataset | DataError)
    assert isinstance(load_cifar(place, BATCH, NAMES), Dataset)


def load_cifar(place, batch, names):
    source = cifar({"train": batch, "test": BATCH, "meta": names})
    return Dataset(
        *(source._batch(content, AT, 2) for content in (batch, BATCH)),
        2,
        source._class_names({"meta": names}, AT),
    )


def cifar(files):
    sums = {name: "md5:" + hashlib.md5(content).hexdigest() for name, content in files.items()}
    split = {kind: {kind: sums[kind]} for kind in ("train", "test", "meta")}
    return Cifar(archive("small.tar.gz"), "small", **split, label_key=b"labels", names_key=b"names")


FILES = {"train": BATCH, "test": BATCH, "meta": NAMES}


def test_a_pickle_cannot_build_arrays_of_its_own():
    """NumPy's own class would take the address of an object, or a size, from the file."""
    for arguments in (((1,), "O", b"\x07" * 8), ((10**12,), "u1")):
        build = b"cnumpy\nndarray\n" + pickle.dumps(arguments, protocol=2)[2:-1] + b"R"
        content = b"\x80\x02}U\x04data" + build + b"s."
        assert isinstance(outcome(unpickle, content, AT), DataError)


def test_a_pickle_cannot_reserve_memory():
    """ "Remember this as number 4,000,000,000" made room for as many in the unpickler written in C."""
    content = b"\x80\x02}r\xff\xff\xff\xee."
    assert outcome(unpickle, content, AT) == {}


@functools.cache
def tar(mode):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as opened:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"small/{name}")
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@fuzz(damaged(tar("w:gz")) | damaged(tar("w:")).map(gzip.compress))
def test_cifar_archives(content, place):
    (place / "small.tar.gz").write_bytes(content)
    source = cifar(FILES)
    assert isinstance(outcome(source.load, place, None), Dataset | DataError)
    assert isinstance(outcome(source.status, place, True), Status)


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path):
    """The second file claims ten billion bytes, which neither are read nor make room for themselves."""
    packed = bytearray(tar("w:"))
    second = 512 + -(-len(BATCH) // 512) * 512
    header = tarfile.TarInfo("small/test")
    header.size = 10**10
    packed[second : second + 512] = header.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "small.tar.gz").write_bytes(gzip.compress(bytes(packed)))
    error = outcome(cifar(FILES).load, tmp_path, None)
    assert "claims to be of 10000000000 bytes" in str(error)


# --- CIFAR-10-C ---


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def announced(shape, descr="|u1"):
    """The header of an array, and eight bytes of it."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(8)


SHAPES = st.sampled_from([(10**12, 32, 32, 3), (-1,), (2**63,), (0,), (), (10**18, 10**18), (8,), (2**31, 2**31, 0)])
ARRAYS = damaged(npy(np.arange(10))) | st.tuples(SHAPES, st.sampled_from(["|u1", "<i8", "|O", "<f4", "|V9"])).map(
    lambda made: announced(*made)
)


@fuzz(ARRAYS | damaged(b"PK\x03\x04" + bytes(100)))
def test_corrupted_images(content, place):
    (place / "labels.npy").write_bytes(content)
    (place / "fog.npy").write_bytes(content)
    value = outcome(map_array, place / "fog.npy")
    assert isinstance(value, np.ndarray | DataError)
    found = PublishedCorruptions.find(place)
    assert isinstance(outcome(found.images, "fog", 1), DataError)
    images, labels = torch.zeros(10_000, 3, 32, 32, dtype=torch.uint8), torch.zeros(10_000, dtype=torch.int64)
    assert isinstance(outcome(found.check, images, labels, ["fog"]), DataError)


@fuzz(ARRAYS)
def test_the_state_of_a_folder_of_corrupted_images(content, place):
    folder = place / "CIFAR-10-C"
    folder.mkdir(exist_ok=True)
    for name in CORRUPTIONS:
        (folder / f"{name}.npy").write_bytes(content)
    (folder / "labels.npy").write_bytes(npy(np.arange(7)))
    source = Cifar10C(archive("CIFAR-10-C.tar"), images=7)
    assert outcome(source.status, place, True).state == "damaged"


@fuzz(damaged(tar("w:")))
def test_archives_of_corrupted_images(content, place):
    """Unpacking writes a scratch folder, so only its outcome is looked at."""
    (place / "CIFAR-10-C.tar").write_bytes(content)
    source = Cifar10C(archive("CIFAR-10-C.tar"), images=7)
    with pytest.raises(DataError, match=r"CIFAR-10-C\.tar"):
        source._unpack(place, None)
    assert [path.name for path in place.iterdir()] == ["CIFAR-10-C.tar"]


# --- Tiny-ImageNet ---


@functools.cache
def jpeg(width=64, height=64):
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(stream, "JPEG")
    return stream.getvalue()


WNIDS, ANNOTATIONS = b"n02\nn01\n", b"val_0.JPEG\tn01\t0\t0\t9\t9\n"
TREE = {
    "wnids.txt": WNIDS,
    "train/n01/images/a.JPEG": jpeg(),
    "train/n02/images/b.JPEG": jpeg(),
    "val/images/val_0.JPEG": jpeg(),
    "val/val_annotations.txt": ANNOTATIONS,
}
TINY = TinyImageNet(archive("tiny-imagenet-200.zip"), classes=2, train_per_class=1, test_images=1)


def huge():
    """A JPEG whose header claims 65,500 x 65,500 pixels."""
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(content)


changes = st.one_of(
    st.tuples(st.just("wnids.txt"), damaged(WNIDS)),
    st.tuples(st.just("val/val_annotations.txt"), damaged(ANNOTATIONS)),
    st.tuples(st.just("train/n01/images/a.JPEG"), damaged(jpeg()) | st.sampled_from([huge(), jpeg(640, 640)])),
)


@fuzz(changes)
def test_tiny_imagenet_folders(change, place):
    for name, content in {**TREE, change[0]: change[1]}.items():
        path = place / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    # Not through load, which keeps what it decoded in a file.
    value = outcome(decode_folder, place)
    assert isinstance(value, DataError) or [part.shape for part in value] == [(2, 3, 64, 64), (1, 3, 64, 64)]
    assert isinstance(outcome(TINY.status, place, True), Status)


def decode_folder(place):
    with TINY._open(place) as tree:
        contents = TINY._survey(tree)
        return _decode_all(tree, list(contents.train), None), _decode_all(tree, list(contents.test), None)


@functools.cache
def tiny_zip():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in TREE.items():
            opened.writestr(f"{FOLDER}/{name}", content)
    return packed.getvalue()


@fuzz(damaged(tiny_zip()), examples=150)
def test_tiny_imagenet_zips(content, place):
    (place / TINY.archive.name).write_bytes(content)
    value = outcome(decode_folder, place)
    assert isinstance(value, DataError | tuple)


@pytest.mark.parametrize("name", ["wnids.txt", "train/n01/images/a.JPEG"])
def test_a_zip_of_zeros_is_refused(tmp_path, name):
    """Zeros are packed a thousandfold: a small archive may hold a file that no memory does."""
    with zipfile.ZipFile(tmp_path / TINY.archive.name, "w", zipfile.ZIP_DEFLATED) as opened:
        for each, content in {**TREE, name: bytes((1 << 24) + 1)}.items():
            opened.writestr(f"{FOLDER}/{each}", content)
    error = outcome(decode_folder, tmp_path)
    assert "claims to be of 16777217 bytes" in str(error)


pixels = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 3, 64]), max_size=4), st.sampled_from([torch.uint8, torch.float32])
)


def cache(key, **tensors):
    return save(tensors, metadata={"key": key})


@fuzz(pixels.map(lambda made: torch.zeros(made[0], dtype=made[1])))
def test_caches_of_other_pixels(tensor, place):
    """A cache with the right key and the wrong tensors is not used."""
    for name, content in TREE.items():
        path = place / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with TINY._open(place) as tree:
        contents = TINY._survey(tree)
    (place / CACHE).write_bytes(cache(contents.key, train=tensor, test=torch.zeros(1, 3, 64, 64, dtype=torch.uint8)))
    whole = tuple(tensor.shape) == (2, 3, 64, 64) and tensor.dtype == torch.uint8
    assert (outcome(_read_cache, place / CACHE, contents) is not None) == whole


@fuzz(damaged(cache("x", train=torch.zeros(2, 3, 4, 4), test=torch.zeros(1))))
def test_damaged_caches(content, place):
    (place / CACHE).write_bytes(content)
    assert outcome(_read_cache, place / CACHE, Contents((), {}, {}, "x")) is None
