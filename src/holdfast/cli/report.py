"""holdfast report: one page from whatever results are there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.app import app
from holdfast.display import errors
from holdfast.errors import HoldfastError

__all__: list[str] = []

NAMED = 10  # skipped files named at the terminal; the page names more
ANALYZED = 100  # runs whose logits are read unasked, about ten seconds


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that hold results.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; report.html for html, else standard output.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="html, markdown, latex or csv.")] = "html",
    experiment: Annotated[str | None, typer.Option(help="Only this experiment; see 'holdfast list'.")] = None,
    analyses: Annotated[
        bool | None,
        typer.Option(
            "--analyses/--no-analyses",
            help=f"Calibration and recency, from the logits kept with results; by default of up to {ANALYZED} runs.",
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure with its numbers to this folder.")
    ] = None,
) -> None:
    """Make one HTML page, or tables, from whatever results are there."""
    from holdfast import report

    results = report.gather(folders)
    for skipped in results.skipped[:NAMED]:
        errors.print(f"skipped {skipped.path}: {skipped.reason}", highlight=False, markup=False, soft_wrap=True)
    if len(results.skipped) > NAMED:
        errors.print(f"skipped {len(results.skipped) - NAMED} more files", highlight=False)
    if not len(results):
        raise HoldfastError(f"no results in {', '.join(map(str, folders))}; 'holdfast run' and 'reproduce' make some.")
    if out is None and format_ != "html":
        sys.stdout.write(report.render_report(results, format_, experiment))
    else:
        if analyses is None:
            analyses = (count := report.runs_with_logits(results)) <= ANALYZED
            if not analyses and format_ == "html":
                errors.print(f"calibration and recency of {count} runs left out; --analyses adds them", highlight=False)
        kept = report.gather_analyses(folders, results)
        path = report.write_report(
            results, out or Path("report.html"), format_, experiment, analyses=analyses, kept=kept
        )
        errors.print(f"{len(results)} results -> {path} ({path.stat().st_size / 1e6:.2f} MB)", highlight=False)
    if figures is not None:
        drawn = report.write_figures(results, figures, experiment)
        errors.print(f"{len(drawn)} figures -> {figures}", highlight=False)
