"""Experience replay with consistency regularization: the method of the paper (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.base import Learner, ReplayLearner
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_sizes, check_weights
from holdfast.methods import LEARNERS
from holdfast.nested import Nested, rows, split
from holdfast.pure import pure
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS, Regularizer

__all__ = ["ConsistencyReplay", "check_width"]


@LEARNERS.register("consistency", "experience replay with consistency regularization")
class ConsistencyReplay(ReplayLearner):
    """Replay that also holds the network's outputs on stored samples where they were.

    loss = CE(current) + alpha * CE(draw 2) + beta * regularizer(outputs now, outputs then; draw 1)

    A `loss` given in place of cross-entropy takes the place of CE. Outputs of other shapes than (B, C) are made rows
    for the regularizer, (B, ...) -> (B, -1); "l1", "l2", "linf" and "mse" make sense for any. Stored inputs are
    augmented anew for every draw. A model with BatchNorm takes three passes a step, unless `group_batchnorm` was
    applied, then one pass gives the same result, or `batchnorm` is "together".

    Options of this learner:

    regularizer: a registered name, or any function (outputs now, outputs then) -> number. Default: "mse".
    alpha: weight of the loss on draw 2. Default: 1.
    beta: weight of the consistency term. Default: 1.
    consistency_size: samples of draw 1; those of draw 2 are `replay_size`. Default: as many as observed.
    options: hyper-parameters of the regularizer by name. Default: its own.
    batchnorm: "apart" for statistics of each minibatch and draw alone, as in the paper; "together" for one pass with
        common statistics. Which of them is better depends on the problem, by many points. Default: "apart".
    """

    stores_outputs = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        regularizer: str | Regularizer = "mse",
        alpha: float = 1.0,
        beta: float = 1.0,
        consistency_size: int | None = None,
        options: Mapping[str, float] | None = None,
        batchnorm: str = "apart",
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        self.regularizer = _bound(regularizer, options or {})
        check_weights(alpha=alpha, beta=beta)
        check_sizes(consistency_size=consistency_size)
        self.alpha, self.beta, self.consistency_size = alpha, beta, consistency_size
        if batchnorm not in ("apart", "together"):
            raise unknown_name("batchnorm", batchnorm, ["apart", "together"])
        self.batchnorm = batchnorm
        if isinstance(model, DistributedDataParallel) and batchnorm == "apart" and not self._groups.fused:
            _check_passes(model)

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """Draw 1 has the size of a run's replay batch, draw 2 that of its minibatches."""
        regularizer = _bound(config.method, dict(config.options))
        _check_value(config.method, regularizer)
        return {
            "regularizer": regularizer,
            "alpha": config.alpha,
            "beta": config.beta,
            "consistency_size": config.replay_size,
            "replay_size": config.batch_size,
            "options": {},
        }

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """The three terms: the minibatch, draw 1 with its stored outputs, draw 2 with its labels."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        draw1 = self.buffer.sample(self.consistency_size or rows(y))
        draw2 = self.draw(y)
        inputs = x, draw1.x, draw2.x
        if self.batchnorm == "apart":
            outputs, now, replayed = self.forward_groups(*inputs, widened=False)
        else:
            outputs, now, replayed = split(self.forward(self.view(*inputs)), [rows(part) for part in inputs])
        self.check_labels(y, outputs)
        then = check_width(self, now, draw1.logits)
        losses, logits = self.objective(outputs, y, now, then, replayed, draw2.y)
        total, current, replay, consistency = losses
        offer = self.offer(x, y, logits)
        return Losses(total, current=current, replay=replay, consistency=consistency, offer=offer)

    @pure
    def objective(
        self, outputs: Tensor, y: Nested, now: Tensor, then: Tensor, replayed: Tensor, labels: Nested
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The loss and its three terms, from the outputs for the minibatch, draw 1 and draw 2; and the first, widened.

        Outputs are widened here, where a compiler fuses it with the losses.
        """
        outputs, now, replayed = widen(outputs), widen(now), widen(replayed)
        current = self.criterion(outputs, y)
        replay = self.criterion(replayed, labels)
        consistency = self.regularizer(_rows(now), _rows(then))
        return (current + self.alpha * replay + self.beta * consistency, current, replay, consistency), outputs


def check_width(learner: Learner, outputs: Tensor, stored: Tensor | None) -> Tensor:
    """The stored outputs; the model must still have as many as when they were made."""
    if stored is None:
        learner.refuse(
            UsageError(
                "the buffer holds samples without logits, as ExperienceReplay stores them; continue with that, or "
                "give this learner a buffer of its own."
            )
        )
    if outputs.shape != stored.shape:
        now, then = ("x".join(map(str, each.shape[1:])) for each in (outputs, stored))
        learner.refuse(
            UsageError(
                f"the model now has {now} outputs, but the buffer holds logits of {then}; start a new learner "
                'after changing the head, or let the learner change it, with head="classifier" or what its name is.'
            )
        )
    return stored


def _rows(outputs: Tensor) -> Tensor:
    """Outputs as (B, C), which they mostly are."""
    return outputs if outputs.dim() == 2 else outputs.reshape(len(outputs), -1)


def _check_passes(model: DistributedDataParallel) -> None:
    """Raise if the model cannot go through several passes before one backward pass.

    DistributedDataParallel overwrites the other ranks' buffers with the first rank's before every pass. Those of
    BatchNorm belong to the pass before as well, and not every PyTorch then allows its backward pass.
    """
    if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        raise UsageError(
            "this model's BatchNorm takes three passes a step, and DistributedDataParallel would change its buffers "
            "between them: apply holdfast.group_batchnorm to the model before wrapping it, which makes it one pass."
        )


def _bound(given: str | Regularizer, options: Mapping[str, float]) -> Regularizer:
    """The regularizer with its hyper-parameters bound; an unknown name raises now, not at the first step."""
    function = REGULARIZERS[given] if isinstance(given, str) else given
    known = dict(list(signature(function).parameters.items())[2:])  # the first two are the outputs
    for name in options:
        if name not in known:
            raise unknown_name("hyper-parameter of the regularizer", name, list(known))
    for name, parameter in known.items():
        if name not in options and parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty:
            raise UsageError(f"the regularizer needs a value for {name}: give it a default, or one in options.")
    return partial(function, **options) if options else function


def _check_value(name: str, regularizer: Regularizer) -> None:
    """A regularizer must give one number; a run has no time to check that in every step."""
    logits = torch.eye(3)
    value: object = regularizer(logits.clone().requires_grad_(), logits)
    if not isinstance(value, Tensor) or value.dim():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UsageError(f"the regularizer {name} returns {found}; it must return one number, a tensor of shape ().")
