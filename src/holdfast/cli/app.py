"""The command itself: shared options, and errors turned into one sentence and an exit code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import holdfast
from holdfast.display import errors, replace_unknown_signs
from holdfast.errors import HoldfastError

__all__ = ["DataRoot", "Device", "Json", "Out", "Plugins", "Seed", "app", "import_plugins", "main"]

app = typer.Typer(
    help="Networks that keep what they learned: experience replay with consistency regularization.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Folder of the data sets. Default: $HOLDFAST_DATA, or the user's cache.", metavar="DIR"
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for results.", metavar="DIR")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python module to import first; may be repeated.", metavar="MODULE"),
]
Seed = Annotated[int, typer.Option(help="Decides everything random.")]


def import_plugins(names: list[str] | None) -> None:
    """Import modules that register regularizers, learners or benchmarks; the current folder counts."""
    sys.path.insert(0, "")
    for name in names or []:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise HoldfastError(f"plugin '{name}' could not be imported: {error}.") from error


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(holdfast.__version__)
        raise typer.Exit


def main() -> None:
    """The `holdfast` command: errors become one sentence and an exit code."""
    replace_unknown_signs()
    try:
        app()
    except HoldfastError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("stopped.")
        sys.exit(130)
