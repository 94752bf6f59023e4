"""holdfast report: one page, or tables, from whatever results are there."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast import report
from holdfast.analysis.findings import Findings
from holdfast.cli.app import app
from holdfast.display import tell, tell_skipped
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import Results
from holdfast.report.text import count

NAMED = 10  # skipped files named at the terminal; the page names more
ANALYZED = 100  # runs that are analyzed without being asked to, in about ten seconds


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders that hold results.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. Default: report.html; other formats go to standard output."),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="html, markdown, latex or csv.")] = "html",
    experiment: Annotated[str | None, typer.Option(help="Show this experiment only; see 'holdfast list'.")] = None,
    analyses: Annotated[
        bool | None,
        typer.Option(
            "--analyses/--no-analyses",
            help=f"Add calibration and recency, from stored logits. Default: for at most {ANALYZED} runs.",
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure with its numbers to this folder.")
    ] = None,
) -> None:
    """Make one HTML page, or tables, from folders of results."""
    if analyses and format_ != "html":
        raise UsageError(f"--analyses adds to the html report; there is no place for them in --format {format_}.")
    results = report.gather(folders)
    try:
        if not len(results):
            places = ", ".join(map(str, folders))
            raise HoldfastError(f"no results in {places}; 'holdfast run' and 'reproduce' make some.")
        found, refused = _analyses(folders, results, analyses) if format_ == "html" else ([], [])
        text = report.render_report(results, format_, experiment, found, refused)
    finally:
        tell_skipped(results.skipped, NAMED)  # some files turn out to be damaged only where they are needed
    if out is None and format_ != "html":
        sys.stdout.write(text)
    else:
        path = report.write_report(text, out or Path("report.html"))
        tell(f"{count(len(results), 'result')} -> {path} ({path.stat().st_size / 1e6:.2f} MB)")
    if figures is not None:
        drawn = report.write_figures(results, figures, experiment)
        tell(f"{count(len(drawn), 'figure')} -> {figures}")


def _analyses(folders: Sequence[Path], results: Results, wanted: bool | None) -> tuple[list[Findings], list[str]]:
    """The analyses that are stored, those of the logits if they are wanted, and what was refused."""
    found = report.gather_analyses(folders, results)
    runs = sum(stored.has_logits for stored in results)
    if wanted or (wanted is None and runs <= ANALYZED):
        live, refused = report.analyze_alike(results)
        return [*live, *found], refused
    if wanted is None:
        tell(f"calibration and recency of {count(runs, 'run')} left out; --analyses adds them")
    return found, []
