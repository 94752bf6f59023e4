import socket
import sys

import pytest

from holdfast.data import DATASETS, Dataset, load
from holdfast.data.catalogue import Status
from holdfast.data.download import ArchivedSource, archive_status, download
from holdfast.data.files import Archive
from holdfast.errors import DataError

from .conftest import md5

CONTENT = bytes(range(256)) * 12_000  # three chunks


@pytest.fixture
def archive(server):
    folder, address, _ = server
    (folder / "set.zip").write_bytes(CONTENT)
    return Archive(f"{address}/set.zip", md5(CONTENT), len(CONTENT))


def test_download_puts_the_file_in_place_and_reports(archive, tmp_path):
    root, calls = tmp_path / "new" / "root", []
    path = download(archive, root, lambda *call: calls.append(call))
    assert path == root / "set.zip"
    assert path.read_bytes() == CONTENT
    assert {(what, total) for what, _, total in calls} == {("download set.zip", len(CONTENT))}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert done[-1] == len(CONTENT)
    assert archive_status(archive, root, verify=True).state == "verified"


def test_what_is_there_is_not_downloaded_again(archive, server, tmp_path):
    (tmp_path / "set.zip").write_bytes(CONTENT)
    assert ArchivedSource(archive, "set").fetch(tmp_path, None) == tmp_path / "set.zip"
    assert server[2] == []


def test_a_damaged_file_is_replaced(archive, tmp_path):
    (tmp_path / "set.zip").write_bytes(CONTENT[:-1])
    source = ArchivedSource(archive, "set")
    assert source.status(tmp_path, verify=True).state == "damaged"
    source.fetch(tmp_path, None)
    assert (tmp_path / "set.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(archive, tmp_path):
    wrong = Archive(archive.url, md5(b"something else"), 1)
    root = tmp_path / "root"
    with pytest.raises(DataError, match="does not have the checksum"):
        download(wrong, root, retries=0)
    assert list(root.iterdir()) == []


def test_a_failed_attempt_is_repeated(archive, server, tmp_path):
    served = server[0] / "set.zip"
    served.write_bytes(b"half")
    seen = []

    def mend(what, done, total):
        seen.append(done)
        if total == 4:
            served.write_bytes(CONTENT)

    assert download(archive, tmp_path, mend, retries=1).read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)


def assert_helpful(error, archive, root):
    assert archive.url in str(error)
    assert f"put it at {root / archive.name}" in str(error)
    assert not root.exists() or list(root.iterdir()) == []


def test_no_connection_says_what_to_do(tmp_path):
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        gone = Archive(f"http://127.0.0.1:{unused.getsockname()[1]}/set.zip", "md5:0", 1)
        root = tmp_path / "root"
        with pytest.raises(DataError, match="no connection") as caught:
            download(gone, root, retries=0)
    assert_helpful(caught.value, gone, root)


def test_a_connection_that_breaks_off_leaves_nothing(archive, server, tmp_path):
    (server[0] / "set.short").write_bytes(CONTENT)
    short = Archive(archive.url.replace(".zip", ".short"), archive.checksum, 1)
    root = tmp_path / "root"
    with pytest.raises(DataError, match="broke off") as caught:
        download(short, root, retries=0)
    assert_helpful(caught.value, short, root)


def test_an_address_that_is_gone_says_what_to_do(archive, tmp_path):
    gone = Archive(archive.url + ".gone", archive.checksum, 1)
    root = tmp_path / "root"
    with pytest.raises(DataError, match="404") as caught:
        download(gone, root, retries=0)
    assert_helpful(caught.value, gone, root)


def test_a_root_that_cannot_be_written_says_what_to_do(archive, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="put it at"):
        download(archive, tmp_path / "file" / "root", retries=0)


def test_without_pooch_the_extra_is_named(archive, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"pip install 'holdfast\[download\]'") as caught:
        download(archive, tmp_path / "root")
    assert_helpful(caught.value, archive, tmp_path / "root")


def test_load_fetches_what_is_missing_unless_told_not_to(tmp_path, monkeypatch):
    class Missing:
        fetched = 0

        def status(self, root, verify):
            return Status("missing", root, "Not there.", 0)

        def fetch(self, root, progress):
            self.fetched += 1
            return root

        def load(self, root, progress):
            return Dataset

    source = Missing()
    monkeypatch.setitem(DATASETS._entries, "somewhere-else", source)
    load("somewhere-else", tmp_path, download=False)
    assert source.fetched == 0
    load("somewhere-else", tmp_path)
    assert source.fetched == 1
