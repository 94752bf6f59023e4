"""Ctrl-C while the command is still importing: no traceback, and it is never ignored."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import _startup

# Presses Ctrl-C as soon as a certain module is being imported.
PRESS = """
import os, signal, sys, threading, time

def press():
    while os.environ["UNTIL"] not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("way", "until"), [("script", "torch"), ("module", "torch.nn"), ("script", "holdfast.cli.app")]
)
def test_ctrl_c_while_importing(tmp_path, way, until):
    (tmp_path / "sitecustomize.py").write_text(PRESS)
    (tmp_path / "holdfast").write_text("from holdfast.cli import main; main()")
    command = [str(tmp_path / "holdfast")] if way == "script" else ["-m", "holdfast"]
    path = os.pathsep.join([str(tmp_path), str(Path(holdfast.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *command, "list"],
        env=os.environ | {"PYTHONPATH": path, "UNTIL": until},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "stopped.\n")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("argv", "original", "starting"),
    [
        (["/usr/bin/holdfast", "list"], ["python", "/usr/bin/holdfast", "list"], True),
        (["C:/holdfast.exe"], ["python", "C:/holdfast.exe"], True),
        (["-m", "run", "x"], ["python", "-m", "holdfast", "run", "x"], True),
        (["-m"], ["python", "-X", "dev", "-m", "holdfast"], True),
        (["-m", "holdfast"], ["python", "-m", "pytest", "holdfast"], False),
        (["train.py"], ["python", "train.py"], False),
        (["-c"], ["python", "-c", "import holdfast"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_is_a_command(monkeypatch, argv, original, starting):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert _startup.is_starting() is starting


def test_programs_that_import_holdfast_have_the_usual_ctrl_c():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
