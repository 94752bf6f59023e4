"""A table of the paper on the terminal: our numbers above the published ones, verdicts, leans and claims."""

from collections.abc import Iterator
from dataclasses import replace

from rich import box
from rich.measure import Measurement, measure_renderables
from rich.table import Table as Grid
from rich.text import Text

from holdfast import experiments
from holdfast.display import fitting, output, tell
from holdfast.experiments import JUDGED, Table
from holdfast.report.tables import Block, CellText, blocks, derived_blocks

__all__ = ["show_table"]


def show_table(made: Table) -> None:
    """Show the table block by block, then how it agrees with the paper, and the claims."""
    tell(f"{made.experiment.title} ({made.experiment.source})", output)
    for block in (*blocks(made), *derived_blocks(made)):
        for part in _parts(block):
            output.print(_grid(part))
    agree, differ, undecided, missing = (made.count(status) for status in (*JUDGED, "missing"))
    output.print(
        "Upper number: ours. Lower number: published. tau: Kendall's rank correlation of our order and theirs.\n"
        f"Cells: {agree} ✓ agree, {differ} ✗ differ, {undecided} ? open, {missing} without a run. A cell agrees if the "
        "90 % interval of the difference of means lies inside ±2 points, or ±0.04 for probabilities. It differs if "
        "the interval lies outside, or if our runs scatter ten times as widely as the published ones. Otherwise, and "
        "with fewer than 3 runs, it is open.",
        highlight=False,
        markup=False,
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


def _parts(block: Block) -> Iterator[Block]:
    """The block, cut between columns into as many as it takes for no number to be broken."""
    begin = 0
    while begin < len(block.columns):
        end = len(block.columns)
        while end > begin + 1 and not _fits(_columns(block, begin, end)):
            end -= 1
        yield _columns(block, begin, end)
        begin = end


def _columns(block: Block, begin: int, end: int) -> Block:
    rows = [(name, cells[begin:end]) for name, cells in block.rows]
    return replace(block, columns=block.columns[begin:end], rows=rows, footer=block.footer[begin:end])


def _fits(block: Block) -> bool:
    sizes = _sizes(block)
    return all(width >= size.minimum for width, size in zip(fitting(sizes), sizes, strict=True))


def _sizes(block: Block) -> list[Measurement]:
    """The least and the greatest width of each column: headings may wrap between words, numbers may not."""
    columns = [[name for name, _ in block.rows]]
    columns += [[_text(cells[place]) for _, cells in block.rows] for place in range(len(block.columns))]
    sizes = []
    for heading, cells in zip(["", *block.columns], columns, strict=True):
        title, body = (measure_renderables(output, output.options, each) for each in ([Text(heading)], cells))
        sizes.append(Measurement(max(title.minimum, body.maximum), max(title.maximum, body.maximum)))
    return sizes


def _grid(block: Block) -> Grid:
    """A block for the terminal: our numbers above the published ones."""
    grid = Grid(title=block.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, (heading, width) in enumerate(zip(["", *block.columns], fitting(_sizes(block)), strict=True)):
        grid.add_column(heading, justify="right" if place else "left", width=width)
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
