"""Results -> tables, figures, one self-contained HTML page. Reads results only.

results = gather([Path("runs")])
markdown_table("table1", results)          # also latex_table
write_report(render_report(results), Path("report.html"))
"""

from collections.abc import Sequence
from pathlib import Path

from holdfast.analysis.comparisons import comparisons
from holdfast.analysis.findings import ANALYSIS, Findings, read_findings
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import EXPERIMENTS, Results, Table, assess, find_experiment, load_results
from holdfast.files import replacing, telling, walked
from holdfast.registry import unknown_name
from holdfast.report.analyses import analyze_alike, distinct
from holdfast.report.charts import Chart, comparison_charts, score_charts, table_charts
from holdfast.report.draw.canvas import save_figure
from holdfast.report.numbers import run_numbers
from holdfast.report.page import html_page
from holdfast.report.tables import cell_numbers, latex_table, markdown_table, render

__all__ = [
    "FORMATS",
    "analyze_alike",
    "gather",
    "gather_analyses",
    "latex_table",
    "markdown_table",
    "render_report",
    "write_figures",
    "write_report",
    "write_table_figures",
]

FORMATS = ("html", "markdown", "latex", "csv")


def gather(folders: Sequence[Path]) -> Results:
    """All results below the folders. Files that are damaged or something else are among the skipped."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give the one that holds the results.")
    return load_results(*folders)


def gather_analyses(folders: Sequence[Path], results: Results) -> list[Findings]:
    """What `holdfast analyze` wrote below the folders; damaged files join those that `results` skipped."""
    found: list[Findings] = []
    for path in sorted(place / ANALYSIS for place, _, names in walked(folders) if ANALYSIS in names):
        try:
            found += read_findings(path)
        except HoldfastError as error:
            results.skip(path, error)
    return found


def render_report(
    results: Results,
    format: str = "html",
    experiment: str | None = None,
    analyses: Sequence[Findings] = (),
    refused: Sequence[str] = (),
) -> str:
    """The report as text: of every experiment that has results, or of one.

    The HTML page also shows the `analyses` that compare like with like, of the same runs one, says which were
    `refused`, and shows runs that belong to no experiment. CSV has a row per run where no experiment has results.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, list(FORMATS))
    made = _assess(results, experiment)
    if format == "html":
        title = f"Holdfast: {experiment}" if experiment else "Holdfast report"
        return html_page(results, made, distinct(analyses), title=title, refused=refused)
    filled = [table for table in made if experiment or table.count("missing") < len(table.verdicts)]
    if format == "csv":
        rows = cell_numbers(filled) if filled else run_numbers(stored.result for stored in results)
        return rows.csv()
    if not filled:
        raise HoldfastError("no experiment of the paper has results here; the html report and csv show any results.")
    heading = {"markdown": "## {}\n\n", "latex": "% {}\n"}[format]
    return "\n".join(heading.format(table.experiment.title) + render(table, format) for table in filled)


def write_report(text: str, path: Path) -> Path:
    """Write a report to `path`, whole or not at all; returns the path."""
    advice = "Choose another file with --out."
    with telling(HoldfastError, f"the report could not be written to {path}", advice), replacing(path) as scratch:
        scratch.write_text(text, "utf-8")
    return path


def write_figures(results: Results, folder: Path, experiment: str | None = None) -> list[Path]:
    """Every figure as SVG and PNG with the numbers behind it as CSV and JSON; returns the PNGs' paths."""
    made = _assess(results, experiment)
    shown = [run for table in made for run in table.runs.values()] if experiment else [each.result for each in results]
    charts = [chart for each in comparisons(shown) for chart in (*score_charts(each), *comparison_charts(each))]
    return _save(
        [chart for table in made for found in table_charts(table).values() for chart in found] + charts, folder
    )


def write_table_figures(table: Table, folder: Path) -> list[Path]:
    """The figures of an experiment as SVG and PNG, with their numbers as CSV; returns the PNGs' paths."""
    return _save([chart for found in table_charts(table).values() for chart in found], folder, json=False)


def _save(charts: Sequence[Chart], folder: Path, *, json: bool = True) -> list[Path]:
    """Write the charts, of those with the same title the first."""
    unique = {chart.slug: chart for chart in reversed(charts)}
    found = reversed(unique.items())
    return [save_figure(c.draw(title=c.title), folder / name, c.numbers, json=json) for name, c in found]


def _assess(results: Results, experiment: str | None) -> list[Table]:
    wanted = [find_experiment(experiment)] if experiment else list(EXPERIMENTS.values())
    return [assess(one, results) for one in wanted]
