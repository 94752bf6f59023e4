"""An experiment's cells as tables: ours as mean ± std (n) beside the published, as Markdown, LaTeX or CSV."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from holdfast.experiments import EXPERIMENTS, JUDGED, MEASURES, Experiment, Published, Results, Table, Verdict, assess
from holdfast.report.numbers import Numbers

__all__ = [
    "MARKS",
    "cell_numbers",
    "column_title",
    "filled_columns",
    "filled_groups",
    "latex_table",
    "markdown_table",
    "ours_text",
    "published_text",
    "render",
]

MARKS = {"agrees": "✓", "differs": "✗", "open": "?", "missing": "–", "unpublished": "·"}
"""A sign for each standing, so that none depends on colour."""


def markdown_table(experiment: Experiment | str, results: Results) -> str:
    """A table per block of the experiment: each column of ours with the published one beside it.

    Blocks and columns without any result are left out; ✓ agrees with the paper by the rule of the verdicts, ✗
    differs, ? is open.
    """
    return _markdown(assess(_experiment(experiment), results))


def latex_table(experiment: Experiment | str, results: Results) -> str:
    """The same as `tabular` environments for the booktabs package."""
    return _latex(assess(_experiment(experiment), results))


def render(table: Table, format: str) -> str:
    """A table as `markdown`, `latex` or `csv`."""
    if format == "csv":
        return cell_numbers([table]).csv()
    return _markdown(table) if format == "markdown" else _latex(table)


def cell_numbers(tables: Sequence[Table]) -> Numbers:
    """Every cell that has a number, ours or published, in a row of its own."""
    columns = (
        "experiment",
        "group",
        "row",
        "column",
        "metric",
        "mean",
        "std",
        "n",
        "published_mean",
        "published_std",
        "difference",
        "difference_low",
        "difference_high",
        "status",
        "reason",
    )
    return Numbers(columns, [_cell_row(table, verdict) for table in tables for verdict in table.verdicts])


def filled_groups(table: Table) -> list[str]:
    """Blocks with at least one result."""
    return [group for group in table.groups if filled_columns(table, group)]


def filled_columns(table: Table, group: str) -> list[str]:
    """Columns of a block with at least one result."""
    found = {v.cell.column for v in table.verdicts if v.cell.group == group and v.n}
    return [column for column in table.columns if column in found]


def column_title(column: str) -> str:
    """A column's name; one that is named after a measure gets the measure's label with its unit."""
    return MEASURES[column].label if column in MEASURES else column


def ours_text(verdict: Verdict) -> str:
    """Mean ± std (n), as many decimals as the measure deserves; empty without a result."""
    if not verdict.n:
        return ""
    decimals = verdict.measure.decimals
    spread = "" if isnan(verdict.std) else f" ± {verdict.std:.{decimals}f}"
    return f"{verdict.mean:.{decimals}f}{spread} ({verdict.n})"


def published_text(published: Published | None, decimals: int) -> str:
    """Mean ± std as printed; empty where the paper has none."""
    if published is None:
        return ""
    spread = "" if published.std is None else f" ± {published.std:.{decimals}f}"
    return f"{published.mean:.{decimals}f}{spread}"


def _experiment(given: Experiment | str) -> Experiment:
    return EXPERIMENTS[given] if isinstance(given, str) else given


def _cell_row(table: Table, verdict: Verdict) -> tuple[str | int | float | None, ...]:
    cell, published = verdict.cell, verdict.published
    return (
        table.experiment.name,
        cell.group,
        cell.row,
        cell.column,
        cell.metric,
        verdict.mean,
        verdict.std,
        verdict.n,
        published.mean if published else None,
        published.std if published else None,
        verdict.difference,
        *verdict.interval,
        verdict.status,
        verdict.reason,
    )


def _grid(table: Table, group: str) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a block; a column of ours is followed by the published one where there is any."""
    columns = filled_columns(table, group)
    printed = [
        column
        for column in columns
        if any((v := table.at(group, row, column)) is not None and v.published for row in table.rows(group))
    ]
    heading = [""]
    for column in columns:
        heading += [column_title(column), "published"] if column in printed else [column_title(column)]
    rows = []
    for name in table.rows(group):
        row = [name]
        for column in columns:
            row += _pair(table.at(group, name, column), paired=column in printed)
        rows.append(row)
    return heading, rows


def _pair(verdict: Verdict | None, *, paired: bool) -> list[str]:
    if verdict is None:
        return ["", ""] if paired else [""]
    mark = "" if verdict.status not in JUDGED else f" {MARKS[verdict.status]}"
    ours = (ours_text(verdict) or MARKS["missing"]) + mark
    return [ours, published_text(verdict.published, verdict.measure.decimals)] if paired else [ours]


def _markdown(table: Table) -> str:
    blocks = []
    for group in filled_groups(table):
        heading, rows = _grid(table, group)
        lines = [_markdown_row(heading), "|---|" + "---:|" * (len(heading) - 1), *map(_markdown_row, rows)]
        blocks.append(f"**{_plain_markdown(group)}**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(blocks) or f"No result of {table.experiment.name} yet.\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain_markdown(cell) for cell in cells) + " |"


def _plain_markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    for sign in ("\\", "|", "*", "_", "`", "[", "<"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "✓": r"$\checkmark$",
    "✗": r"$\times$",
    "≈": r"$\approx$",
    "–": "--",
}


def _latex(table: Table) -> str:
    blocks = []
    for group in filled_groups(table):
        heading, rows = _grid(table, group)
        body = [" & ".join(_plain_latex(cell) for cell in row) + r" \\" for row in (heading, *rows)]
        blocks.append(
            "\n".join(
                [
                    f"% {_plain_latex(table.experiment.title)}: {_plain_latex(group)}",
                    rf"\begin{{tabular}}{{l{'r' * (len(heading) - 1)}}}",
                    r"\toprule",
                    body[0],
                    r"\midrule",
                    *body[1:],
                    r"\bottomrule",
                    r"\end{tabular}",
                ]
            )
            + "\n"
        )
    return "\n".join(blocks) or f"% No result of {_plain_latex(table.experiment.name)} yet.\n"


def _plain_latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in " ".join(text.split()))
