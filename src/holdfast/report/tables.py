"""Tables for people: cells as text, the blocks of an experiment, and their Markdown and LaTeX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

from holdfast.analysis.comparisons import Comparison
from holdfast.experiments import JUDGED, MEASURES, Experiment, Results, Table, Verdict, assess, claims, find_experiment
from holdfast.metrics import mean_std
from holdfast.report import text
from holdfast.report.numbers import Numbers
from holdfast.results import FROM_MATRICES

__all__ = [
    "Block",
    "CellText",
    "blocks",
    "cell_numbers",
    "column_title",
    "comparison_block",
    "derived_blocks",
    "latex_table",
    "markdown_table",
    "render",
    "table_json",
]

MARKS = {"agrees": "✓", "differs": "✗", "open": "?", "missing": "–", "unpublished": "·"}
"""A sign for each status, so that none depends on colour."""
NOTES = {
    "agrees": "agrees with the paper",
    "differs": "differs from the paper",
    "open": "neither agrees nor differs",
    "unpublished": "no published number is known",
}


@dataclass(frozen=True)
class CellText:
    """One cell: ours, the published number, and how they compare. Empty where there is nothing to say."""

    value: str = ""
    """The number to sort by."""
    ours: str = ""
    published: str = ""
    printed: str = ""
    """The published number to sort by."""
    status: str = ""
    note: str = ""
    """The status in words."""
    source: str = ""
    """The paper that prints the published number, where it is another one."""

    @property
    def mark(self) -> str:
        """The sign of the status."""
        return MARKS.get(self.status, "")


@dataclass(frozen=True)
class Block:
    """A table: rows with a name, and a cell for each column."""

    title: str
    label: str
    """The title with its context, for those who meet it alone."""
    columns: list[str]
    rows: list[tuple[str, list[CellText]]]
    corner: str = "method"
    footer: tuple[str, ...] = ()
    """Kendall's tau of each column and the number of rows behind it."""

    @property
    def printed(self) -> list[bool]:
        """Which columns have a published number in some row; those get a column of their own."""
        return [any(cells[place].published for _, cells in self.rows) for place in range(len(self.columns))]


def blocks(table: Table, groups: Sequence[str] | None = None, *, missing: bool = True) -> list[Block]:
    """The blocks of an experiment that have results, or these `groups` of them; rows without any if `missing`."""
    return [_block(table, group, missing) for group in (table.filled if groups is None else groups)]


def derived_blocks(table: Table) -> list[Block]:
    """What an experiment computes from its means, if it does."""
    if not table.derived:
        return []
    names = dict.fromkeys(row for column in table.derived.values() for row in column)
    rows = [(name, [_number(column.get(name)) for column in table.derived.values()]) for name in names]
    return [Block("computed from the means", f"{table.experiment.title}, computed", list(table.derived), rows)]


def comparison_block(comparison: Comparison) -> Block:
    """The metrics of runs that belong to no experiment."""
    metrics = [name for name in FROM_MATRICES if any(variant.values(name) for variant in comparison.variants)]
    rows = []
    for variant in comparison.variants:
        found = [(*mean_std(values), len(values)) for values in map(variant.values, metrics)]
        cells = [CellText(f"{mean:.6f}", text.plus_minus(mean, std, n)) if n else CellText() for mean, std, n in found]
        rows.append((variant.label, cells))
    return Block(comparison.title, comparison.title, [MEASURES[name].label for name in metrics], rows)


def column_title(column: str) -> str:
    """A column's name; one that is named after a measure gets the measure's label with its unit."""
    return MEASURES[column].label if column in MEASURES else column


def cell_numbers(tables: Sequence[Table]) -> Numbers:
    """Every cell in a row of its own."""
    place = ("experiment", "group", "row", "column", "metric")
    names = ("mean", "std", "n", "published_mean", "published_std", "difference", "low", "high", "status", "reason")
    rows = []
    for table in tables:
        for v in table.verdicts:
            cell, published = v.cell, v.published or (None, None, "")
            where = (table.experiment.name, cell.group, cell.row, cell.column, cell.metric)
            numbers = (v.mean, v.std, v.n, *published[:2], v.difference, *v.interval)
            rows.append((*where, *numbers, v.status, v.reason, published[2]))
    return Numbers((*place, *names, "source"), rows)


def table_json(table: Table) -> dict[str, Any]:
    """A table with its verdicts, ranks, leans and claims as plain JSON values; None where a number is not known."""
    experiment = table.experiment
    leans = [{"column": lean.column, "direction": lean.direction, "reason": lean.reason} for lean in table.leans]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "cells": [
            {**values, "seeds": [stored.config.seed for stored in verdict.stored]}
            for values, verdict in zip(cell_numbers([table]).plain(), table.verdicts, strict=True)
        ],
        "ranks": [{**rank._asdict(), "tau": None if isnan(rank.tau) else rank.tau} for rank in table.ranks],
        "leans": leans,
        "derived": table.derived,
        "claims": [claim.to_json() for claim in claims(table.verdicts) if claim.checks],
    }


