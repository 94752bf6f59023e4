"""holdfast analyze: whether finished runs can be trusted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from holdfast import __version__, results
from holdfast.analysis import BENCHMARK_CORRUPTIONS, CATEGORIES, CORRUPTIONS, SEVERITIES, Estimate
from holdfast.analysis.findings import ANALYSIS, Findings, compare, write_findings
from holdfast.analysis.runs import RunAnalysis, analyze_run, exam_images, find_runs, with_robustness
from holdfast.benchmarks import make_benchmark
from holdfast.cli.app import DataRoot, Device, Json, Plugins, app, import_plugins
from holdfast.data import data_root
from holdfast.devices import choose_device
from holdfast.display import data_progress, output, show_progress, table, tell
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import Stored, add_robustness
from holdfast.report.analyses import TRANSFERS, write_analysis_figures
from holdfast.report.draw.analyses import save_contact_sheet

UNLIKE = "not every method has the same seeds, so that differences of a point or two may be chance."
MOST_BINS = 10_000  # as many as a test set has images; each has a row in analysis.json and in the figures
MOST_COLUMNS = 10  # tasks in a table; the numbers of the figures have them all


@app.command("analyze")
def analyze_command(
    runs: Annotated[list[Path], typer.Argument(help="Result folders, or folders of them.", metavar="RUN")],
    out: Annotated[Path, typer.Option("--out", help="Folder for figures and analysis.json.", metavar="DIR")] = Path(
        "analysis"
    ),
    data: DataRoot = None,
    corruptions: Annotated[
        bool, typer.Option("--corruptions/--no-corruptions", help="Also test the final models on corrupted images.")
    ] = False,
    extra: Annotated[bool, typer.Option("--extra", help="With --corruptions: also the four extra ones.")] = False,
    severities: Annotated[
        str | None, typer.Option(help="Severities of the corruptions, e.g. 1,3,5. Default: all five.")
    ] = None,
    bins: Annotated[int, typer.Option(help="Bins of confidence for calibration.", min=1, max=MOST_BINS)] = 15,
    sheet: Annotated[bool, typer.Option("--contact-sheet", help="Also draw two images with every corruption.")] = False,
    device: Device = "auto",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show whether finished runs can be trusted.

    Calibration, recency bias, transfer and robustness, as tables and figures. Nothing is trained again: a result holds
    the logits of the test sets and the final weights. Give several runs to compare methods, and several seeds of each
    for bootstrap intervals. With --corruptions, runs on seq-cifar10 use the published CIFAR-10-C, if 'holdfast data
    cifar10-c' has fetched it. All other runs are tested on corrupted copies of their own test images.
    """
    import_plugins(plugin)
    if (extra or severities is not None) and not corruptions:
        raise UsageError("--extra and --severities are about corruptions: add --corruptions.")
    levels = list(SEVERITIES) if severities is None else _severities(severities)
    target, root = choose_device(device), data_root(data)
    folders = find_runs(runs)
    results.check_writable(out)
    analyzed, notes = _read(folders, bins)
    if corruptions:
        names = tuple(CORRUPTIONS) if extra else BENCHMARK_CORRUPTIONS
        analyzed = _evaluate(analyzed, root, corruptions=names, severities=levels, device=target)
    notes += [note for run in analyzed for note in run.notes]
    found = compare(analyzed)
    notes += [f"{one.title}: {UNLIKE}" for one in found if len({summary.seeds for summary in one.summaries}) > 1]
    figures = [path for one in found for path in write_analysis_figures(one, out)]
    if sheet:
        figures.append(save_contact_sheet(exam_images(make_benchmark(analyzed[0].config, root)).images[:2], out))
    about = {"holdfast": __version__, "bins": bins, "severities": levels if corruptions else None, "notes": notes}
    written = write_findings(out / ANALYSIS, found, **about)
    if as_json:
        print(json.dumps(written))
    else:
        for one in found:
            for made in _tables(one):
                output.print(made)
    for note in notes:
        tell(f"note: {note}")
    tell(f"in {out}: {ANALYSIS}, figures: {len(figures)}")


