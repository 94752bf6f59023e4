"""The notebook runs from top to bottom, and what it shows is what comes out."""

import json
import os
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from .blocks import ROOT
from .test_walk import same_output

pytestmark = pytest.mark.pages
PATH = ROOT / "examples" / "forgetting.ipynb"


def outputs(notebook):
    return ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Run by a kernel of this Python, in a folder of its own."""
    folder = tmp_path_factory.mktemp("kernel")
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": start, "display_name": "Python 3", "language": "python"}))
    notebook = nbformat.read(PATH, as_version=4)
    before = os.environ.copy()
    os.environ |= {"JUPYTER_PATH": str(folder), "PYDEVD_DISABLE_FILE_VALIDATION": "1", "IPYTHONDIR": str(folder)}
    try:
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return notebook


def test_it_shows_what_comes_out(executed):
    shown, made = outputs(nbformat.read(PATH, as_version=4)), outputs(executed)
    assert any(shown)
    for ours, theirs in zip(shown, made, strict=True):
        assert same_output(ours, theirs) or _is_near(ours, theirs), f"kept: {ours}\nmade: {theirs}"


def _is_near(ours, theirs):
    """Accuracies in percent may differ by some points from machine to machine."""
    split = [text.split() for text in (ours, theirs)]
    numbers = [[float(word) for word in words if word.isdigit()] for words in split]
    return len(split[0]) == len(split[1]) and all(abs(a - b) <= 10 for a, b in zip(*numbers, strict=True))


def test_it_is_kept_small_and_says_nothing_of_where_it_ran():
    text = PATH.read_text("utf-8")
    assert len(text) < 20_000
    notebook = json.loads(text)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        for out in cell.get("outputs", []):
            assert out["output_type"] == "stream"
            assert "/" not in out["text"] or "home" not in out["text"]