def markdown_table(experiment: Experiment | str, results: Results, *, missing: bool = True) -> str:
    """A table per block of the experiment: each column of ours with the published one beside it.

    Blocks and columns without any result are left out. ✓ agrees with the paper by the rule of the verdicts,
    ✗ differs, ? is open. The experiment's caveat, if it has one, comes last. With `missing=False`, rows without
    any result are left out as well.
    """
    return render(_assessed(experiment, results), "markdown", missing=missing)


def latex_table(experiment: Experiment | str, results: Results) -> str:
    """The same as `tabular` environments for the booktabs package."""
    return render(_assessed(experiment, results), "latex")


def _assessed(experiment: Experiment | str, results: Results) -> Table:
    return assess(find_experiment(experiment) if isinstance(experiment, str) else experiment, results)


def render(table: Table, format: str, *, missing: bool = True) -> str:
    """The blocks of a table as `markdown` or `latex`, with rows that have no result if `missing`."""
    write = {"markdown": _markdown, "latex": _latex}[format]
    made = [write(block) for block in blocks(table, missing=missing)]
    comment = "" if format == "markdown" else "% "
    if made and table.experiment.caveat:
        made.append(f"{comment}{table.experiment.caveat}\n")
    return "\n".join(made) or f"{comment}No result of {table.experiment.name} yet.\n"


def _block(table: Table, group: str, missing: bool) -> Block:
    part = table.part(group, missing=missing)
    ranks = {rank.column: rank for rank in part.ranks if rank.n > 2 and not isnan(rank.tau)}
    footer = tuple(f"{ranks[column].tau:.2f} ({ranks[column].n})" if column in ranks else "" for column in part.columns)
    are_methods = all(v.cell.row == v.cell.config.method for v in part.verdicts)
    rows = [(name, [_cell(part.at(group, name, column)) for column in part.columns]) for name in part.rows(group)]
    if not any(cell.published for _, cells in rows for cell in cells):  # then it goes without saying in each of them
        rows = [(name, [replace(cell, status="", note="") for cell in cells]) for name, cells in rows]
    return Block(
        title=group,
        label=f"{table.experiment.title}, {group}",
        columns=[column_title(column) for column in part.columns],
        rows=[(name, cells) for name, cells in rows if any(cell.ours or cell.published for cell in cells)],
        corner="method" if are_methods else "setting",
        footer=footer if any(footer) else (),
    )


def _cell(verdict: Verdict | None) -> CellText:
    if verdict is None:
        return CellText()
    digits, note = verdict.measure.decimals, NOTES.get(verdict.status, "")
    if verdict.status in JUDGED:
        note += f": {verdict.reason}"
    return CellText(
        value="" if isnan(verdict.mean) else f"{verdict.mean:.6f}",
        ours=text.plus_minus(verdict.mean, verdict.std, verdict.n, decimals=digits),
        published=text.plus_minus(*verdict.published[:2], decimals=digits) if verdict.published else "",
        printed=str(verdict.published.mean) if verdict.published else "",
        status=verdict.status,
        note=note,
        source=verdict.published.source if verdict.published else "",
    )


def _number(value: float | None) -> CellText:
    return CellText() if value is None or isnan(value) else CellText(f"{value:.6f}", f"{value:+.2f}")


def _grid(block: Block) -> list[list[str]]:
    """Heading and rows as text; a column of ours is followed by the published one where there is any."""
    heading = [""]
    for column, paired in zip(block.columns, block.printed, strict=True):
        heading += [column, "published"] if paired else [column]
    rows = []
    for name, cells in block.rows:
        row = [name]
        for cell, paired in zip(cells, block.printed, strict=True):
            mark = f" {cell.mark}" if cell.status in JUDGED else ""
            ours = f"{cell.ours}{mark}" if cell.ours else cell.mark
            row += [ours, cell.published] if paired else [ours]
        rows.append(row)
    return [heading, *rows]


def _markdown(block: Block) -> str:
    lines = ["| " + " | ".join(map(text.markdown, row)) + " |" for row in _grid(block)]
    rule = "|---|" + "---:|" * (len(_grid(block)[0]) - 1)
    return "\n".join([f"**{text.markdown(block.title)}**\n", lines[0], rule, *lines[1:]]) + "\n"


def _latex(block: Block) -> str:
    grid = _grid(block)
    heading, *rows = (" & ".join(map(text.latex, row)) + r" \\" for row in grid)
    lines = [
        f"% {text.latex(block.label)}",
        rf"\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}",
        *(r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"
