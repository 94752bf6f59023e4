"""What one step does, nothing else. One file per learner."""

from holdfast.learners.base import LEARNERS, Learner, Losses, Parts, build, method_names
from holdfast.learners.consistency import ConsistencyReplay
from holdfast.learners.descent import BfloatTwin, Optimizer, PlainSgd
from holdfast.learners.er import ExperienceReplay
from holdfast.learners.sgd import Joint, Sgd

__all__ = [
    "LEARNERS",
    "BfloatTwin",
    "ConsistencyReplay",
    "ExperienceReplay",
    "Joint",
    "Learner",
    "Losses",
    "Optimizer",
    "Parts",
    "PlainSgd",
    "Sgd",
    "build",
    "method_names",
]
