"""One self-contained HTML page from whatever results are there."""

import itertools
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from holdfast.analysis.claims import Claim
from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.findings import Findings
from holdfast.config import RunConfig
from holdfast.experiments import JUDGED, Results, Table, claims, trust
from holdfast.report.analyses import analysis_charts, refusal
from holdfast.report.charts import Chart, comparison_charts, score_charts, table_charts
from holdfast.report.draw.canvas import inline_svg
from holdfast.report.draw.style import DARK, LIGHT, theme_colors
from holdfast.report.numbers import Numbers, by_benchmark, run_numbers
from holdfast.report.tables import Block, blocks, cell_numbers, column_title, comparison_block, derived_blocks
from holdfast.report.text import count, duration, slug
from holdfast.results import RunResult, environment

__all__ = ["html_page"]

MOST_SKIPPED = 200
"""Skipped files named on the page."""
FIGURES_BUDGET = 2_800_000
"""Bytes of figures with their numbers; the page as a whole stays below 5 MB."""

Measured = tuple[RunConfig, str]
"""A measure of a config over all its seeds."""


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


@dataclass(frozen=True)
class Section:
    """An experiment, an analysis, or the runs that belong to none."""

    id: str
    name: str
    title: str
    about: str = ""
    evidence: Sequence[tuple[Block, Sequence[Picture]]] = ()
    """Tables, each with the figures that stand beside it."""
    figures: Pictures = field(default_factory=Pictures)
    """Further figures."""
    numbers: Numbers | None = None
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    """Notes that are shown on demand."""
    folded: bool = False
    """Whether the page shows it on demand only."""


def html_page(
    results: Results, tables: Sequence[Table], analyses: Sequence[Findings], *, title: str, refused: Sequence[str]
) -> str:
    """The page as text. `tables` are the experiments to show, those without results included; so are `analyses`.

    `refused` says of which runs there is no analysis, and why.
    """
    import jinja2
    from markupsafe import Markup

    filled = [table for table in tables if table.count("missing") < len(table.verdicts)]
    runs = [stored.result for stored in results]
    trusted, unlike = trust(filled, {number for table in filled for number in _measured(table)})
    found = claims(v for table in (*filled, trusted) for v in table.verdicts) if filled else []
    gallery = Gallery()
    script = _template("report.js")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_template("report.html"))
    return template.render(
        title=title,
        subtitle=f"{count(len(runs), 'result')} on {', '.join(sorted({run.config.benchmark for run in runs}))}",
        version=environment(torch.device("cpu"))["holdfast"],
        css=Markup(_template("report.css")),
        light=Markup(_variables(LIGHT, dark=False)),
        dark=Markup(_variables(DARK, dark=True)),
        script=Markup(script),
        script_hash="sha256-" + b64encode(sha256(script.encode()).digest()).decode(),
        tables=filled,
        empty=[table.experiment.name for table in tables if table not in filled],
        claims=[claim for claim in found if claim.checks],
        sections=[
            *_experiment_sections(filled, gallery),
            *_trust_sections(trusted, analyses, filled, [*unlike, *refused], gallery),
            *_other_sections(runs, filled, gallery),
        ],
        tiles=_tiles(results, tables, filled, found),  # last, as it counts what the others found damaged
        runs=by_benchmark(runs),
        run_numbers=run_numbers(runs),
        cell_numbers=cell_numbers(filled),
        skipped=results.skipped[:MOST_SKIPPED],
        skipped_more=max(0, len(results.skipped) - MOST_SKIPPED),
    )


def _experiment_sections(tables: Sequence[Table], gallery: Gallery) -> list[Section]:
    sections = []
    shown: dict[Measured, str] = {}  # by the experiment that shows it first
    drawn: list[set[RunConfig]] = []  # the runs of comparisons that have their figures
    figures = {chart.title for table in tables for charts in table_charts(table).values() for chart in charts}
    for table in tables:
        experiment, groups = table.experiment, table.filled
        new = [group for group in groups if not _measured(table, group) <= shown.keys()]
        others = {shown[number] for group in set(groups).difference(new) for number in _measured(table, group)}
        repeated = f" Its numbers stand in {' and '.join(sorted(others))} above." if others else ""
        for group in new:
            shown = dict.fromkeys(_measured(table, group), experiment.name) | shown
        charts = table_charts(table)
        further = [chart for group in groups if group not in new for chart in charts[group]]
        further = [chart for chart in further if experiment.figure != "differences"]
        sections.append(
            Section(
                id=f"experiment-{experiment.name}",
                name=experiment.name,
                title=experiment.title,
                about=f"{experiment.source}. {experiment.shows}{_absent(table)}{repeated}",
                evidence=_evidence(table, new, charts, gallery),
                figures=gallery.draw([*further, *_run_charts(table, drawn, figures)]),
                numbers=cell_numbers([table]),
                notes=_notes(table, decided=True) if new else [],
                details=_notes(table, decided=False) if new else [],
            )
        )
    return sections


def _evidence(
    table: Table, groups: Sequence[str], charts: dict[str, list[Chart]], gallery: Gallery
) -> list[tuple[Block, Sequence[Picture]]]:
    """The blocks of a table, each with its figures, and what is computed from its means; those without figures last."""
    made = blocks(table, groups, missing=False)
    beside: list[Sequence[Picture]] = [gallery.draw(charts[group]).shown for group in groups]
    rows = [*zip(made, beside, strict=True), *((block, ()) for block in derived_blocks(table))]
    return sorted(rows, key=lambda row: not row[1])


