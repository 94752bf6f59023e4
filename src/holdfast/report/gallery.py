"""The figures of a page: drawn until the page is full, and placed by their size."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.analysis.comparisons import Comparison
from holdfast.report.charts import Chart
from holdfast.report.draw.canvas import inline_svg
from holdfast.report.numbers import Numbers

__all__ = ["Gallery", "Picture", "Pictures"]

FIGURES_BUDGET = 2_800_000
"""Bytes of figures with their numbers; the page as a whole stays below 5 MB."""
THIRD, HALF = 400, 640
"""Units up to which figures stand three or two in a row."""


class Picture(NamedTuple):
    """A drawn figure."""

    id: str
    title: str
    svg: Any
    numbers: Numbers
    units: int
    """Its width in units of its own letters, which are 10 units high."""

    @property
    def size(self) -> str:
        """The share of the page's width that it takes."""
        return "third" if self.units <= THIRD else "half" if self.units <= HALF else "wide"


@dataclass
class Pictures:
    """The figures of a section: in view, on demand, and how many found no room."""

    shown: list[Picture] = field(default_factory=list)
    folded: list[Picture] = field(default_factory=list)
    left_out: int = 0


class Gallery:
    """Draws figures until the page is full; a comparison contained in one already drawn is not drawn again."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ids: set[str] = set()
        self._drawn: list[set[str]] = []

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

    def fresh(self, found: Iterable[Comparison]) -> list[Comparison]:
        """The comparisons that show something new."""
        new = []
        for comparison in found:
            runs = {run.config.fingerprint for variant in comparison.variants for run in variant.results}
            if not any(runs <= drawn for drawn in self._drawn):
                self._drawn.append(runs)
                new.append(comparison)
        return new

    def _name(self, chart: Chart) -> str:
        names = (f"figure-{chart.slug}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        name = next(name for name in names if name not in self._ids)
        self._ids.add(name)
        return name
