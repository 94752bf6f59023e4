"""What every figure is drawn on: a page measured in inches, the panels on it, and its way into files and pages."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.files import telling
from holdfast.report.draw.style import INK, STYLE, theme_colors
from holdfast.report.numbers import Numbers
from holdfast.report.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["add_note", "add_panel", "blank", "inline_svg", "per_row", "places", "save_figure", "text_width"]

COLOR = re.compile("|".join(theme_colors()))
NUMBER = re.compile(r"-?\d+\.\d{2,}")
IDS = re.compile(r'(\bid="|url\(#|href="#)')
DROPPED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
ATTRIBUTES = re.compile(r' (?:xmlns(?::\w+)?|version|transform)="(?:http[^"]*|1\.1|rotate\(-0[^"]*)"')
FONT = re.compile(r"font: ([^;\"]*?)(\d+(?:\.\d+)?px) '[^;\"]*|font-family: '[^;\"]*; ")
GROUP = re.compile(r'^g id="[^"]*"')  # nothing refers to groups


@contextmanager
def blank(width: float, height: float, title: str = "", *, grid: str = "y") -> Iterator[Figure]:
    """An empty figure of so many inches in the house style, its title at the top left; wider if the title needs it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    width = max(width, 0.25 + 0.1 * len(title))
    with mpl.rc_context(STYLE | {"axes.grid": bool(grid), "axes.grid.axis": grid or "both"}):
        figure = Figure(figsize=(width, height), facecolor=INK["paper"])
        if title:
            figure.suptitle(
                visible(title), x=0.12 / width, y=1 - 0.1 / height, ha="left", va="top", fontweight="bold", fontsize=12
            )
        yield figure


def add_panel(figure: Figure, box: tuple[float, float, float, float], **options: Any) -> Axes:
    """Axes at (left, top, width, height), in inches from the figure's top left corner."""
    left, top, wide, tall = box
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + tall) / height, wide / width, tall / height), **options)


def add_note(figure: Figure, text: str, *, left: float) -> None:
    """A note at the bottom, `left` inches from the edge."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 0.08 / height, text, fontsize=9, color=INK["muted"], va="bottom")


def per_row(panels: int, most: int) -> tuple[int, int]:
    """How many panels to put in a row so that all rows are about equally full, at most `most`; and how many rows."""
    across = ceil(panels / ceil(panels / most))
    return across, ceil(panels / across)


def places(panels: int, across: int, size: tuple[float, float], left: float, top: float) -> list[tuple[float, float]]:
    """Left and top in inches of panels of one `size` (width, height), in rows of `across`."""
    return [(left + number % across * size[0], top + number // across * size[1]) for number in range(panels)]


def text_width(texts: Iterator[str] | list[str]) -> float:
    """Inches that the longest of the texts takes beside a panel."""
    return 0.085 * max(map(len, texts), default=0)


def save_figure(figure: Figure, path: Path, numbers: Numbers | None = None, *, json: bool = True) -> Path:
    """Write `path` as PNG and SVG, with the numbers behind it as CSV (and JSON) if given; returns the PNG's path."""
    import matplotlib as mpl

    with telling(HoldfastError, f"the figure could not be written to {path.parent}"), mpl.rc_context(STYLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=160)
        if numbers is not None:
            path.with_suffix(".csv").write_text(numbers.csv(), encoding="utf-8")
            if json:
                path.with_suffix(".json").write_text(numbers.json(), encoding="utf-8")
    return path.with_suffix(".png")


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an `<svg>` element, described by `alt` to those who do not see it.

    Colours become CSS variables of the page, so that one figure serves the light and the dark theme; `name` starts
    every id, since a page has many figures.
    """
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None}, facecolor="none")
    svg = DROPPED.sub("", text.getvalue())
    parts = re.split(r"(>[^<]*<)", svg)  # Only markup is touched; between tags stand names that come from files.
    svg = "".join(part if number % 2 else _markup(part, name) for number, part in enumerate(parts))
    svg = re.sub(r">\s+<", "><", svg).strip()
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


def _markup(part: str, name: str) -> str:
    part = GROUP.sub("g", part).replace(" \n", " ")
    part = IDS.sub(rf"\g<1>{name}-", part)
    part = FONT.sub(_inherited_font, ATTRIBUTES.sub("", part).replace("xlink:href", "href"))
    part = COLOR.sub(lambda match: f"var(--{theme_colors()[match[0]][0]})", part)
    return part if "base64" in part else NUMBER.sub(lambda match: f"{float(match[0]):.1f}", part)


def _inherited_font(match: re.Match[str]) -> str:
    """The size and weight without the family, which is the page's."""
    if match[2] is None:
        return ""
    weight = f"font-weight: {match[1].strip()}; " if match[1].strip() else ""
    return f"{weight}font-size: {match[2]}"
