"""The networks of the paper, and BatchNorm with statistics per minibatch."""

from holdfast.models.adapted import Adapted
from holdfast.models.batchnorm import GroupedBatchNorm, GroupedForward, group_batchnorm
from holdfast.models.networks import (
    MLP,
    MODELS,
    ResNet18,
    check_features,
    count_outputs,
    evaluating,
    features,
    last_layer,
    preferred_threads,
)

__all__ = [
    "MLP",
    "MODELS",
    "Adapted",
    "GroupedBatchNorm",
    "GroupedForward",
    "ResNet18",
    "check_features",
    "count_outputs",
    "evaluating",
    "features",
    "group_batchnorm",
    "last_layer",
    "preferred_threads",
]
