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


def ended(tmp_path, *command):
    """The exit code, standard output and standard error of a command."""
    path = os.pathsep.join([str(tmp_path), str(Path(holdfast.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


COMMANDS = {
    "run": ["rot-mnist", "er"],
    "tune": ["rot-mnist", "er"],
    "reproduce": ["forward-transfer"],
    "analyze": ["runs"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_in_a_text_that_is_executed(tmp_path, command):
    """As while a dataclass is made; with `python -m`, Python itself then ended the process by the signal."""
    text = "import os, signal; os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(9)]"
    (tmp_path / "pressing.py").write_text(f"exec({text!r})")
    (tmp_path / "runs").mkdir()
    code, out, err = ended(tmp_path, "-m", "holdfast", command, *COMMANDS[command], "--plugin", "pressing")
    assert (code, out, err) == (130, "", "stopped.\n")


def script(tmp_path, before, after):
    """A command `holdfast` that does something before it imports the package, and something before it begins."""
    (tmp_path / "holdfast").mkdir()
    path = tmp_path / "holdfast" / "holdfast"
    path.write_text(f"import atexit, os, signal\n{before}\nfrom holdfast.cli import main\n{after}\nmain()")
    return str(path)


def test_ctrl_c_while_the_command_line_is_read(tmp_path):
    press = "import typer; typer.core.TyperGroup.parse_args = lambda *_: os.kill(os.getpid(), signal.SIGINT)"
    assert ended(tmp_path, script(tmp_path, "", press), "list", "methods") == (130, "", "stopped.\n")


def test_ctrl_c_while_the_process_ends(tmp_path):
    """Once the command has done its work: no traceback of what Python calls at its end."""
    command = script(tmp_path, "", "atexit.register(os.kill, os.getpid(), signal.SIGINT)")
    code, out, err = ended(tmp_path, command, "list", "methods")
    assert (code, err) == (130, "stopped.\n")
    assert "derpp" in out


def test_python_frees_its_memory_undisturbed(tmp_path):
    last = "atexit.register(lambda: print(signal.getsignal(signal.SIGINT).name))"
    code, out, err = ended(tmp_path, script(tmp_path, last, ""), "list", "methods")
    assert (code, err) == (0, "")
    assert out.endswith("SIG_IGN\n")


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
