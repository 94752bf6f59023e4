"""What mkdocs asks for while it builds the site: the command line's page, and links that leave the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer.main

from holdfast.cli import app

DOCS = Path(__file__).resolve().parent
COMMANDS = "<!-- commands -->"
NUMBER = re.compile(r"\{\{([\w.-]+)\}\}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page as it is built: called by mkdocs for every page."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    markdown = NUMBER.sub(lambda match: number(match[1]), markdown)
    return without_links_outside(markdown, DOCS / page.file.src_uri)


def number(name: str) -> str:
    """A number behind a picture, with one decimal: `trust.er.ece` is that of pictures/trust.json."""
    picture, *keys = name.split(".")
    value = json.loads((DOCS / "pictures" / f"{picture}.json").read_text("utf-8"))
    for key in keys:
        value = value[key]
    return f"{value:.1f}"


def without_links_outside(markdown: str, path: Path) -> str:
    """Links to files of the repository that are no part of the site, such as results, become plain text."""

    def keep(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        return match[0] if target.is_relative_to(DOCS) else match[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", keep, markdown)


def commands() -> str:
    """The command line in Markdown, from the program itself."""
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    return "\n".join(_command(name, command) for name, command in sorted(found.items()))


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"holdfast {name}")
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    lines = [f"## holdfast {name}", "", *_paragraphs(command.help), "```text", usage, "```", ""]
    arguments, options = ([p for p in command.params if p.param_type_name == kind] for kind in ("argument", "option"))
    if arguments:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{p.metavar or p.name.upper()}` | {_text(p.help)} |" for p in arguments]
        lines.append("")
    lines += ["| option | | default |", "|---|---|---|"]
    lines += [f"| {_names(p)} | {_text(p.help)} | {_default(p)} |" for p in options]
    return "\n".join([*lines, ""])


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    shown = option.default is not None and not (option.is_flag or option.multiple or callable(option.default))
    return f"`{option.default}`" if shown else ""


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (_text(part), "")]


def _text(text: str | None) -> str:
    """One line, with what Markdown would take for markup left as it is."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
