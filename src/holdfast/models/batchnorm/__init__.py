"""BatchNorm with statistics per minibatch: which rows belong together (groups), and how they are normalised."""

from holdfast.models.batchnorm.groups import GroupedBatchNorm, GroupedForward, group_batchnorm, normalized_relu

__all__ = ["GroupedBatchNorm", "GroupedForward", "group_batchnorm", "normalized_relu"]
