"""The paper's claims, checked on the cells of tables and on the published numbers of the same cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import isnan

from holdfast.analysis.claims import Claim, Place, check_claims
from holdfast.experiments.paper import REPLAY
from holdfast.experiments.verdicts import Verdict

__all__ = ["claims"]


def claims(verdicts: Iterable[Verdict]) -> list[Claim]:
    """Every claim, checked on the means among the verdicts and on the published numbers of the same cells."""
    # Numbers by measure, place and method.
    ours: dict[str, dict[Place, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    theirs: dict[str, dict[Place, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for verdict in verdicts:
        config, published = verdict.cell.config, verdict.published
        # A cell with its own alpha or beta is no method of the paper's comparison; its row then is not the method.
        if config.method not in REPLAY or verdict.cell.row != config.method:
            continue
        # Other papers ran the same methods with other settings.
        if config.buffer_size is None or (published is not None and published.source):
            continue
        metric, place = verdict.cell.metric, Place.of(config)
        if not isnan(verdict.mean):
            ours[metric][place][config.method] = verdict.mean
        if published is not None:
            theirs[metric][place][config.method] = published.mean
    return check_claims(ours, theirs)
