import dataclasses
import errno
import io
import tarfile

import numpy as np
import pytest

from holdfast import data
from holdfast.analysis import CORRUPTIONS, PublishedCorruptions
from holdfast.data.cifar10c import FOLDER, Cifar10C
from holdfast.data.files import Archive
from holdfast.errors import DataError

from .conftest import md5


def array(shape):
    stream = io.BytesIO()
    np.save(stream, np.zeros(shape, np.uint8))
    return stream.getvalue()


@pytest.fixture
def small(tmp_path):
    """A CIFAR-10-C of five images, of which the archive is at hand."""
    source = Cifar10C(Archive("http://example.org/small.tar", "md5:0", 0), images=5)
    files = {f"{FOLDER}/{name}": array(shape) for name, shape in source.shapes.items()}
    return write(source, tmp_path, {**files, "../escaped": b"x", f"{FOLDER}/README.txt": b"x"})


def write(source, root, files):
    with tarfile.open(root / "small.tar", "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    checksum = md5((root / "small.tar").read_bytes())
    return dataclasses.replace(source, archive=dataclasses.replace(source.archive, checksum=checksum))


def test_registered_with_the_files_that_analyses_read():
    source = data.DATASETS["cifar10-c"]
    assert isinstance(source, Cifar10C)
    assert set(source.shapes) == {f"{name}.npy" for name in CORRUPTIONS} | {"labels.npy"}
    assert source.shapes["fog.npy"] == PublishedCorruptions.SHAPE


def test_missing_says_where_it_comes_from(tmp_path):
    found = data.status("cifar10-c", tmp_path)
    assert (found.state, found.path) == ("missing", tmp_path / "CIFAR-10-C.tar")
    assert "2918 MB" in found.detail


def test_the_archive_is_unpacked_to_known_names_only(small, tmp_path):
    assert small.status(tmp_path, verify=True).state == "verified"
    steps = []
    folder = small.fetch(tmp_path, lambda *step: steps.append(step))
    assert folder == tmp_path / FOLDER
    assert {file.name for file in folder.iterdir()} == set(small.shapes)
    assert {path.name for path in tmp_path.iterdir()} == {"small.tar", FOLDER}
    assert not (tmp_path.parent / "escaped").exists()
    assert steps[-1] == ("unpack small.tar", 20, 20)
    assert small.status(tmp_path, verify=True).state == "present"
    assert small.fetch(tmp_path, None) == folder
    assert PublishedCorruptions.find(tmp_path) == PublishedCorruptions(folder)


def test_an_archive_that_lacks_a_file_is_refused(small, tmp_path):
    files = {f"{FOLDER}/{name}": array(shape) for name, shape in small.shapes.items() if name != "fog.npy"}
    lacking = write(small, tmp_path, files)
    with pytest.raises(DataError, match=r"does not contain fog\.npy"):
        lacking.fetch(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["small.tar"]


@pytest.mark.parametrize("function", ["tempfile.mkdtemp", "shutil.copyfileobj"])
def test_a_root_that_cannot_be_written_is_told_and_left_as_it_was(small, tmp_path, monkeypatch, function):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(function, full)
    with pytest.raises(DataError, match=r"small\.tar could not be unpacked in .*: No space left on device"):
        small.fetch(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["small.tar"]


def test_a_damaged_folder_names_the_file(small, tmp_path):
    folder = small.fetch(tmp_path, None)
    (folder / "fog.npy").write_bytes(b"not an array")
    assert small.status(tmp_path, verify=False).state == "present"
    assert "fog.npy" in small.status(tmp_path, verify=True).detail
    (folder / "snow.npy").unlink()
    assert "incomplete: snow.npy" in small.status(tmp_path, verify=False).detail
    with pytest.raises(DataError, match="Delete the folder"):
        small.fetch(tmp_path, None)


def test_it_is_not_for_training(small, tmp_path):
    with pytest.raises(DataError, match="holdfast analyze"):
        small.load(tmp_path, None)


def test_it_is_refused_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(Cifar10C, "fetch", lambda *_: pytest.fail("this would take 2.9 GB"))
    with pytest.raises(DataError, match="test data only"):
        data.load("cifar10-c", tmp_path)
