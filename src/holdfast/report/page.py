"""One self-contained HTML page from whatever results are there."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.resources import files

import torch

from holdfast.analysis.claims import Claim
from holdfast.analysis.comparisons import Comparison, comparisons
from holdfast.analysis.findings import Findings
from holdfast.config import RunConfig
from holdfast.experiments import JUDGED, Experiment, Results, Table, claims
from holdfast.report.analyses import analysis_charts
from holdfast.report.charts import Chart, comparison_charts, matrix_charts, score_charts, table_charts
from holdfast.report.draw.style import DARK, LIGHT, theme_colors
from holdfast.report.gallery import Gallery, Pictures
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

MOST_SKIPPED = 200
"""Skipped files named on the page."""


Number = tuple[RunConfig, str]
"""A measure of a config over all its seeds."""


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
    gallery = Gallery()
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
            *_analysis_sections(analyses, filled, gallery),
        ],
        runs=by_benchmark(runs),
        run_columns=COLUMNS,
        run_numbers=run_numbers(runs),
        cell_numbers=cell_numbers(filled),
        skipped=results.skipped[:MOST_SKIPPED],
        skipped_more=max(0, len(results.skipped) - MOST_SKIPPED),
    )


def _experiment_sections(tables: Sequence[Table], gallery: Gallery) -> list[Section]:
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
                notes=_notes(table) if new else [],
            )
        )
    return sections


def _notes(table: Table) -> list[str]:
    """What to know of a table: its caveat, where other papers' numbers come from, and how its columns lean."""
    caveat, sources = table.experiment.caveat, [f"Published numbers of {source}." for source in table.sources]
    return [*filter(None, [caveat]), *sources, *(f"{lean.column}: {lean.reason}." for lean in table.leans)]


def _numbers(table: Table, group: str) -> set[Number]:
    """The numbers with results in a block, to find blocks that repeat others."""
    return {(v.cell.config, v.cell.metric) for v in table.verdicts if v.cell.group == group and v.n}


def _run_charts(experiment: Experiment, found: Sequence[Comparison], gallery: Gallery) -> list[Chart]:
    """The figures of an experiment's runs that no other shows; an experiment about matrices shows them in any case."""
    if experiment.figure == "matrices":
        return [replace(chart, folded=False) for comparison in found for chart in matrix_charts(comparison)]
    return [chart for comparison in gallery.fresh(found) for chart in comparison_charts(comparison)]


def _other_sections(runs: Sequence[RunResult], tables: Sequence[Table], gallery: Gallery) -> list[Section]:
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


def _analysis_sections(analyses: Sequence[Findings], tables: Sequence[Table], gallery: Gallery) -> list[Section]:
    """What the logits say beyond accuracy, a section per comparison."""
    shown = {v.cell.config.change(seed=0) for table in tables for v in table.verdicts if v.n}
    sections = []
    for name, found in zip(_unique_names([found.title for found in analyses]), analyses, strict=True):
        found, notes = _as_in_the_tables(found, shown)
        sections.append(
            Section(
                id=f"analyses-{slug(name)}",
                name=f"Analyses: {name}",
                title=f"Can it be trusted? {name}",
                about=_about(found),
                figures=gallery.draw(analysis_charts(found).values()),
                notes=[f"{c.statement}: {c.outcome} ({c.detail})" for c in found.claims] + notes,
            )
        )
    return sections


def _as_in_the_tables(found: Findings, shown: set[RunConfig]) -> tuple[Findings, list[str]]:
    """The comparison without settings that the tables do not show, if they show others, and a note for readers."""
    same = tuple(summary for summary in found.summaries if summary.config.change(seed=0) in shown)
    notes = []
    if 0 < len(same) < len(found.summaries):
        others = ", ".join(summary.label for summary in found.summaries if summary not in same)
        notes.append(f"Left out: {others}, with other settings than in the tables above.")
        found = replace(found, summaries=same)
    if len({summary.seeds for summary in found.summaries}) > 1:
        notes.append("Not every method was analyzed with the same seeds; differences of a point or two may be chance.")
    return found, notes


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
        own = [table for table in filled if not table.sources]  # the paper's; others compare with other papers
        agree, differ, undecided = (sum(table.count(status) for table in own) for status in JUDGED)
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
