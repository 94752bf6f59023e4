import dataclasses
import io
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from holdfast.data.files import Archive
from holdfast.data.tinyimagenet import CACHE, FOLDER, TinyImageNet
from holdfast.errors import DataError

from .conftest import md5

WNIDS = ["n02", "n01"]  # not in alphabetical order, as in the published file
COLOURS = {"n02": (200, 30, 60), "n01": (10, 120, 240)}
GREY = 77


def jpeg(colour, side=64):
    stream = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (side, side), colour).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def tree():
    """2 classes x 3 training images, the last of the last one grey; 3 validation images."""
    files = {"wnids.txt": "\n".join(WNIDS).encode(), "words.txt": b"n01\tone\nn02\ttwo\n"}
    for wnid in WNIDS:
        files |= {f"train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(COLOURS[wnid]) for i in range(3)}
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b""
    files["train/n01/images/n01_2.JPEG"] = jpeg(GREY)
    labels = ["n01", "n02", "n01"]
    files |= {f"val/images/val_{i}.JPEG": jpeg(COLOURS[wnid]) for i, wnid in enumerate(labels)}
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62" for i, wnid in enumerate(labels)]
    files["val/val_annotations.txt"] = ("\n".join(lines) + "\n").encode()
    return files


@pytest.fixture
def source():
    archive = Archive("http://example.org/tiny-imagenet-200.zip", "md5:0", 0)
    return TinyImageNet(archive, classes=2, train_per_class=3, test_images=3)


def write_folder(root, files):
    for name, content in files.items():
        path = root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_zip(root, files, source):
    with zipfile.ZipFile(root / source.archive.name, "w") as packed:
        packed.mkdir(FOLDER)
        packed.writestr("../escaped", b"x")
        for name, content in files.items():
            packed.writestr(f"{FOLDER}/{name}", content)
    checksum = md5((root / source.archive.name).read_bytes())
    return dataclasses.replace(source, archive=dataclasses.replace(source.archive, checksum=checksum))


def load(source, root):
    """The data set, and how many images had to be decoded for it."""
    decoded = []
    loaded = source.load(root, lambda what, done, total: decoded.append(done))
    return loaded, max(decoded, default=0)


def assert_as_written(loaded):
    assert loaded.class_names == tuple(WNIDS)
    assert loaded.classes == 2
    assert loaded.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert loaded.test.labels.tolist() == [1, 0, 1]
    assert (loaded.train.images.dtype, loaded.train.labels.dtype) == (torch.uint8, torch.int64)
    assert loaded.train.images.shape == (6, 3, 64, 64)
    expected = [COLOURS["n02"]] * 3 + [COLOURS["n01"]] * 2 + [(GREY,) * 3]
    expected += [COLOURS[WNIDS[label]] for label in loaded.test.labels]
    found = torch.cat([loaded.train.images, loaded.test.images]).float().mean((2, 3))
    assert np.allclose(found, expected, atol=3)  # JPEG is not exact


def test_folder_is_decoded_once(source, tmp_path):
    write_folder(tmp_path, tree())
    first, decoded = load(source, tmp_path)
    assert decoded == 9
    assert_as_written(first)
    second, decoded = load(source, tmp_path)
    assert decoded == 0
    assert_as_written(second)
    assert torch.equal(first.train.images, second.train.images)
    assert {path.name for path in tmp_path.iterdir()} == {FOLDER, CACHE}


def test_zip_is_decoded_once_and_not_unpacked(source, tmp_path):
    source = write_zip(tmp_path, tree(), source)
    for expected in (9, 0):
        loaded, decoded = load(source, tmp_path)
        assert decoded == expected
        assert_as_written(loaded)
    assert {path.name for path in tmp_path.iterdir()} == {source.archive.name, CACHE}
    assert source.status(tmp_path, verify=True).state == "verified"
    assert source.fetch(tmp_path, None) == tmp_path / source.archive.name


def test_status_of_a_folder(source, tmp_path):
    files = tree()
    write_folder(tmp_path, files)
    assert source.status(tmp_path, verify=False).state == "present"
    found = source.status(tmp_path, verify=True)
    assert (found.state, found.size) == ("present", sum(map(len, files.values())))
    assert source.fetch(tmp_path, None) == tmp_path / FOLDER
    (tmp_path / FOLDER / "val/images/val_1.JPEG").unlink()
    assert source.status(tmp_path, verify=True).state == "damaged"


def damage_cache(path, how):
    content = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(content[:-5])
        case "empty":
            path.write_bytes(b"")
        case "junk":
            path.write_bytes(b"junk" * 100)
        case "no key":
            save_file({"train": torch.zeros(6, 3, 64, 64), "test": torch.zeros(3, 3, 64, 64)}, path)


@pytest.mark.parametrize("how", ["truncated", "empty", "junk", "no key"])
def test_a_damaged_cache_is_rebuilt(source, tmp_path, how):
    write_folder(tmp_path, tree())
    load(source, tmp_path)
    damage_cache(tmp_path / CACHE, how)
    loaded, decoded = load(source, tmp_path)
    assert decoded == 9
    assert_as_written(loaded)
    assert load(source, tmp_path)[1] == 0


def test_the_cache_of_another_source_is_not_used(source, tmp_path):
    write_folder(tmp_path, tree())
    load(source, tmp_path)
    other = tree()
    other["wnids.txt"] = "\n".join(reversed(WNIDS)).encode()
    write_folder(tmp_path, other)
    loaded, decoded = load(source, tmp_path)
    assert decoded == 9
    assert loaded.class_names == tuple(reversed(WNIDS))


def test_the_cache_is_shared_by_the_zip_and_its_folder(source, tmp_path):
    source = write_zip(tmp_path, tree(), source)
    load(source, tmp_path)
    write_folder(tmp_path, tree())
    assert load(source, tmp_path)[1] == 0


def test_a_cache_that_cannot_be_kept_costs_no_result(source, tmp_path):
    write_folder(tmp_path, tree())
    (tmp_path / CACHE).mkdir()  # in the way
    with pytest.warns(UserWarning, match="could not be stored"):
        loaded, _ = load(source, tmp_path)
    assert_as_written(loaded)
    assert {path.name for path in tmp_path.iterdir()} == {FOLDER, CACHE}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train/n01/images/n01_1.JPEG", jpeg((1, 2, 3))[:-300]),
        ("train/n01/images/n01_1.JPEG", b"junk"),
        ("val/images/val_1.JPEG", b""),
        ("val/images/val_1.JPEG", jpeg((1, 2, 3), side=32)),
        ("val/images/val_9.JPEG", jpeg((1, 2, 3))),  # not annotated
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\nval_1.JPEG\tn02\n"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\nval_1.JPEG\tn77\n"),
        ("val/val_annotations.txt", b"junk"),
        ("wnids.txt", b"n01\nn01\n"),
        ("wnids.txt", b"n01\nn02\nn01\n"),
        ("wnids.txt", b"n01\nn03\n"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_names_the_file_and_leaves_no_cache(source, tmp_path, name, content, packed):
    files = tree() | {name: content}
    if packed:
        source = write_zip(tmp_path, files, source)
    else:
        write_folder(tmp_path, files)
    with pytest.raises(DataError) as caught:
        source.load(tmp_path, None)
    blamed = "train/n03/images" if b"n03" in content else name
    assert blamed in str(caught.value).replace("\\", "/")
    assert not list(tmp_path.glob(f"{CACHE}*"))


@pytest.mark.parametrize(
    "name", ["wnids.txt", "val/val_annotations.txt", "val/images/val_2.JPEG", "train/n01/images/n01_0.JPEG"]
)
def test_a_missing_file_is_named(source, tmp_path, name):
    write_folder(tmp_path, tree())
    (tmp_path / FOLDER / name).unlink()
    blamed = "train/n01/images holds 2 images; 3 expected" if name.startswith("train") else name
    with pytest.raises(DataError) as caught:
        source.load(tmp_path, None)
    assert blamed in str(caught.value).replace("\\", "/")


def test_too_few_validation_images_are_noticed(source, tmp_path):
    write_folder(tmp_path, tree())
    with pytest.raises(DataError, match="holds 3 images; 4 expected"):
        dataclasses.replace(source, test_images=4).load(tmp_path, None)


def test_an_altered_zip_is_refused_before_decoding(source, tmp_path):
    source = write_zip(tmp_path, tree(), source)
    write_zip(tmp_path, tree() | {"words.txt": b"others"}, source)
    with pytest.raises(DataError, match="not the published file"):
        source.load(tmp_path, None)


def test_half_a_zip_is_refused(source, tmp_path):
    source = write_zip(tmp_path, tree(), source)
    path = tmp_path / source.archive.name
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="not a whole zip"):
        source.load(tmp_path, None)


def test_a_moved_root_keeps_its_cache(source, tmp_path):
    write_folder(tmp_path / "here", tree())
    load(source, tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert load(source, tmp_path / "there")[1] == 0
