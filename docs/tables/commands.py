"""The command line in Markdown, from the program itself."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import typer.main

from holdfast.cli import app
from tables.common import table


def commands() -> str:
    """Every command with its arguments and options, in the order of their names."""
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    return "\n\n".join(_command(name, command) for name, command in sorted(found.items()))


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"holdfast {name}")
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    paragraphs = (fill(_text(part), 118, break_on_hyphens=False) for part in command.help.split("\n\n"))
    parts = [f"## holdfast {name}", *paragraphs, f"```text\n{usage}\n```"]
    arguments, options = ([p for p in command.params if p.param_type_name == kind] for kind in ("argument", "option"))
    if arguments:
        rows = ([f"`{p.metavar or p.name.upper()}`", _text(p.help)] for p in arguments)
        parts.append(table(["argument", ""], rows, words=1))
    rows = ([_names(p), _text(p.help), _default(p)] for p in options)
    parts.append(table(["option", "", "default"], rows, words=2))
    return "\n\n".join(parts)


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    shown = option.default is not None and not (option.is_flag or option.multiple or callable(option.default))
    return f"`{option.default}`" if shown else ""


def _text(text: str | None) -> str:
    """One line, with what Markdown would take for markup left as it is."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
