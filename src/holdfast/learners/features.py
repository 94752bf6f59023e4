"""What the last layer of a network sees of each sample, noted while the network is called as it always is."""

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.learners.base import Learner
from holdfast.learners.losses import widen
from holdfast.models import last_layer, seen_by
from holdfast.nested import Nested, rows

__all__ = ["Noted"]


class Noted:
    """Calls a network for a learner, and notes the features: what its last nn.Linear sees."""

    def __init__(self, learner: Learner, network: Callable[[Any], Tensor]) -> None:
        # An engine or torch.compile may have compiled it; compiled code does not tell what a layer sees.
        plain = unwrap(network)
        self.network: nn.Module = getattr(plain, "_orig_mod", plain)
        self._learner, self._layer = learner, last_layer(self.network)
        self._found: list[Tensor] = []

    def __call__(self, view: Nested) -> Tensor:
        """The outputs for a view."""
        with seen_by(self._layer) as seen:
            outputs = self._learner.answer(view, self.network)
        if sum(map(len, seen)) != rows(view):
            self._learner.refuse(
                UsageError("hold_features and turn need a model that calls its last nn.Linear once a sample.")
            )
        self._found += seen
        return outputs

    def features(self, sizes: Sequence[int]) -> Tensor:
        """The features (rows, D) of the last minibatches, which had these sizes: `GroupedForward` may repeat a pass."""
        found = list(self._found)
        while sum(map(len, found)) > sum(sizes):
            del found[0]
        return widen(torch.cat(found)).flatten(1)
