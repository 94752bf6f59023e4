"""Plugins, and the current folder: code in it runs only when somebody asks for it by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import HoldfastError, UsageError
from holdfast.plugins import import_plugins

SOURCE = Path(holdfast.__file__).parents[1]


@pytest.fixture
def hostile(tmp_path):
    """A folder with traps: modules of names that Holdfast or Python import, each of which leaves a file."""
    folder = tmp_path / "mailed"
    folder.mkdir()
    for name in ("matplotlib", "tensorboard", "multiprocessing", "ray", "rich", "jinja2", "unicodedata", "runpy"):
        (folder / f"{name}.py").write_text(f"open('sprung-{name}', 'w').close()\n")
    return folder


def in_folder(folder, script, *arguments):
    """Run a script that lies elsewhere, as the command `holdfast` does, or a module; returns what it printed."""
    path = folder.parent / "bin" / "holdfast"
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    command = [str(path)] if script else ["-m"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN = ["run", "rot-mnist", "er", "--tasks", "2", "--set", "train_limit=100", "--device", "cpu"]
RUN += ["--log", "tensorboard:logs"]


def test_a_command_imports_nothing_from_the_current_folder(hostile):
    in_folder(hostile, "from holdfast.cli import main; main()", *RUN)
    assert list(hostile.glob("sprung-*")) == []


@pytest.mark.slow
def test_as_a_module_nothing_after_holdfast_itself(hostile):
    """Python itself puts the current folder first while it imports the package."""
    for name in ("multiprocessing", "rich", "unicodedata", "runpy"):
        (hostile / f"{name}.py").unlink()
    in_folder(hostile, "", "holdfast", *RUN)
    assert list(hostile.glob("sprung-*")) == []


SWEEP = """
from pathlib import Path
from holdfast.config import RunConfig
from holdfast.sweep import ProcessRunner, sweep

if __name__ == "__main__":
    config = RunConfig.preset("rot-mnist", "er", tasks=2, train_limit=100)
    print(len(sweep([config], Path("runs"), runner=ProcessRunner(1), device="cpu").done))
"""


def test_workers_import_nothing_from_the_current_folder(hostile):
    assert in_folder(hostile, SWEEP) == "1\n"
    assert list(hostile.glob("sprung-*")) == []


@pytest.fixture
def fresh(monkeypatch):
    """What a plugin imports is forgotten after the test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_plugin_and_its_neighbours_are_found_in_the_folder_and_the_path_is_as_before(tmp_path, monkeypatch, fresh):
    (tmp_path / "our_plugin.py").write_text("from our_neighbour import seen\n")
    (tmp_path / "our_neighbour.py").write_text("import statistics; seen = statistics.__file__\n")
    (tmp_path / "statistics.py").write_text("raise AssertionError('it must not take the place of the installed one')")
    monkeypatch.delitem(sys.modules, "statistics")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    import_plugins(["our_plugin"])
    assert sys.path == before
    assert Path(sys.modules["our_plugin"].__file__).parent == tmp_path
    with pytest.raises(ImportError):
        __import__("our_second_neighbour")


def test_a_plugin_is_found_in_a_folder_that_is_named(tmp_path, fresh):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "inside.py").touch()
    import_plugins(["package.inside"], tmp_path)
    assert "package.inside" in sys.modules
    import_plugins(None)


def test_a_file_is_not_the_name_of_a_module(tmp_path):
    (tmp_path / "named_like_a_file.py").touch()
    with pytest.raises(HoldfastError, match=r"'named_like_a_file.py' could not be imported: .*\. Leave out '\.py'"):
        import_plugins(["named_like_a_file.py"], tmp_path)


@pytest.mark.parametrize("name", ["", ".", ".x", "a..b", "my-plugin", "a b", "../x", "x.py/"])
def test_what_is_not_the_name_of_a_module(name):
    with pytest.raises(UsageError, match="is not the name of a Python module"):
        import_plugins([name])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("import nothing_of_this", "No module named"),
        ("1 / 0", "ZeroDivisionError: division"),
        ("(", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        (
            "import holdfast as hf; hf.REGULARIZERS.register('mse', '')(print)",
            r"regularizer 'mse' is registered already; choose another name\.$",
        ),
    ],
)
def test_a_plugin_that_fails(tmp_path, content, says, fresh):
    (tmp_path / "failing_plugin.py").write_text(content)
    before = list(sys.path)
    with pytest.raises(HoldfastError, match=rf"plugin 'failing_plugin' could not be imported: {says}"):
        import_plugins(["failing_plugin"], tmp_path)
    assert sys.path == before


@pytest.mark.slow
def test_workers_on_ray_import_nothing_from_the_current_folder(hostile):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[cluster]'")
    script = SWEEP.replace("ProcessRunner(1)", "RayRunner(jobs=1)")
    script = script.replace("ProcessRunner, sweep", "sweep\nfrom holdfast.sweep.cluster import RayRunner")
    (hostile / "torch.py").write_text("open('sprung-torch', 'w').close()\n")
    assert in_folder(hostile, script) == "1\n"
    assert list(hostile.glob("sprung-*")) == []
