"""Our numbers beside those that papers published."""

from __future__ import annotations

from pathlib import Path

from holdfast.analysis.comparisons import REPLAY
from holdfast.experiments import EXPERIMENTS, Results, Verdict, assess
from holdfast.report import gather, markdown_table
from tables.common import RESULTS, committed, table, typeset

FIELD = """### The field
The methods of other papers in the same laboratory; mse is DER++. [What each stores and costs](docs/concepts/field.md).
ballast is [our own](docs/concepts/beyond.md): it needs no task boundaries and one draw a step.
"""


def results(folder: Path = RESULTS) -> str:
    """The tables of the README: the paper's own methods, then those of other papers as far as there are results."""
    found = committed() if folder == RESULTS else gather([folder])
    tables = markdown_table("table1", found)
    experiment = EXPERIMENTS["field"].select(["metric=accuracy"])
    if any(found.seeds_of(cell.config) for cell in experiment.cells if cell.config.method not in REPLAY):
        tables += f"\n{FIELD}\n{markdown_table(experiment, found, missing=False)}"
    return tables


def field() -> str:
    """The accuracies of the field that results/ has, with the published ones beside them."""
    return markdown_table("field", committed(), missing=False)


def sources() -> str:
    """Which paper printed which number of the field, a line per source."""
    return "\n".join(f"- {source}" for source in assess(EXPERIMENTS["field"], Results()).sources)


def witnesses() -> str:
    """What other papers published for S-CIFAR-10 beside ours, a row per method and buffer that was run."""
    verdicts, rows = witness_verdicts(), []
    for (method, size, metric), verdict in verdicts.items():
        if metric == "accuracy":
            both = (verdict, verdicts.get((method, size, "task_il_accuracy")))
            cells = [cell for each in both for cell in _beside(each)]
            rows.append([method, str(size or "none"), str(verdict.n), *cells])
    compared = ("published", "difference")
    return table(["", "buffer", "seeds", "Class-IL", *compared, "Task-IL", *compared], rows)


def witness_verdicts() -> dict[tuple[str, int | None, str], Verdict]:
    """The cells of S-CIFAR-10 that were run and that another paper published, by method, buffer and metric."""
    experiment = EXPERIMENTS["field"].select(["benchmark=seq-cifar10"])
    return {
        (each.cell.row, each.cell.config.buffer_size, each.cell.metric): each
        for each in assess(experiment, committed()).verdicts
        if each.n and each.published is not None and each.published.source
    }


def _beside(verdict: Verdict | None) -> list[str]:
    """Three cells: ours, published, and the difference; empty where there is no such number."""
    if verdict is None or verdict.published is None:
        return ["", "", ""]
    published, difference = verdict.published, round(verdict.difference, 1) + 0.0  # no -0.0
    ours, theirs = f"{verdict.mean:.1f}", f"{published.mean:.1f} ± {published.std:.1f}"
    return [typeset(cell) for cell in (ours, theirs, f"{difference:+.1f}")]