def _severities(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not set(levels) <= set(SEVERITIES) or len(set(levels)) != len(levels):
        raise UsageError(f"severities must be different numbers from 1 to 5 with commas between, not '{text}'.")
    return levels


def _read(folders: Sequence[Path], bins: int) -> tuple[list[RunAnalysis], list[str]]:
    """The runs, and a note for each that cannot be read; raises if none can be."""
    analyzed: list[RunAnalysis] = []
    unread: dict[Path, HoldfastError] = {}
    with show_progress(len(folders), "reading") as advance:
        for folder in folders:
            try:
                analyzed.append(analyze_run(folder, bins=bins))
            except HoldfastError as error:
                unread[folder] = error
            advance(folder.name)
    if not analyzed:
        raise next(iter(unread.values()))
    return analyzed, [f"skipped {folder}: {error}" for folder, error in unread.items()]


def _evaluate(analyzed: Sequence[RunAnalysis], root: Path, **options: Any) -> list[RunAnalysis]:
    """The runs with their robustness, which is also stored beside their results."""
    with data_progress():
        for run in {run.config.benchmark: run for run in analyzed}.values():
            make_benchmark(run.config, root)  # missing data is fetched before hours of evaluation
    evaluations = len(analyzed) * len(options["corruptions"]) * len(options["severities"])
    with show_progress(evaluations, "corruptions:") as advance:
        found = with_robustness(analyzed, root, progress=lambda done, total, name: advance(name), **options)
    for run in found:
        if run.robustness is not None:
            add_robustness(Stored(run.result, run.folder / results.RESULT), run.robustness)
    return found


def _tables(found: Findings) -> list[Group]:
    """The tables of one comparison that have rows."""
    summaries = found.summaries
    several = any(len(one.seeds) > 1 for one in summaries)
    title = found.title + (" (means over seeds, 95 % bootstrap intervals)" if several else "")
    columns: tuple[str, ...] = ("method", "seeds", "accuracy (%)", "ECE (%)", "MCE (%)", "recency gap")
    overall = [
        (one.label, str(len(one.seeds)), *map(_text, (one.accuracy, one.ece, one.mce)), _text(one.recency_gap, 2))
        for one in summaries
    ]
    made = [_filled(title, columns, overall)]
    moved = [one for one in summaries if one.transfer.forgetting]
    transfers = [(one.label, *(_text(number(one)) for number in TRANSFERS.values())) for one in moved]
    made.append(_filled("Transfer (points)", ("method", *TRANSFERS), transfers))
    biases = {one.label: one.recency for one in summaries if one.recency}
    tasks = max((len(bias.task_probabilities) for bias in biases.values()), default=0)
    if tasks <= MOST_COLUMNS:
        columns = ("method", *(f"task {task}" for task in range(1, tasks + 1)))
        beliefs = [(label, *bias.task_probabilities) for label, bias in biases.items()]
        shares = [(label, *bias.prediction_shares) for label, bias in biases.items()]
        made.append(_filled("Average probability of each task", columns, beliefs))
        made.append(_filled("Share of predictions in each task", columns, shares))
    robust = [(one, one.robustness) for one in summaries if one.robustness]
    title = f"Accuracy under corruptions (%), over all {robust[0][1].source if robust else ''} images"
    corrupted = [(one.label, r.clean, *map(r.per_category.get, CATEGORIES), _text(one.mra)) for one, r in robust]
    made.append(_filled(title, ("method", "clean", *CATEGORIES, "mRA"), corrupted))
    claims = [(claim.statement, claim.outcome, claim.detail) for claim in found.claims]
    made.append(_filled("The paper's claims here", ("claim", "on these means", "numbers"), claims, left=3))
    return [each for each in made if each is not None]


def _filled(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Group | None:
    """A table without the columns that are empty; None if there are no rows."""
    shown = [place for place in range(len(columns)) if any(row[place] is not None for row in rows)]
    kept = [[row[place] for place in shown] for row in rows]
    return table(title, [columns[place] for place in shown], kept, left=left) if rows else None


def _text(value: Estimate | None, digits: int = 1) -> str | None:
    """The mean, and below it the ends of its interval with so many digits."""
    if value is None:
        return None
    if value.low is None or value.high is None:
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f}\n[{value.low:.{digits}f}, {value.high:.{digits}f}]"
