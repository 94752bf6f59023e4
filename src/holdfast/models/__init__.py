"""The networks of the paper, and BatchNorm with statistics per minibatch."""

from holdfast.models.adapted import Adapted
from holdfast.models.anatomy import (
    by_keywords,
    check_features,
    copied,
    count_outputs,
    evaluating,
    features,
    is_pretrained,
    last_layer,
    seen_by,
    way_back,
)
from holdfast.models.batchnorm import GroupedBatchNorm, GroupedForward, group_batchnorm
from holdfast.models.networks import MLP, MODELS, ResNet18

__all__ = ["MLP", "MODELS", "Adapted", "GroupedBatchNorm", "GroupedForward", "ResNet18", "by_keywords"]
__all__ += ["check_features", "copied", "count_outputs", "evaluating", "features", "group_batchnorm", "is_pretrained"]
__all__ += ["last_layer", "seen_by", "way_back"]
