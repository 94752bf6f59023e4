"""holdfast report: one page, or tables, from whatever results are there."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import app
from holdfast.display import tell, tell_skipped
from holdfast.errors import HoldfastError

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
    from holdfast import report
    from holdfast.report.text import count

    results = report.gather(folders)
    tell_skipped(results.skipped, NAMED)
    if not len(results):
        raise HoldfastError(f"no results in {', '.join(map(str, folders))}; 'holdfast run' and 'reproduce' make some.")
    if out is None and format_ != "html":
        sys.stdout.write(report.render_report(results, format_, experiment))
    else:
        found = report.gather_analyses(folders, results) if format_ == "html" else []
        runs, refused = sum(stored.has_logits for stored in results), list[str]()
        if analyses or (analyses is None and runs <= ANALYZED):
            results = results.sound()
            live, refused = report.analyze_alike(results)
            found = [*live, *found]
        elif analyses is None and format_ == "html":
            tell(f"calibration and recency of {count(runs, 'run')} left out; --analyses adds them")
        text = report.render_report(results, format_, experiment, found, refused)
        path = report.write_report(text, out or Path("report.html"))
        tell(f"{count(len(results), 'result')} -> {path} ({path.stat().st_size / 1e6:.2f} MB)")
    if figures is not None:
        drawn = report.write_figures(results, figures, experiment)
        tell(f"{count(len(drawn), 'figure')} -> {figures}")
