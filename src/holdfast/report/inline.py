"""A figure -> SVG inside a page: small, in the page's fonts and themes, its ids its own."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from holdfast.report.figures import STYLE
from holdfast.report.styles import theme_colors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["inline_svg"]

COLOR = re.compile("|".join(theme_colors()))
NUMBER = re.compile(r"-?\d+\.\d{2,}")
IDS = re.compile(r'(\bid="|url\(#|href="#)')
DROPPED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
ATTRIBUTES = re.compile(r' (?:xmlns(?::\w+)?|version|transform)="(?:http[^"]*|1\.1|rotate\(-0[^"]*)"')
FONT = re.compile(r"font: ([^;\"]*?)(\d+(?:\.\d+)?px) '[^;\"]*|font-family: '[^;\"]*; ")
GROUP = re.compile(r'^g id="[^"]*"')  # nothing refers to groups


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
