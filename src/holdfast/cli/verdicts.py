"""A table of the paper on the terminal: our numbers above the published ones, verdicts, leans and claims."""

from rich import box
from rich.table import Table as Grid

from holdfast import experiments
from holdfast.display import output, tell
from holdfast.experiments import JUDGED, Table
from holdfast.report.tables import Block, CellText, blocks, derived_blocks

__all__ = ["show_table"]


def show_table(made: Table) -> None:
    """Show the table block by block, then how it agrees with the paper, and the claims."""
    tell(f"{made.experiment.title} ({made.experiment.source})", output)
    for block in (*blocks(made), *derived_blocks(made)):
        output.print(_grid(block))
    agree, differ, undecided, missing = (made.count(status) for status in (*JUDGED, "missing"))
    tell(
        "Upper number: ours. Lower number: published. tau: Kendall's rank correlation of our order and theirs.\n"
        f"{agree} cells agree, {differ} differ, {undecided} are open, {missing} have no run. A cell agrees (✓) if the "
        "90 % interval of the difference of means lies inside ±2 points, or ±0.04 for probabilities. It differs (✗) if "
        "the interval lies outside, or if our runs scatter ten times as widely as the published ones. Otherwise, and "
        "with fewer than 3 runs, it is open (?).",
        output,
    )
    for note in filter(None, (made.experiment.caveat, *(f"published: {source}" for source in made.sources))):
        tell(note, output)
    for verdict in made.verdicts:
        if verdict.status == "differs":
            place = f"{verdict.cell.group}, {verdict.cell.row}, {verdict.cell.column}"
            tell(f"differs: {place}: {verdict.reason}", output)
    for lean in made.leans:
        tell(f"{lean.column}: {lean.reason}", output)
    for claim in experiments.claims(made.verdicts):
        if claim.checks:
            tell(f"claim {claim.name}: {claim.outcome} (published: {claim.published_outcome})", output)
            for where, numbers, _ in claim.exceptions:
                tell(f"  except {where}: {numbers}", output)


def _grid(block: Block) -> Grid:
    """A block for the terminal: our numbers above the published ones."""
    grid = Grid("", *block.columns, title=block.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in grid.columns[1:]:
        column.justify = "right"
    for name, cells in block.rows:
        grid.add_row(name, *map(_text, cells))
    if block.footer:
        grid.add_section()
        grid.add_row("tau", *block.footer)
    return grid


def _text(cell: CellText) -> str:
    """Our number above the published one; a tick agrees, a cross differs, a question mark is open."""
    color = {"agrees": "green", "differs": "red"}.get(cell.status, "none")
    ours = f"{cell.ours} [{color}]{cell.mark}[/{color}]" if cell.status in JUDGED else cell.ours or cell.mark
    return f"{ours}\n[dim]{cell.published}[/dim]" if cell.published else ours
