"""The figures of a page: drawn until the page is full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.report.charts import Chart
from holdfast.report.draw.canvas import inline_svg
from holdfast.report.numbers import Numbers

__all__ = ["Gallery", "Picture", "Pictures"]

FIGURES_BUDGET = 2_800_000
"""Bytes of figures with their numbers; the page as a whole stays below 5 MB."""


class Picture(NamedTuple):
    """A drawn figure."""

    id: str
    title: str
    svg: Any
    numbers: Numbers
    units: int
    """Its width in units of its own letters, which are 10 units high."""


@dataclass
class Pictures:
    """The figures of a section: in view, on demand, and how many found no room."""

    shown: list[Picture] = field(default_factory=list)
    folded: list[Picture] = field(default_factory=list)
    left_out: int = 0


class Gallery:
    """Draws figures until the page is full."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ids: set[str] = set()

    def draw(self, charts: Iterable[Chart]) -> Pictures:
        """The charts as pictures, folded ones last."""
        from markupsafe import Markup

        pictures = Pictures()
        for chart in sorted(charts, key=lambda chart: chart.folded):
            if self._bytes > FIGURES_BUDGET:
                pictures.left_out += 1
                continue
            name = self._name(chart)
            figure = chart.draw()
            svg = inline_svg(figure, name, chart.alt)
            self._bytes += len(svg.encode()) + len(chart.numbers.data_uri())
            picture = Picture(name, chart.title, Markup(svg), chart.numbers, round(72 * figure.get_figwidth()))
            (pictures.folded if chart.folded else pictures.shown).append(picture)
        return pictures

    def _name(self, chart: Chart) -> str:
        names = (f"figure-{chart.slug}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._ids)
        self._ids.add(name)
        return name
