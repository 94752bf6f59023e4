"""What `holdfast analyze` and `make chaos` found."""

from __future__ import annotations

from holdfast.analysis import Estimate
from holdfast.analysis.findings import Findings, Summary, read_findings
from tables.common import DOCS, measured, table

PROGRAMS = {
    "run": "`holdfast run --resume`",
    "processes": "`holdfast reproduce`, processes",
    "ray": "`holdfast reproduce`, Ray",
    "folder": "a learner with its buffer in a folder",
    "memory": "a learner with its buffer in memory",
    "estimator": "an estimator with its buffer in a folder",
}
"""Programs that are disturbed, by their names in chaos.json."""


def chaos() -> str:
    """What `make chaos` did last, and how often a program ended as if nothing had happened, a row per program."""
    found = measured("chaos")
    names = ("rounds", "kills", "stops", "full_disks", "removed_folders", "damaged_files", "refused", "equal")
    rows = [[title, *(str(found[kind][name]) for name in names)] for kind, title in PROGRAMS.items() if kind in found]
    return table(["", *(name.replace("_", " ") for name in names)], rows)


def findings(path: str) -> str:
    """What `holdfast analyze` wrote to a file of the repository, as tables: a row per method, then the claims."""
    return "\n\n".join(part for found in read_findings(DOCS.parent / path) for part in _both(found))


def _both(found: Findings) -> list[str]:
    corrupted = any(one.mra for one in found.summaries)
    heads = ["method", "seeds", "accuracy (%)", "calibration error (%)", "recency gap"]
    heads += ["accuracy on corrupted (%)"] * corrupted
    tables = [table(heads, (_method(one, corrupted) for one in found.summaries))]
    if found.claims:
        rows = ([claim.statement, claim.outcome, claim.detail] for claim in found.claims)
        tables.append(table(["claim", "", ""], rows, words=2))
    return tables


def _method(summary: Summary, corrupted: bool) -> list[str]:
    numbers = [_mean(summary.accuracy, 1), _mean(summary.ece, 1), _mean(summary.recency_gap, 2)]
    numbers += [_mean(summary.mra, 1)] * corrupted
    return [summary.label, str(len(summary.seeds)), *numbers]


def _mean(estimate: Estimate | None, digits: int) -> str:
    return "" if estimate is None else f"{estimate.mean:.{digits}f}"
