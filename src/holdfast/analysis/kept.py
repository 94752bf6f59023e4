"""What `holdfast analyze` wrote, read back: for a report where the weights are no longer at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.analysis.calibration import Calibration
from holdfast.analysis.recency import Recency
from holdfast.analysis.robustness import Robustness
from holdfast.analysis.runs import Claim, Findings, Summary
from holdfast.analysis.transfer import Estimate, Transfer
from holdfast.config import RunConfig
from holdfast.errors import DataError

__all__ = ["ANALYSIS", "read_findings"]

ANALYSIS = "analysis.json"
"""The name under which the numbers of an analysis are kept."""

ESTIMATES = ("accuracy", "ece", "mce", "recency_gap", "mra")


def read_findings(path: Path) -> list[Findings]:
    """The comparisons in the file `path`; one that is damaged or something else raises."""
    try:
        return [_findings(values) for values in json.loads(path.read_bytes())["comparisons"]]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not an analysis that this version reads ({error!r}); make it again.") from error


def _findings(values: dict[str, Any]) -> Findings:
    return Findings(
        title=str(values["title"]),
        summaries=tuple(_summary(summary) for summary in values["methods"]),
        gains=values["relative_gains_over_er"],
        claims=tuple(Claim(**claim) for claim in values["claims"]),
    )


def _summary(values: dict[str, Any]) -> Summary:
    transfer = values["transfer"]
    numbers = {name: _estimate(transfer[name]) for name in Transfer.__dataclass_fields__ if name in transfer}
    numbers["curves"] = [[_estimate(cell) for cell in curve] for curve in transfer["curves"]]
    return Summary(
        label=str(values["label"]),
        config=RunConfig.from_dict({**values["config"], "seed": 0}),
        seeds=tuple(values["seeds"]),
        **{name: _estimate(values[name]) for name in ESTIMATES},
        transfer=Transfer(**numbers),
        calibration=_part(Calibration, values["calibration"]),
        recency=_part(Recency, values["recency"]),
        robustness=_part(Robustness, values["robustness"]),
    )


def _estimate(value: Any) -> Any:
    """An estimate where the file has one; numbers and None are themselves."""
    return Estimate(**_numbers(value)) if isinstance(value, dict) else _numbers(value)


def _part(kind: Any, values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    return kind(**{name: value if name == "source" else _numbers(value) for name, value in values.items()})


def _numbers(value: Any) -> Any:
    """The same lists and dicts, with nothing but numbers and None in them: anything else raises."""
    if isinstance(value, dict):
        return {str(name): _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is not a number")
