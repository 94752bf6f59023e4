"""One self-contained HTML page from whatever results are there."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from holdfast.analysis.claims import Claim
from holdfast.analysis.comparisons import Comparison, comparisons
from holdfast.analysis.findings import Findings
from holdfast.config import RunConfig
from holdfast.experiments import JUDGED, Experiment, Results, Table, claims
from holdfast.report.analyses import analysis_charts
from holdfast.report.charts import Chart, comparison_charts, matrix_charts, score_charts, table_charts
from holdfast.report.draw.canvas import inline_svg
from holdfast.report.draw.style import DARK, LIGHT, theme_colors
from holdfast.report.numbers import Numbers
from holdfast.report.runs import COLUMNS, by_benchmark, run_numbers
from holdfast.report.tables import (
    Block,
    blocks,
    cell_numbers,
    column_title,
    comparison_block,
    derived_blocks,
    filled_groups,
)
from holdfast.report.text import count, duration, slug
from holdfast.results import RunResult, environment

__all__ = ["html_page"]

FIGURES_BUDGET = 2_800_000
"""Bytes of figures with their numbers; the page as a whole stays below 5 MB."""
THIRD, HALF = 400, 640
"""Units up to which figures stand three or two in a row."""
MOST_SKIPPED = 200
"""Skipped files named on the page."""


Number = tuple[RunConfig, str]
"""A measure of a config over all its seeds."""


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


@dataclass(frozen=True)
class Section:
    """An experiment, an analysis, or the runs that belong to none."""

    id: str
    name: str
    title: str
    about: str
    figures: Pictures
    blocks: Sequence[Block] = ()
    numbers: Numbers | None = None
    notes: Sequence[str] = ()
    folded: bool = False
    """Whether the page shows it on demand only."""


def html_page(results: Results, tables: Sequence[Table], analyses: Sequence[Findings], *, title: str) -> str:
    """The page as text. `tables` are the experiments to show, those without results included; so are `analyses`."""
    import jinja2
    from markupsafe import Markup

    filled = [table for table in tables if table.count("missing") < len(table.verdicts)]
    runs = [stored.result for stored in results]
    found = claims(v for table in filled for v in table.verdicts) if filled else []
    gallery = _Gallery()
    script = _template("report.js")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_template("report.html"))
    return template.render(
        title=title,
        subtitle=_subtitle(runs),
        version=environment(torch.device("cpu"))["holdfast"],
        css=Markup(_template("report.css")),
        light=Markup(_variables(LIGHT, dark=False)),
        dark=Markup(_variables(DARK, dark=True)),
        script=Markup(script),
        script_hash="sha256-" + b64encode(sha256(script.encode()).digest()).decode(),
        tiles=_tiles(results, tables, filled, found),
        tables=tables if filled else [],
        claims=found,
        sections=[
            *_experiment_sections(filled, gallery),
            *_other_sections(runs, filled, gallery),
            *_analysis_sections(analyses, gallery),
        ],
        runs=by_benchmark(runs),
        run_columns=COLUMNS,
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
        name, number = f"figure-{chart.slug}", 1
        while name in self._ids:
            number += 1
            name = f"figure-{chart.slug}-{number}"
        self._ids.add(name)
        return name


def _experiment_sections(tables: Sequence[Table], gallery: _Gallery) -> list[Section]:
    sections = []
    shown: dict[Number, str] = {}  # by the experiment that shows it first
    for table in tables:
        experiment, groups = table.experiment, filled_groups(table)
        new = [group for group in groups if not _numbers(table, group) <= shown.keys()]
        others = {shown[number] for group in set(groups).difference(new) for number in _numbers(table, group)}
        repeated = f" Its numbers stand in {' and '.join(sorted(others))} above." if others else ""
        runs = {stored.config: stored.result for verdict in table.verdicts for stored in verdict.stored}
        charts = [*table_charts(table, new), *_run_charts(experiment, comparisons(runs.values()), gallery)]
        for group in new:
            shown = dict.fromkeys(_numbers(table, group), experiment.name) | shown
        sections.append(
            Section(
                id=f"experiment-{experiment.name}",
                name=experiment.name,
                title=experiment.title,
                about=f"{experiment.source}. {experiment.shows}{_absent(table)}{repeated}",
                figures=gallery.draw(charts),
                blocks=[*blocks(table, new), *derived_blocks(table)],
                numbers=cell_numbers([table]),
                notes=[f"{lean.column}: {lean.reason}." for lean in table.leans],
            )
        )
    return sections


def _numbers(table: Table, group: str) -> set[Number]:
    """The numbers with results in a block, to find blocks that repeat others."""
    return {(v.cell.config, v.cell.metric) for v in table.verdicts if v.cell.group == group and v.n}


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
    return [
        Section(
            id="other",
            name="Other runs" if tables else "Results",
            title="Other runs" if tables else "Results",
            about="Runs that belong to none of the experiments above: a demo, or your own settings." if tables else "",
            figures=gallery.draw(chart for one in others for chart in (*score_charts(one), *comparison_charts(one))),
            blocks=[comparison_block(other) for other in others],
            folded=bool(tables),
        )
    ]


def _analysis_sections(analyses: Sequence[Findings], gallery: _Gallery) -> list[Section]:
    """What the logits say beyond accuracy, a section per comparison."""
    names = _unique_names([found.title for found in analyses])
    return [
        Section(
            id=f"analyses-{slug(name)}",
            name=f"Analyses: {name}",
            title=f"Can it be trusted? {name}",
            about=_about(found),
            figures=gallery.draw(analysis_charts(found).values()),
            notes=[f"{claim.statement}: {claim.outcome} ({claim.detail})" for claim in found.claims],
        )
        for name, found in zip(names, analyses, strict=True)
    ]


def _about(found: Findings) -> str:
    least, most = (pick(len(summary.seeds) for summary in found.summaries) for pick in (min, max))
    seeds = count(most, "seed") if least == most else f"{least} to {most} seeds"
    robust = ", robustness to corrupted images" if any(summary.robustness for summary in found.summaries) else ""
    return f"Calibration, recency and transfer{robust}, of the final models; {seeds} a method."


def _unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where one comes again."""
    return [f"{name} ({n})" if (n := names[: at + 1].count(name)) > 1 else name for at, name in enumerate(names)]


