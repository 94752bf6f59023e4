"""Small files in the formats of the published data sets, and the published files themselves where they are at hand."""

import hashlib
import http.server
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

REAL_DATA = Path(__file__).parents[2].parent / "shared" / "data"


def md5(content: bytes) -> str:
    return "md5:" + hashlib.md5(content).hexdigest()


def cifar_pickle(value: object) -> bytes:
    """As the published files: bytes for strings, and the name numpy's array builder had at the time."""
    return pickle.dumps(value, protocol=3).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine: (the folder it serves, its address, the paths asked for so far)."""
    folder, asked = tmp_path / "served", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

        def send_header(self, keyword, value):
            """Announces more of a *.short file than there is, as a connection that breaks off would."""
            longer = keyword == "Content-Length" and self.path.endswith(".short")
            super().send_header(keyword, str(int(value) + 1) if longer else value)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def real_root(tmp_path_factory):
    """A data root with the published CIFAR files."""
    script = REAL_DATA / "unpack.py"
    if not script.is_file():
        pytest.skip(f"the published files are not at {REAL_DATA}")
    root = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, script, root, "cifar10", "cifar100"], check=True, capture_output=True)
    return root
