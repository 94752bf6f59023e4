"""Experience replay with consistency regularization: the method of the paper (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.augment import View
from holdfast.buffer import Reservoir
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.base import LEARNERS, Learner, Loss, Losses, Parts, widen
from holdfast.learners.checks import check_sizes, check_weights
from holdfast.learners.descent import Optimizer, Scheduler
from holdfast.models import GroupedForward
from holdfast.nested import Nested, concat, rows, transform
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS, Regularizer

__all__ = ["ConsistencyReplay"]


@LEARNERS.register("consistency", "experience replay with consistency regularization")
class ConsistencyReplay(Learner):
    """Replay that also keeps the network's answers on stored samples where they were.

    loss = CE(current) + alpha * CE(draw 2) + beta * regularizer(logits now, logits then; draw 1)

    A `loss` given instead of cross-entropy takes the place of CE, and the model's outputs that of logits; outputs of
    other shapes than (B, C) are made rows for the regularizer, (B, ...) -> (B, -1), where "l1", "l2", "linf" and "mse"
    make sense for any. `regularizer` is a registered name or any callable of two such tensors. `consistency_size` and
    `replay_size` are the sizes of draw 1 and draw 2 (as many as observed, if None). Stored inputs are augmented anew
    for every draw. `storage` says where stored samples are: in the memory of the "device" or the "host", or in files
    in a folder (a Path). Models with BatchNorm run three passes a step unless `group_batchnorm` was applied, which
    makes it one with the same result. `Learner` says what the other options do.
    """

    compilable = ("objective",)
    buffer: Reservoir

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        buffer_size: int,
        regularizer: str | Regularizer = "mse",
        alpha: float = 1.0,
        beta: float = 1.0,
        consistency_size: int | None = None,
        replay_size: int | None = None,
        options: Mapping[str, float] | None = None,
        augment: View | None = None,
        loss: Loss | None = None,
        class_weights: Tensor | Sequence[float] | None = None,
        clip: float | None = None,
        scheduler: Scheduler | None = None,
        head: str | None = None,
        precision: str = "float32",
        validate: bool = True,
        seed: int = 0,
        generator: torch.Generator | None = None,
        storage: str | Path = "device",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            augment=augment,
            loss=loss,
            class_weights=class_weights,
            clip=clip,
            scheduler=scheduler,
            head=head,
            precision=precision,
            validate=validate,
            seed=seed,
        )
        self.regularizer = _regularizer(regularizer, options or {})
        check_weights(alpha=alpha, beta=beta)
        check_sizes(consistency_size=consistency_size, replay_size=replay_size)
        self.alpha, self.beta = alpha, beta
        self.consistency_size, self.replay_size = consistency_size, replay_size
        self.buffer = self.reserve(buffer_size, seed, generator, storage)
        self.groups = GroupedForward(self.model)
        if isinstance(model, DistributedDataParallel) and not self.groups.fused:
            _check_passes(model)

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run."""
        assert config.buffer_size is not None
        _check_value(config.method, dict(config.options), parts.generator.device)
        return cls(
            parts.model,
            parts.optimizer,
            buffer_size=config.buffer_size,
            regularizer=config.method,
            alpha=config.alpha,
            beta=config.beta,
            consistency_size=config.replay_size,
            replay_size=config.batch_size,
            options=dict(config.options),
            augment=parts.view,
            precision=config.precision,
            validate=False,
            generator=parts.generator,
        )

    def observe(self, x: Nested, y: Nested) -> Losses:
        """One step on the minibatch and two draws; then the minibatch is offered to the buffer."""
        x, y = self.receive(x, y)
        if not self.buffer.stored:
            # A copy, as draws make one in later steps: augment or the model may work in place.
            logits = self.forward(self.augment(transform(torch.clone, x)))
            self.check_labels(y, logits)
            self.check_offer(x, y, logits)
            loss = self.criterion(logits, y)
            losses = Losses(loss, loss, self._zero, self._zero)
        else:
            draw1 = self.buffer.sample(self.consistency_size or rows(y))
            draw2 = self.buffer.sample(self.replay_size or rows(y))
            outputs = self.forward_groups(x, draw1.x, draw2.x)
            self.check_labels(y, outputs[0])
            past = self.check_width(outputs[1], draw1.logits)
            losses, logits = self.objective(outputs, y, past, draw2.y)
        self.descend(losses.total)
        # The image as it came, with the logits its view had before this step's update.
        self.buffer.add(x, y, logits.detach())
        return losses.detach()

    def forward_groups(self, *inputs: Nested) -> list[Tensor]:
        """The network's outputs for each minibatch, with BatchNorm statistics of its own."""
        views = self.augment(concat(inputs))
        try:
            with self.autocast():
                return self.groups(views, [rows(part) for part in inputs], self.network)
        except UsageError as error:
            self.refuse(error)

    def objective(self, outputs: list[Tensor], y: Nested, past: Tensor, labels: Nested) -> tuple[Losses, Tensor]:
        """The loss with its terms, and the logits of the minibatch.

        `outputs` are the network's for the minibatch, draw 1 and draw 2; `past` are the logits stored with draw 1, `y`
        and `labels` the labels of the minibatch and of draw 2.
        """
        logits, answers, replayed = (widen(output) for output in outputs)
        current = self.criterion(logits, y)
        replay = self.criterion(replayed, labels)
        consistency = self.regularizer(_rows(answers), _rows(past))
        return Losses(current + self.alpha * replay + self.beta * consistency, current, replay, consistency), logits

    def check_width(self, logits: Tensor, stored: Tensor | None) -> Tensor:
        """The stored logits; the model must still have as many outputs as when they were made."""
        if stored is None:
            self.refuse(
                UsageError(
                    "the buffer holds samples without logits, as ExperienceReplay stores them; continue with that, or "
                    "give this learner a buffer of its own."
                )
            )
        if logits.shape != stored.shape:
            now, then = ("x".join(map(str, each.shape[1:])) for each in (logits, stored))
            self.refuse(
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

    DistributedDataParallel writes the first rank's buffers over the other ranks' before every pass. Those of BatchNorm
    belong to the pass before as well, and not every PyTorch then allows its backward pass.
    """
    if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        raise UsageError(
            "this model's BatchNorm takes three passes a step, and DistributedDataParallel would change its buffers "
            "between them: apply holdfast.group_batchnorm to the model before wrapping it, which makes it one pass."
        )


def _regularizer(given: str | Regularizer, options: Mapping[str, float]) -> Regularizer:
    """The function with its hyper-parameters bound; a name it does not take raises now, not at the first step."""
    function = REGULARIZERS[given] if isinstance(given, str) else given
    known = dict(list(signature(function).parameters.items())[2:])  # the first two are the logits
    for name in options:
        if name not in known:
            raise unknown_name("hyper-parameter of the regularizer", name, list(known))
    for name, parameter in known.items():
        if name not in options and parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty:
            raise UsageError(f"the regularizer needs a value for {name}: give it a default, or one in options.")
    return partial(function, **options) if options else function


def _check_value(name: str, options: Mapping[str, float], device: torch.device) -> None:
    """A regularizer must give one number; a run has no time to look at that in every step."""
    logits = torch.eye(3, device=device)
    value: object = _regularizer(name, options)(logits.clone().requires_grad_(), logits)
    if not isinstance(value, Tensor) or value.dim():
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UsageError(f"the regularizer {name} returns {found}; it must return one number, a tensor of shape ().")