def _absent(table: Table) -> str:
    """Which columns have no result at all."""
    filled = {verdict.cell.column for verdict in table.verdicts if verdict.n}
    absent = [column_title(column) for column in table.columns if column not in filled]
    return f" No results yet for {', '.join(absent)}." if absent else ""


def _subtitle(runs: Sequence[RunResult]) -> str:
    return f"{count(len(runs), 'result')} on {', '.join(sorted({run.config.benchmark for run in runs}))}"


def _tiles(
    results: Results, tables: Sequence[Table], filled: Sequence[Table], found: Sequence[Claim]
) -> list[tuple[str, str, str]]:
    """The numbers of the summary: what, how many, of how many."""
    tiles = [
        ("results", f"{len(results):,}", count(len({stored.config.change(seed=0) for stored in results}), "config"))
    ]
    if filled:
        agree, differ, undecided = (sum(table.count(status) for table in filled) for status in JUDGED)
        tiles += [
            ("experiments covered", str(len(filled)), f"of {len(tables)}"),
            ("cells that agree with the paper", f"{agree:,}", f"of {agree + differ + undecided:,} compared"),
            ("cells that differ", f"{differ:,}", ""),
            ("cells still open", f"{undecided:,}", ""),
            ("claims that always hold", str(sum(claim.holds for claim in found)), f"of {len(found)}"),
        ]
    tiles.append(("compute", duration(sum(stored.result.seconds for stored in results)), ""))
    return [*tiles, ("files skipped", f"{len(results.skipped):,}", "")] if results.skipped else tiles


def _variables(colors: dict[str, str], *, dark: bool) -> str:
    """Declarations of the theme's CSS variables: the page's colours and those of the figures."""
    figures = {name: night if dark else day for name, day, night in theme_colors().values()}
    return " ".join(f"--{name}: {color};" for name, color in {**figures, **colors}.items())


def _template(name: str) -> str:
    return files("holdfast.report").joinpath("templates", name).read_text("utf-8")
