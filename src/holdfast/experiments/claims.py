"""The paper's claims, checked on the cells of tables and on the published numbers of the same cells."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

from holdfast.analysis.claims import Claim, Place, check_claims
from holdfast.experiments.tables import REPLAY
from holdfast.experiments.verdicts import Verdict

__all__ = ["claims"]

Numbers = dict[str, dict[Place, dict[str, float]]]
"""By measure, place and method."""


def claims(verdicts: Iterable[Verdict]) -> list[Claim]:
    """Every claim, checked on the means among the verdicts and on the published numbers of the same cells."""
    ours: Numbers = {}
    theirs: Numbers = {}
    for verdict in verdicts:
        config = verdict.cell.config
        # A cell with its own alpha or beta is no method of the paper's comparison; its row then is not the method.
        if config.method not in REPLAY or verdict.cell.row != config.method:
            continue
        # Other papers ran the same methods with other settings.
        if config.buffer_size is None or (verdict.published is not None and verdict.published.source):
            continue
        where = (verdict.cell.metric, Place.of(config), config.method)
        if not isnan(verdict.mean):
            _put(ours, *where, verdict.mean)
        if verdict.published is not None:
            _put(theirs, *where, verdict.published.mean)
    return check_claims(ours, theirs)


def _put(numbers: Numbers, metric: str, place: Place, method: str, value: float) -> None:
    numbers.setdefault(metric, {}).setdefault(place, {})[method] = value
