"""Results -> a report in one of its formats, and figures as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.analysis.findings import Findings, compare
from holdfast.errors import HoldfastError
from holdfast.experiments import EXPERIMENTS, Experiment, Results, Table, assess
from holdfast.files import replacing
from holdfast.registry import unknown_name
from holdfast.report.charts import comparison_bars, comparison_charts, table_charts
from holdfast.report.figures import save_figure
from holdfast.report.groups import comparisons
from holdfast.report.page import html_page
from holdfast.report.tables import cell_numbers, render
from holdfast.report.views import run_numbers

__all__ = ["FORMATS", "render_report", "runs_with_logits", "write_figures", "write_report"]

FORMATS = ("html", "markdown", "latex", "csv")


def render_report(
    results: Results,
    format: str = "html",
    experiment: str | None = None,
    *,
    analyses: bool = False,
    kept: Sequence[Findings] = (),
) -> str:
    """The report as text: of every experiment that has results, or of one.

    Tables of runs that belong to no experiment are part of the HTML page; as CSV, every run is a row of its own when
    no experiment has results. `analyses` adds calibration, recency and transfer to the page, from the logits kept with
    the results; that takes about a second for every ten runs. `kept` are analyses made before, which the page shows as
    well.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, list(FORMATS))
    results, tables = _assess(results, [EXPERIMENTS[experiment]] if experiment else EXPERIMENTS.values())
    if format == "html":
        results, found = _analyze(results) if analyses else (results, [])
        return html_page(
            results, tables, [*found, *kept], title=f"Holdfast: {experiment}" if experiment else "Holdfast report"
        )
    filled = [table for table in tables if experiment or table.count("missing") < len(table.verdicts)]
    if format == "csv":
        return cell_numbers(filled).csv() if filled else run_numbers(stored.result for stored in results).csv()
    if not filled:
        raise HoldfastError("no experiment of the paper has results here; the html report and csv show any results.")
    level = {"markdown": "## {}\n\n", "latex": "% {}\n"}[format]
    return "\n".join(level.format(table.experiment.title) + render(table, format) for table in filled)


def write_report(
    results: Results,
    path: Path,
    format: str = "html",
    experiment: str | None = None,
    *,
    analyses: bool = False,
    kept: Sequence[Findings] = (),
) -> Path:
    """Write the report to `path`, whole or not at all; returns the path."""
    text = render_report(results, format, experiment, analyses=analyses, kept=kept)
    try:
        with replacing(path) as scratch:
            scratch.write_text(text, "utf-8")
    except OSError as error:
        raise HoldfastError(
            f"the report could not be written to {path}: {error.strerror or error}. Choose another file with --out."
        ) from error
    return path


def write_figures(results: Results, folder: Path, experiment: str | None = None) -> list[Path]:
    """Every figure as SVG and PNG with the numbers behind it as CSV and JSON; returns the PNGs' paths."""
    results, tables = _assess(results, [EXPERIMENTS[experiment]] if experiment else EXPERIMENTS.values())
    charts = [chart for table in tables for chart in table_charts(table)]
    runs = [stored.result for stored in results]
    if experiment:
        runs = list({s.config: s.result for t in tables for v in t.verdicts for s in v.stored}.values())
    charts += [chart for each in comparisons(runs) for chart in (comparison_bars(each), *comparison_charts(each))]
    unique = {chart.slug: chart for chart in reversed(charts)}
    return [save_figure(c.draw(title=c.title), folder / name, c.numbers) for name, c in reversed(unique.items())]


def _assess(results: Results, wanted: Iterable[Experiment]) -> tuple[Results, list[Table]]:
    """The tables, and the results without those whose logits or measures turn out to be damaged."""
    wanted = list(wanted)
    try:
        return results, [assess(experiment, results) for experiment in wanted]
    except HoldfastError:
        sound = results.sound()
        return sound, [assess(experiment, sound) for experiment in wanted]


def _analyze(results: Results) -> tuple[Results, list[Findings]]:
    """What the logits beside the results say, and the results without those whose logits are damaged."""
    sound = results.sound()
    return sound, compare(stored.analysis for stored in sound if stored.analysis)


def runs_with_logits(results: Results) -> int:
    """How many results have what `analyses` needs."""
    return sum(stored.has_logits for stored in results)
