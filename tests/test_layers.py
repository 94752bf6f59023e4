"""Data flows one way: a module imports only from those above it in this table, and from its own package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PACKAGE = Path(holdfast.__file__).parent

# From top to bottom. Modules on one line do not import each other. The top-level package (`from holdfast import run`)
# is the surface for users and the command line: above it, everything is imported from where it is.
LAYERS = [
    ("errors", "files", "pure", "_startup"),
    ("plugins", "schema"),
    ("registry",),
    ("methods",),
    ("config",),
    ("rng",),
    ("ranks",),
    ("nested",),
    ("data",),
    ("augment",),
    ("benchmarks",),
    ("models",),
    ("devices", "workload"),
    ("regularizers",),
    ("checkpoint",),
    ("buffer",),
    ("learners",),
    ("engine",),
    ("evaluation",),
    ("metrics",),
    ("results",),
    ("run_state",),
    ("training",),
    ("analysis",),
    ("experiments",),
    ("sweep",),
    ("tuning",),
    ("report",),
    ("monitor", "loggers", "export"),
    ("matrix", "estimators"),
    ("integrations",),
    ("testing", "bench", "display"),
    ("__init__",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

HEAVY = ("typer", "rich", "matplotlib", "PIL", "pooch", "torchmetrics", "scipy", "jinja2", "ray", "timm")
HEAVY += ("sklearn", "tensorboard", "wandb", "mlflow", "lightning", "onnx", "onnxruntime", "onnxscript", "optuna")
HEAVY += ("requests", "transformers", "peft", "trl", "accelerate")


def unit(path):
    """The entry of the table that a file belongs to: a module, or the package it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(source, path):
    """The entries of the table that a module imports, wherever in the file, with line numbers."""
    package = ("holdfast", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *([node.module] if node.module else [])]
            # `from holdfast import metrics` means the module of that name, if there is one.
            names = [".".join([*module, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first != "holdfast":
                continue
            known = rest and (rest[0] in LEVEL or (PACKAGE / rest[0]).exists() or (PACKAGE / f"{rest[0]}.py").exists())
            yield (rest[0] if known else "__init__"), node.lineno


MODULES = sorted(PACKAGE.rglob("*.py"))


def violations(source, path):
    own = unit(path)
    for name, line in imported_units(source, path):
        if name != own and LEVEL.get(name, len(LAYERS)) >= LEVEL.get(own, -1):
            yield f"{path.relative_to(PACKAGE)}:{line} imports {name}, which is not above {own}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_import_only_from_above(path):
    assert unit(path) in LEVEL, f"{unit(path)} has no place in the table: add it where it belongs"
    assert not list(violations(path.read_text("utf-8"), path))


def test_the_table_names_each_module_once():
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("buffer.py", "from holdfast.errors import UsageError", True),
        ("buffer.py", "import torch", True),
        ("results.py", "from holdfast import metrics", True),
        ("learners/er.py", "from holdfast.learners.base import Learner", True),
        ("learners/er.py", "from .base import Learner", True),
        ("learners/er.py", "from ..buffer import Reservoir", True),
        ("__init__.py", "from holdfast.training import run", True),
        ("__main__.py", "from holdfast.cli import main", True),
        ("buffer.py", "from holdfast.learners import Learner", False),
        ("buffer.py", "import holdfast.training", False),
        ("buffer.py", "def f():\n    import holdfast.training", False),
        ("metrics.py", "from holdfast import results", False),
        ("cli.py", "from holdfast import __version__", True),
        ("__init__.py", "from holdfast.cli import main", False),
        ("buffer.py", "from holdfast import RunConfig", False),
        ("buffer.py", "import holdfast", False),
        ("buffer.py", "from . import training", False),
        ("learners/er.py", "from ..training import run", False),
        ("learners/er.py", "from .. import training", False),
        ("errors.py", "from holdfast.unheard_of import thing", False),
        ("bench.py", "from holdfast.display import thing", False),
    ],
)
def test_the_reader_of_imports_itself(file, line, allowed):
    assert (not list(violations(line, PACKAGE / file))) is allowed


def test_import_is_light_and_silent():
    code = "import holdfast, holdfast.analysis, holdfast.data, sys; print(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in answer.stdout.split()}
    assert {"holdfast", "torch"} <= loaded
    assert not loaded & set(HEAVY)
    assert answer.stderr == ""


@pytest.mark.parametrize("name", holdfast.__all__)
def test_everything_announced_is_there(name):
    assert hasattr(holdfast, name)
