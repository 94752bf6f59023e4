"""Holdfast trains networks that keep what they learned.

import holdfast as hf

learner = hf.ConsistencyReplay(model, optimizer, buffer_size=500, regularizer="linf", alpha=0.5, beta=0.2)
for x, y in stream:
    losses = learner.observe(x, y)
"""

# `_startup` comes first: while the rest is imported, the command answers Ctrl-C.
from holdfast import _startup, analysis  # noqa: F401
from holdfast.augment import per_sample
from holdfast.benchmarks import BENCHMARKS
from holdfast.buffer import Reservoir, ShardedReservoir
from holdfast.config import RunConfig
from holdfast.devices import choose_threads
from holdfast.errors import CheckpointError, DataError, HoldfastError, StorageError, TrainingError, UsageError
from holdfast.export import export
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Learner, Losses, TopK, next_tokens
from holdfast.matrix import AccuracyMatrix, evaluate
from holdfast.methods import LEARNERS
from holdfast.models import MODELS, group_batchnorm
from holdfast.monitor import DriftMonitor, ForgettingMonitor, ForgettingWarning
from holdfast.regularizers import REGULARIZERS
from holdfast.results import RunResult
from holdfast.training import run

__all__ = [
    "BENCHMARKS",
    "LEARNERS",
    "MODELS",
    "REGULARIZERS",
    "AccuracyMatrix",
    "CheckpointError",
    "ConsistencyReplay",
    "DataError",
    "DriftMonitor",
    "ExperienceReplay",
    "ForgettingMonitor",
    "ForgettingWarning",
    "HoldfastError",
    "Learner",
    "Losses",
    "Reservoir",
    "RunConfig",
    "RunResult",
    "ShardedReservoir",
    "StorageError",
    "TopK",
    "TrainingError",
    "UsageError",
    "analysis",
    "choose_threads",
    "evaluate",
    "export",
    "group_batchnorm",
    "next_tokens",
    "per_sample",
    "run",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The API, for `dir` and for completion. Submodules can be imported all the same."""
    return [*__all__, "__doc__", "__version__"]
