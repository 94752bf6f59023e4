"""The consistency regularizers of the paper: pure functions (current, stored) -> scalar.

`current` are the logits the network gives now, with gradient; `stored` are those it gave when the sample went into
the buffer. Both have shape (B, C). A smaller value means that the network answers more as it used to. Every function
is finite, with finite gradients, for identical inputs, for rows of zeros, for B = 1, and for logits of +-1e4.

Adding one takes ten lines:

>>> from holdfast.regularizers import REGULARIZERS
>>> @REGULARIZERS.register("huber", "Huber distance of the logits")
... def huber(current, stored, *, delta=1.0):
...     return torch.nn.functional.huber_loss(current, stored, delta=delta)
>>> "huber" in REGULARIZERS
True
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.methods import REGULARIZERS

__all__ = ["REGULARIZERS", "Regularizer"]


Regularizer = Callable[..., Tensor]
"""A function of two (B, C) logit tensors; its hyper-parameters are keyword arguments with defaults."""


# --- strict consistency: the logits themselves must stay where they were ---------------------------------------------


@REGULARIZERS.register("l1")
def l1(current: Tensor, stored: Tensor) -> Tensor:
    """Mean over rows of the L1 norm of the difference. A sum over classes: the more there are, the smaller a weight."""
    return (current - stored).abs().sum(dim=1).mean()


@REGULARIZERS.register("l2")
def l2(current: Tensor, stored: Tensor) -> Tensor:
    """Mean over rows of the L2 norm of the difference."""
    # linalg's norm has subgradient 0 at 0, where sqrt would give NaN.
    norms: Tensor = torch.linalg.vector_norm(current - stored, dim=1)
    return norms.mean()


@REGULARIZERS.register("linf")
def linf(current: Tensor, stored: Tensor) -> Tensor:
    """Mean over rows of the largest absolute difference."""
    return (current - stored).abs().amax(dim=1).mean()


@REGULARIZERS.register("mse")
def mse(current: Tensor, stored: Tensor) -> Tensor:
    """Mean squared difference over rows and classes."""
    return F.mse_loss(current, stored)


@REGULARIZERS.register("kl")
def kl(current: Tensor, stored: Tensor) -> Tensor:
    """KL(stored || current) of the softmax outputs, mean over rows and classes."""
    # The direction and the division by C are those behind the published numbers; the paper's text has the other.
    # (`reduction="mean"` warns that it will change its meaning, so the mean is taken here.)
    now, then = F.log_softmax(current, dim=1), F.log_softmax(stored, dim=1)
    return F.kl_div(now, then, reduction="none", log_target=True).mean()


# --- approximate consistency: borrowed from self-supervised learning -------------------------------------------------


@REGULARIZERS.register("mi")
def mi(current: Tensor, stored: Tensor) -> Tensor:
    """Minus the mutual information of the two softmax outputs, estimated over the batch."""
    joint = current.softmax(dim=1).T @ stored.softmax(dim=1)
    joint = joint + joint.T
    joint = (joint / joint.sum()).clamp_min(torch.finfo(joint.dtype).eps)
    marginals = joint.sum(dim=1, keepdim=True).log() + joint.sum(dim=0, keepdim=True).log()
    return (joint * (marginals - joint.log())).sum()


@REGULARIZERS.register("simclr")
def simclr(current: Tensor, stored: Tensor, *, temperature: float = 0.5) -> Tensor:
    """NT-Xent over the 2B normalised rows; each sample's two logit vectors are the positive pair."""
    rows = F.normalize(torch.cat([current, stored]), dim=1)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    similarity = (rows @ rows.T / temperature).masked_fill(itself, -torch.inf)
    partner = torch.arange(len(rows), device=rows.device).roll(len(current))
    return F.cross_entropy(similarity, partner)


@REGULARIZERS.register("byol")
def byol(current: Tensor, stored: Tensor) -> Tensor:
    """Mean squared distance of the normalised rows, 2 - 2 cos."""
    return (2 - 2 * _cosine(current, stored)).mean()


@REGULARIZERS.register("dino")
def dino(current: Tensor, stored: Tensor, *, student: float = 0.1, teacher: float = 0.06) -> Tensor:
    """Cross-entropy between sharpened softmax outputs of the normalised rows; the stored ones teach."""
    target = (F.normalize(stored, dim=1) / teacher).softmax(dim=1)
    return F.cross_entropy(F.normalize(current, dim=1) / student, target)


@REGULARIZERS.register("barlow")
def barlow(current: Tensor, stored: Tensor, *, diagonal: float = 0.5, off_diagonal: float = 0.05) -> Tensor:
    """Barlow Twins: the classes' cross-correlation over the batch should be the identity."""
    correlation = F.normalize(current, dim=1).T @ F.normalize(stored, dim=1) / len(current)
    squares = correlation.square()
    on = correlation.diagonal()
    # The weights are those behind the published numbers; the paper's text has equal ones.
    return diagonal * (1 - on).square().sum() + off_diagonal * (squares.sum() - squares.diagonal().sum())


@REGULARIZERS.register("simsiam")
def simsiam(current: Tensor, stored: Tensor) -> Tensor:
    """Minus the mean cosine similarity."""
    return -_cosine(current, stored).mean()


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise cosine similarity, (B,); 0 for a row of zeros."""
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(dim=1)
