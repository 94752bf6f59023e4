"""One self-contained HTML page from whatever results are there."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any, NamedTuple

from holdfast.analysis.findings import Findings
from holdfast.experiments import JUDGED, Experiment, Results, Table, claims
from holdfast.report.analyses import charts as analysis_charts
from holdfast.report.charts import Chart, comparison_bars, comparison_charts, matrix_charts, table_charts
from holdfast.report.groups import Comparison, comparisons, slug
from holdfast.report.inline import inline_svg
from holdfast.report.numbers import Numbers
from holdfast.report.styles import DARK, LIGHT, theme_colors
from holdfast.report.tables import cell_numbers, column_title
from holdfast.report.views import Block, claim_view, comparison_block, places, run_numbers, table_blocks
from holdfast.results import RunResult

__all__ = ["html_page"]

FIGURES_BUDGET = 2_800_000
"""Bytes of figures with their numbers; the page as a whole stays below 5 MB."""
MOST_SKIPPED = 200
"""Skipped files named on the page."""


class Picture(NamedTuple):
    """A drawn figure."""

    id: str
    title: str
    svg: Any
    numbers: Numbers
    wide: bool
    units: int
    """How wide it is, in the units of its own letters."""


@dataclass
class Pictures:
    """The figures of a section: in view, on demand, and how many found no room."""

    shown: list[Picture] = field(default_factory=list)
    folded: list[Picture] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True)
class Section:
    """An experiment, or the runs that belong to none."""

    id: str
    name: str
    title: str
    about: str
    blocks: list[Block]
    numbers: Numbers | None
    figures: Pictures
    notes: tuple[str, ...] = ()


class Tile(NamedTuple):
    """A number of the summary."""

    what: str
    value: str
    of: str = ""


def html_page(
    results: Results, tables: Sequence[Table], analyses: Sequence[Findings] = (), *, title: str = "Holdfast report"
) -> str:
    """The page, complete in one file. `tables` are the experiments to show; other runs follow in their own section.

    Everything that comes from files is escaped, and only the page's own script may run in it.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("holdfast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _template("report.js")
    filled = [table for table in tables if table.count("missing") < len(table.verdicts)]
    runs = [stored.result for stored in results]
    gallery = _Gallery()
    return environment.get_template("report.html").render(
        title=title,
        subtitle=_subtitle(runs),
        version=_version(),
        css=Markup(_template("report.css")),
        light=Markup(_variables(LIGHT, dark=False)),
        dark=Markup(_variables(DARK, dark=True)),
        script=Markup(script),
        script_hash="sha256-" + b64encode(sha256(script.encode()).digest()).decode(),
        tiles=_tiles(results, tables, filled),
        tables=filled,
        overview=_overview(tables) if filled else [],
        claims=[claim_view(claim) for claim in claims(v for table in filled for v in table.verdicts)] if filled else [],
        sections=[
            *_experiment_sections(filled, gallery),
            *_other_sections(runs, filled, gallery),
            *_analysis_sections(analyses, gallery),
        ],
        runs=places(runs),
        run_numbers=run_numbers(runs),
        cell_numbers=cell_numbers(filled),
        skipped=results.skipped[:MOST_SKIPPED],
        skipped_more=max(0, len(results.skipped) - MOST_SKIPPED),
    )


class _Gallery:
    """Draws figures until the page is full; a comparison contained in one already drawn is not drawn again."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ids: set[str] = set()
        self._drawn: list[set[str]] = []

    def hang(self, charts: Iterable[Chart]) -> Pictures:
        """The charts as pictures."""
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
            inches = figure.get_figwidth()
            picture = Picture(name, chart.title, Markup(svg), chart.numbers, inches > 8, round(72 * inches))
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
        name, number = f"figure-{chart.slug}", 1
        while name in self._ids:
            number += 1
            name = f"figure-{chart.slug}-{number}"
        self._ids.add(name)
        return name


def _experiment_sections(tables: Sequence[Table], gallery: _Gallery) -> list[Section]:
    sections = []
    for table in tables:
        experiment = table.experiment
        runs = _unique(stored.result for verdict in table.verdicts for stored in verdict.stored)
        sections.append(
            Section(
                id=f"experiment-{experiment.name}",
                name=experiment.name,
                title=experiment.title,
                about=f"{experiment.source}. {experiment.shows}{_absent(table)}",
                blocks=table_blocks(table),
                numbers=cell_numbers([table]),
                figures=gallery.hang([*table_charts(table), *_run_charts(experiment, comparisons(runs), gallery)]),
            )
        )
    return sections


def _run_charts(experiment: Experiment, found: Sequence[Comparison], gallery: _Gallery) -> list[Chart]:
    """The figures of an experiment's runs that no other shows; an experiment about matrices shows them in any case."""
    if experiment.figure == "matrices":
        return [replace(chart, folded=False) for comparison in found for chart in matrix_charts(comparison)]
    return [chart for comparison in gallery.fresh(found) for chart in comparison_charts(comparison)]