def _run_charts(table: Table, drawn: list[set[RunConfig]], figures: set[str]) -> list[Chart]:
    """The figures of an experiment's runs that are not `drawn` yet and not among the titles of `figures`."""
    charts = []
    for comparison in comparisons(table.runs.values()):
        own = {run.config for variant in comparison.variants for run in variant.results}
        if not any(own <= others for others in drawn):
            drawn.append(own)
            charts += [chart for chart in comparison_charts(comparison) if chart.title not in figures]
    return charts


def _notes(table: Table, *, decided: bool) -> list[str]:
    """What to know of a table: its caveat and the columns that lean; or its sources and the other columns."""
    leans = [f"{lean.column}: {lean.reason}." for lean in table.leans if (lean.direction != "open") == decided]
    sources = [f"Published numbers of {source}." for source in table.sources]
    return [*([table.experiment.caveat] if table.experiment.caveat else []), *leans] if decided else [*sources, *leans]


def _measured(table: Table, group: str | None = None) -> set[Measured]:
    """What a table, or one block of it, has results of: with this, repetitions are found."""
    return {(v.cell.config, v.cell.metric) for v in table.verdicts if group in (None, v.cell.group) and v.n}


def _other_sections(runs: Sequence[RunResult], tables: Sequence[Table], gallery: Gallery) -> list[Section]:
    """Runs that are part of no experiment shown."""
    used = {config for table in tables for config in table.runs}
    others = comparisons(run for run in runs if run.config not in used)
    if not others:
        return []
    figures = gallery.draw(chart for each in others for chart in comparison_charts(each))
    return [
        Section(
            id="other",
            name="Other runs" if tables else "Results",
            title="Other runs" if tables else "Results",
            about="Runs that belong to none of the experiments above: a demo, or your own settings." if tables else "",
            evidence=[(comparison_block(other), gallery.draw(score_charts(other)).shown) for other in others],
            figures=figures,
            folded=bool(tables),
        )
    ]


def _trust_sections(
    trusted: Table, analyses: Sequence[Findings], tables: Sequence[Table], refused: Sequence[str], gallery: Gallery
) -> list[Section]:
    """Beyond accuracy: the measures of the tables' runs, and a section for each analysis of like with like."""
    settings = {cell.config.change(seed=0) for table in tables for cell in table.experiment.cells}
    reasons = [refusal(found, settings) for found in analyses]
    notes = [*refused, *filter(None, reasons)]
    sections = []
    if trusted.verdicts or notes:
        about = "The runs behind the accuracies above, of each method the same seeds, as many as in brackets."
        evidence = _evidence(trusted, trusted.groups, table_charts(trusted), gallery)
        about = about if trusted.verdicts else ""
        sections.append(Section("trust", "Trust", "Can it be trusted?", about, evidence, notes=notes))
    alike = [found for found, reason in zip(analyses, reasons, strict=True) if not reason]
    for name, found in zip(_unique_names([found.title for found in alike]), alike, strict=True):
        seeds = found.summaries[0].seeds
        robust = ", robustness to corrupted images" if any(summary.robustness for summary in found.summaries) else ""
        about = f"Calibration, recency and transfer{robust}, of the final models"
        sections.append(
            Section(
                id=f"analyses-{slug(name)}",
                name=f"Analyses: {name}",
                title=f"Can it be trusted? {name}",
                about=f"{about}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} of each method.",
                figures=gallery.draw(analysis_charts(found).values()),
                notes=[f"{c.statement}: {c.outcome} ({c.detail})" for c in found.claims],
            )
        )
    return sections


def _unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where one comes again."""
    return [f"{name} ({n})" if (n := names[: at + 1].count(name)) > 1 else name for at, name in enumerate(names)]


def _absent(table: Table) -> str:
    """Which rows and columns have no result at all."""
    empty: list[str] = []
    for kind in ("row", "column"):
        filled = {getattr(verdict.cell, kind) for verdict in table.verdicts if verdict.n}
        empty += dict.fromkeys(name for v in table.verdicts if (name := getattr(v.cell, kind)) not in filled)
    return f" No results yet for {', '.join(map(column_title, empty))}." if empty else ""


def _tiles(
    results: Results, tables: Sequence[Table], filled: Sequence[Table], found: Sequence[Claim]
) -> list[tuple[str, str, str]]:
    """The numbers of the summary: what, how many, of how many."""
    tiles = [
        ("results", f"{len(results):,}", count(len({stored.config.change(seed=0) for stored in results}), "config"))
    ]
    if filled:
        own = [table for table in filled if not table.sources]  # the paper's; others compare with other papers
        cells = {(v.cell.config, v.cell.metric): v.status for table in own for v in table.verdicts}  # each once
        agree, differ, undecided = (list(cells.values()).count(status) for status in JUDGED)
        checked = [claim for claim in found if len(claim.checks) > 1]
        tiles += [
            ("experiments", str(len(filled)), f"of {len(tables)}"),
            ("cells agree", f"{agree:,}", f"of {agree + differ + undecided:,} compared"),
            ("cells differ", f"{differ:,}", ""),
            ("cells are open", f"{undecided:,}", ""),
            ("claims always hold", str(sum(claim.holds for claim in checked)), f"of {len(checked)} checked"),
        ]
    tiles.append(("compute", duration(sum(stored.result.seconds for stored in results)), ""))
    return [*tiles, ("files skipped", f"{len(results.skipped):,}", "")] if results.skipped else tiles


def _variables(colors: dict[str, str], *, dark: bool) -> str:
    """Declarations of the theme's CSS variables: the page's colours and those of the figures."""
    figures = {name: night if dark else day for name, day, night in theme_colors().values()}
    return " ".join(f"--{name}: {color};" for name, color in {**figures, **colors}.items())


def _template(name: str) -> str:
    return files("holdfast.report").joinpath("templates", name).read_text("utf-8")
