"""Cross-entropy of a minibatch and a draw by which the newest classes do not push all others aside.

`asymmetric` is ER-ACE's (Caccia et al., ICLR 2022); `adjusted` is logit adjustment (Menon et al., "Long-tail learning
via logit adjustment", ICLR 2021) with the counts of a step, or of several.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.errors import UsageError
from holdfast.learners.losses import NEVER
from holdfast.learners.options import check_shares, check_weights

__all__ = ["FairEntropy"]


class FairEntropy:
    """The cross-entropy of a minibatch, and that of a draw.

    asymmetric: the minibatch leaves classes alone that were seen before and are absent from it.
    adjusted: to each output is added `strength` * log(1 + how often the labels have its class).
    recall: the share of the counts of earlier steps that is added to those of a step.

    Outputs are (B, C), or (B, 4 C) where a class at each of four angles is a class of its own: class c at angle k is
    c + k * C. It has the class weight of c and is absent where c is, but it is counted by itself.
    """

    def __init__(
        self,
        classes: int,
        device: torch.device,
        *,
        asymmetric: bool = False,
        adjusted: bool = False,
        strength: float = 1.0,
        recall: float = 0.0,
        class_weights: Tensor | None = None,
    ) -> None:
        check_weights(strength=strength)
        check_shares(recall=recall)
        if strength != 1.0 and not adjusted:
            raise UsageError("strength belongs to adjusted=True: set adjusted=True, or strength=1.")
        if recall and not adjusted:
            raise UsageError("recall belongs to adjusted=True: set adjusted=True, or recall=0.")
        self.asymmetric, self.adjusted, self.strength, self.recall = asymmetric, adjusted, strength, recall
        self.class_weights = class_weights
        self.seen = torch.zeros(classes, dtype=torch.bool, device=device)
        sizes = (classes, 4 * classes) if recall else ()
        self.recalled = {size: torch.zeros(size, device=device) for size in sizes}
        """Counts of earlier steps, by the number of outputs."""

    def __call__(self, outputs: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """The cross-entropy of each of the two, given their outputs and labels."""
        observed, drawn = outputs
        if self.asymmetric:
            observed = observed.masked_fill(self.absent(labels[0], observed.shape[1]), NEVER)
        if self.adjusted:
            advantage = self.advantage(observed, labels)
            observed, drawn = observed + advantage, drawn + advantage
        weights = self.class_weights
        if weights is not None:
            weights = weights.to(observed.dtype).repeat(observed.shape[1] // len(weights))
        return [F.cross_entropy(each, y, weights) for each, y in zip((observed, drawn), labels, strict=True)]

    def absent(self, labels: Tensor, outputs: int) -> Tensor:
        """Which of so many outputs belong to classes that were seen in earlier steps and are not among the labels."""
        classes = len(self.seen)
        return self.seen.index_fill(0, labels % classes, False).repeat(outputs // classes)

    def advantage(self, outputs: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """What is added to each row of outputs that are adjusted, (C,) or (4 C,)."""
        return self.strength * self._counts(torch.cat(list(labels)), outputs[0]).log()

    def _counts(self, labels: Tensor, like: Tensor) -> Tensor:
        """1 + how often the labels of this step and, with `recall`, of earlier ones have each class; as `like`."""
        counts = torch.ones_like(like).index_add(0, labels, torch.ones_like(labels, dtype=like.dtype))
        return counts + self.recall * self.recalled[len(counts)].to(counts.dtype) if self.recall else counts

    def commit(self, labels: Tensor, learned: Sequence[Tensor]) -> None:
        """Remember the classes of a minibatch that the network has learned, and how frequent its step made each.

        `learned` are all labels of the step: those of images as they are and, if there were any, of turned ones.
        """
        self.seen.index_fill_(0, labels, True)
        for recalled, each in zip(self.recalled.values(), learned, strict=False):
            recalled.copy_(self._counts(each, recalled) - 1)

    def state(self) -> dict[str, Tensor]:
        """What is saved and restored."""
        return {"seen": self.seen} | {f"recalled {size}": counts for size, counts in self.recalled.items()}