def _other_sections(runs: Sequence[RunResult], tables: Sequence[Table], gallery: _Gallery) -> list[Section]:
    """Runs that are part of no experiment shown."""
    used = {stored.config for table in tables for verdict in table.verdicts for stored in verdict.stored}
    others = comparisons(run for run in runs if run.config not in used)
    if not others:
        return []
    charts = [chart for other in others for chart in (comparison_bars(other), *comparison_charts(other))]
    about = "Runs that belong to none of the experiments above, for instance a demo or settings of one's own."
    blocks = [comparison_block(other) for other in others]
    title = "Other runs" if tables else "Results"
    return [Section("other", title, title, about if tables else "", blocks, None, gallery.hang(charts))]


def _analysis_sections(analyses: Sequence[Findings], gallery: _Gallery) -> list[Section]:
    """What the logits say beyond accuracy, a section per comparison."""
    names = unique_names([found.title for found in analyses])
    return [
        Section(
            id=f"analyses-{slug(name)}",
            name=f"Analyses: {name}",
            title=f"Can it be trusted? {name}",
            about=_about(found),
            blocks=[],
            numbers=None,
            figures=gallery.hang(analysis_charts(found)),
            notes=tuple(f"{claim.statement}: {claim.outcome} ({claim.detail})" for claim in found.claims),
        )
        for name, found in zip(names, analyses, strict=True)
    ]


def _about(found: Findings) -> str:
    seeds = sorted({len(summary.seeds) for summary in found.summaries})
    count = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' * (seeds[0] != 1)}"
    robust = ", robustness to corrupted images" if any(summary.robustness for summary in found.summaries) else ""
    return f"Calibration, recency and transfer{robust}, of the final models; {count} a method."


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where one comes again."""
    return [f"{name} ({n})" if (n := names[: at + 1].count(name)) > 1 else name for at, name in enumerate(names)]


def _absent(table: Table) -> str:
    """Which columns have no result at all."""
    filled = {verdict.cell.column for verdict in table.verdicts if verdict.n}
    absent = [column_title(column) for column in table.columns if column not in filled]
    return f" No results yet for {', '.join(absent)}." if absent else ""


def _subtitle(runs: Sequence[RunResult]) -> str:
    benchmarks = sorted({run.config.benchmark for run in runs})
    return f"{len(runs)} result{'' if len(runs) == 1 else 's'} on {', '.join(benchmarks)}" if runs else "No results"


def _tiles(results: Results, tables: Sequence[Table], filled: Sequence[Table]) -> list[Tile]:
    agree, differ, undecided = (sum(table.count(status) for table in filled) for status in JUDGED)
    tiles = [Tile("results", f"{len(results):,}", f"{len({s.config.change(seed=0) for s in results}):,} configs")]
    if filled:
        found = claims(v for table in filled for v in table.verdicts)
        tiles += [
            Tile("experiments covered", str(len(filled)), f"of {len(tables)}"),
            Tile("cells that agree with the paper", f"{agree:,}", f"of {agree + differ + undecided:,} compared"),
            Tile("cells that differ", f"{differ:,}"),
            Tile("cells still open", f"{undecided:,}"),
            Tile("claims that hold everywhere", str(sum(claim.holds for claim in found)), f"of {len(found)}"),
        ]
    seconds = sum(stored.result.seconds for stored in results)
    tiles.append(Tile("compute", _duration(seconds)))
    return [*tiles, Tile("files skipped", str(len(results.skipped)))] if results.skipped else tiles


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _overview(tables: Sequence[Table]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"experiment-{table.experiment.name}",
            "name": table.experiment.name,
            "title": table.experiment.title,
            "cells": len(table.verdicts),
            "filled": len(table.verdicts) - table.count("missing"),
            "agree": table.count("agrees"),
            "differ": table.count("differs"),
            "open": table.count("open"),
        }
        for table in tables
    ]


def _unique(runs: Iterable[RunResult]) -> list[RunResult]:
    return list({run.config: run for run in runs}.values())


def _variables(colors: dict[str, str], *, dark: bool) -> str:
    """Declarations of the theme's CSS variables: the page's colours and those of the figures."""
    figures = {name: night if dark else day for name, day, night in theme_colors().values()}
    return " ".join(f"--{name}: {color};" for name, color in {**figures, **colors}.items())


def _template(name: str) -> str:
    return files("holdfast.report").joinpath("templates", name).read_text("utf-8")


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "(source tree)"
