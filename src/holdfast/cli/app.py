"""The command itself: options that several commands share, and errors as one sentence and an exit code."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape
from typer.core import TyperCommand

import holdfast
from holdfast import _startup
from holdfast.display import errors, replace_unknown_signs
from holdfast.errors import HoldfastError, UnknownNameError, UsageError
from holdfast.plugins import import_plugins

__all__ = ["BufferSize", "DataRoot", "Device", "Epochs", "Jobs", "Json", "Out", "Plugins", "Seed", "Settings", "Tasks"]
__all__ += ["app", "import_plugins", "main"]

FROM_PLUGINS = ("benchmark", "method", "model", "experiment")

Function = TypeVar("Function", bound=Callable[..., Any])


class _Command(TyperCommand):
    """A command whose help names its arguments in capitals and leaves out types, which are Python's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "argument" and parameter.metavar is None:
                parameter.metavar = str(parameter.name).upper()

    def invoke(self, ctx: Any) -> Any:
        """Ctrl-C is told in a word; left to itself, typer ends without one. An unknown name may be one of a plugin."""
        try:
            _startup.started()  # not earlier: typer reads the command line, and would catch the exception
            return super().invoke(ctx)
        except UnknownNameError as error:
            if error.kind not in FROM_PLUGINS or ctx.params.get("plugin", True):  # some commands import no plugins
                raise
            raise UsageError(f"{error} If a plugin has it, name its module: --plugin MODULE.") from error
        except KeyboardInterrupt as stop:
            errors.print(str(stop) or "stopped.", highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(130) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def get_help(self, ctx: Any) -> str:
        words = {"int": "N", "int range": "N", "float": "N", "float range": "N", "path": "PATH"}

        def plain(match: re.Match[str]) -> str:
            option, kind = match.groups()
            return f"{option}{words.get(kind, 'TEXT') if option.startswith('-') else ''}".ljust(len(match[0]))

        return re.sub(r"(?<=^  )([\w-]+ )<([\w\[\] ]+)>", plain, super().get_help(ctx), flags=re.MULTILINE)


class _App(typer.Typer):
    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=_Command, **options)


app = _App(
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
Jobs = Annotated[
    int | None, typer.Option(help="Runs at a time. Default: one per core; on a GPU, as many as make it faster.", min=1)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for results.", metavar="DIR")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python module to import first; may be repeated.", metavar="MODULE"),
]

# What a run consists of, beside its benchmark and its method.
BufferSize = Annotated[int | None, typer.Option(help="Samples the buffer holds. Default: 200.")]
Seed = Annotated[int | None, typer.Option(help="Decides everything random. Default: 0.")]
Tasks = Annotated[int | None, typer.Option(help="Number of tasks.")]
Epochs = Annotated[int | None, typer.Option(help="Epochs per task.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change any setting; may be repeated.", metavar="KEY=VALUE")
]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        print(holdfast.__version__)
        raise typer.Exit


def main() -> None:
    """The `holdfast` command: errors become one sentence and an exit code."""
    for name in ("stdout", "stderr"):  # None if the caller closed it
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    replace_unknown_signs()
    try:
        try:
            app()
        finally:
            _startup.ended()
            _flush()
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


def _flush() -> None:
    """Write standard output now, while a full disk can still be told."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again at its end
        raise


def _end(message: str, code: int = 1) -> None:
    errors.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)
