"""The command itself: options that several commands share, and errors as one sentence and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

import holdfast
from holdfast import _startup
from holdfast.display import errors, replace_unknown_signs
from holdfast.errors import HoldfastError
from holdfast.plugins import import_plugins

__all__ = ["DataRoot", "Device", "Json", "ListCommand", "Out", "Plugins", "Seed", "app", "import_plugins", "main"]

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


class ListCommand(TyperCommand):
    """A command with a list of arguments; its help leaves out their type, which is Python's and not the reader's."""

    def get_help(self, ctx: Any) -> str:
        """The text of --help."""
        return re.sub(r" <list\[\w+\]>", "", super().get_help(ctx))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(holdfast.__version__)
        raise typer.Exit


def main() -> None:
    """The `holdfast` command: errors become one sentence and an exit code."""
    replace_unknown_signs()
    try:
        _startup.started()
        with _flushed():
            app()
    except HoldfastError as error:
        _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        errors.print("stopped.")
        sys.exit(130)
    except OSError as error:
        _end(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        # PyTorch has an exception of its own only for the memory of a GPU.
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        reason = str(error).partition("\n")[0] or "Python has none left."
        _end(f"there is not enough memory: {reason} Choose a smaller buffer, batch or network.")


@contextmanager
def _flushed() -> Iterator[None]:
    """Write standard output at the end of the block, where a full disk can still be told."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again at its end
            raise


def _end(message: str, code: int = 1) -> None:
    errors.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)
