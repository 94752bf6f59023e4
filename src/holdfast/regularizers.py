"""The consistency regularizers of the paper: functions (current, stored) -> scalar, the smaller the more consistent.

`current` are the logits that the network gives now, with gradient; `stored` are those it gave when the sample went into
the buffer. Both are (B, C). Each formula is for one sample, and the function returns the mean over the samples:

    z, s    a row of `current` and of `stored`      p, q    softmax(z) and softmax(s)
    c, d    classes, from 1 to C                    u, v    z and s divided by their L2 norm

Every function is finite, with finite gradients, for identical inputs, for rows of zeros, for B = 1, and for logits of
+-1e4. To add one takes ten lines:

>>> from holdfast.regularizers import REGULARIZERS
>>> @REGULARIZERS.register("huber", "Huber distance of the logits")
... def huber(current, stored, *, delta=1.0):
...     return torch.nn.functional.huber_loss(current, stored, delta=delta)
>>> "huber" in REGULARIZERS
True
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.methods import REGULARIZERS
from holdfast.registry import unknown_name

__all__ = ["KINDS", "REGULARIZERS", "Regularizer", "compares", "kind_of", "name_of"]

Regularizer = Callable[..., Tensor]
"""A function of two (B, C) logit tensors; its hyper-parameters are keyword arguments with defaults."""

KINDS = {
    "numbers": "any numbers of one sample or position, column by column",
    "logits": "logits of one sample or position",
    "probabilities": "probabilities of one sample or position: it takes a softmax over all columns",
    "batch": "samples or classes with each other",
}
"""What a regularizer compares, and so what it can be given where a sample has many positions."""

R = TypeVar("R", bound=Regularizer)


def compares(kind: str) -> Callable[[R], R]:
    """A decorator that says what a regularizer compares, one of `KINDS`; without it, "numbers"."""
    if kind not in KINDS:
        raise unknown_name("kind of regularizer", kind, list(KINDS))

    def mark(function: R) -> R:
        function.kind = kind  # type: ignore[attr-defined]
        return function

    return mark


def kind_of(regularizer: Regularizer) -> str:
    """What a regularizer compares, also if some of its arguments are bound."""
    kind: str = getattr(getattr(regularizer, "func", regularizer), "kind", "numbers")
    return kind


def name_of(function: Callable[..., object]) -> str:
    """How a function is called in a sentence, also if some of its arguments are bound."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__))


# --- strict consistency: the logits themselves must stay where they were ---------------------------------------------


@REGULARIZERS.register("l1", "L1 norm of the difference; with more classes it needs a smaller weight")
def l1(current: Tensor, stored: Tensor) -> Tensor:
    """Σ_c |z_c - s_c|."""
    return (current - stored).abs().sum(dim=1).mean()


@REGULARIZERS.register("l2", "L2 norm of the difference")
def l2(current: Tensor, stored: Tensor) -> Tensor:
    """√ Σ_c (z_c - s_c)²."""
    # linalg's norm has subgradient 0 at 0, where sqrt would give NaN.
    norms: Tensor = torch.linalg.vector_norm(current - stored, dim=1)
    return norms.mean()


@REGULARIZERS.register("linf", "Largest absolute difference")
def linf(current: Tensor, stored: Tensor) -> Tensor:
    """max_c |z_c - s_c|."""
    return (current - stored).abs().amax(dim=1).mean()


@REGULARIZERS.register("mse", "Mean squared difference over samples and classes")
def mse(current: Tensor, stored: Tensor) -> Tensor:
    """1/C Σ_c (z_c - s_c)²."""
    return F.mse_loss(current, stored)


# --- approximate consistency: probabilities, directions or similarities must stay, not the logits --------------------


@REGULARIZERS.register("kl", "KL(stored || current) of the softmax outputs, mean over samples and classes")
@compares("probabilities")
def kl(current: Tensor, stored: Tensor) -> Tensor:
    """1/C Σ_c q_c log(q_c / p_c)."""
    # The direction and the factor 1/C are those behind the published numbers; the paper's text has the other direction.
    # (`reduction="mean"` warns that it will change its meaning, so the mean is taken here.)
    now, then = F.log_softmax(current, dim=1), F.log_softmax(stored, dim=1)
    return F.kl_div(now, then, reduction="none", log_target=True).mean()


@REGULARIZERS.register("mi", "Minus the mutual information of the two softmax outputs, estimated over the batch")
@compares("batch")
def mi(current: Tensor, stored: Tensor) -> Tensor:
    """-Σ_cd J_cd log(J_cd / (J_c J_d)), where J_c = Σ_d J_cd and J_cd ~ p_c q_d + p_d q_c, summed over the batch."""
    joint = current.softmax(dim=1).T @ stored.softmax(dim=1)
    joint = joint + joint.T
    joint = (joint / joint.sum()).clamp_min(torch.finfo(joint.dtype).eps)
    marginals = joint.sum(dim=1, keepdim=True).log() + joint.sum(dim=0, keepdim=True).log()
    return (joint * (marginals - joint.log())).sum()


@REGULARIZERS.register("simclr", "NT-Xent over the 2B normalised rows; a sample's two rows are the positive pair")
@compares("batch")
def simclr(current: Tensor, stored: Tensor, *, temperature: float = 0.5) -> Tensor:
    """-log(exp(w·w⁺ / temperature) / Σ exp(w·w' / temperature)), mean over all rows w of u and v.

    w⁺ is the other row of the same sample; the sum is over all rows w' other than w.
    """
    rows = F.normalize(torch.cat([current, stored]), dim=1)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    similarity = (rows @ rows.T / temperature).masked_fill(itself, -torch.inf)
    partner = torch.arange(len(rows), device=rows.device).roll(len(current))
    return F.cross_entropy(similarity, partner)


@REGULARIZERS.register("byol", "Squared distance of the normalised rows")
@compares("logits")
def byol(current: Tensor, stored: Tensor) -> Tensor:
    """|u - v|² = 2 - 2 u·v."""
    return (2 - 2 * _cosine(current, stored)).mean()


@REGULARIZERS.register("dino", "Cross-entropy of sharpened softmax outputs of the normalised rows; stored ones teach")
@compares("probabilities")
def dino(current: Tensor, stored: Tensor, *, student: float = 0.1, teacher: float = 0.06) -> Tensor:
    """-Σ_c softmax(v / teacher)_c log softmax(u / student)_c."""
    target = (F.normalize(stored, dim=1) / teacher).softmax(dim=1)
    return F.cross_entropy(F.normalize(current, dim=1) / student, target)


@REGULARIZERS.register("barlow", "Barlow Twins: the classes' cross-correlation over the batch should be the identity")
@compares("batch")
def barlow(current: Tensor, stored: Tensor, *, diagonal: float = 0.5, off_diagonal: float = 0.05) -> Tensor:
    """diagonal Σ_c (1 - R_cc)² + off_diagonal Σ_c≠d R_cd², where R_cd is the mean of u_c v_d over the batch."""
    correlation = F.normalize(current, dim=1).T @ F.normalize(stored, dim=1) / len(current)
    squares = correlation.square()
    on = correlation.diagonal()
    # The weights are those behind the published numbers; the paper's text has equal ones.
    return diagonal * (1 - on).square().sum() + off_diagonal * (squares.sum() - squares.diagonal().sum())


@REGULARIZERS.register("simsiam", "Minus the cosine similarity")
@compares("logits")
def simsiam(current: Tensor, stored: Tensor) -> Tensor:
    """-u·v."""
    return -_cosine(current, stored).mean()


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise cosine similarity, (B,); 0 for a row of zeros."""
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(dim=1)
