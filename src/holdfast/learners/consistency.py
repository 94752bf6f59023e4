"""Experience replay with consistency regularization: the method of the paper (Algorithm 1)."""

from collections.abc import Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.buffer import Draw
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.answers import Largest
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_choice, check_sizes, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.models import GroupedForward
from holdfast.nested import Nested, rows
from holdfast.pure import pure
from holdfast.registry import unknown_name
from holdfast.regularizers import REGULARIZERS, Regularizer, kind_of, name_of

__all__ = ["ConsistencyReplay"]


@LEARNERS.register("consistency", "experience replay with consistency regularization")
class ConsistencyReplay(ReplayLearner):
    """Experience replay that also keeps the network's outputs for stored samples close to the stored ones.

    loss = CE(current) + alpha * CE(draw 2) + beta * regularizer(outputs now, outputs then; draw 1)

    CE is cross-entropy, or the `loss` that is given in its place. With `replay`, the two draws are one. Stored inputs
    are augmented anew for every draw. A model with BatchNorm makes three passes a step. If `group_batchnorm` was
    applied, one pass gives the same result.

    Outputs may have other shapes than (B, C). Without `class_dim`, the regularizer then gets one row per sample,
    (B, ...) -> (B, -1). "l1", "l2", "linf", "mse" and functions of your own take such rows; the others would take them
    for logits, and are refused.

    Options of this learner:

    - regularizer: a registered name, or any function (outputs now, outputs then) -> number. Default: "mse".
    - alpha: weight of the loss on draw 2. Default: 1.
    - beta: weight of the consistency term. Default: 1.
    - consistency_size: samples of draw 1; those of draw 2 are `replay_size`. Default: as many as observed.
    - options: hyper-parameters of the regularizer by name. Default: its own.
    - batchnorm: "apart" for statistics of each minibatch and draw alone, as in the paper; "together" for one pass with
        common statistics. Which of them is better depends on the problem, by many points. Default: "apart".
    """

    passes = ((1, 1), (3, 3))
    stores_outputs = True
    takes_positions = True

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
        self.kind = kind_of(self.regularizer)
        """What the regularizer compares."""
        if self.kind == "batch" and isinstance(self.answers, Largest):
            raise UsageError(
                f"{name_of(self.regularizer)} compares rows or classes with each other, of which TopK stores a part: "
                "use another regularizer, or store whole outputs."
            )
        check_weights(alpha=alpha, beta=beta)
        check_sizes(consistency_size=consistency_size)
        if consistency_size is not None and self.replay is not None:
            raise UsageError("replay says how many samples are drawn for both terms: leave out consistency_size.")
        self.alpha, self.beta, self.consistency_size = alpha, beta, consistency_size
        check_choice(("apart", "together"), batchnorm=batchnorm)
        self._groups = GroupedForward(self.model, apart=batchnorm == "apart")
        at_once = self.loss is None and self.replay is not None and self._groups.needless
        self.large = self.answers if at_once and isinstance(self.answers, Largest) else None
        """What stores the outputs, where they are large and one reading of them gives all terms of one draw."""
        # DistributedDataParallel overwrites the other ranks' buffers with the first rank's before every pass. Those of
        # BatchNorm belong to the pass before as well, and not every PyTorch then allows its backward pass.
        several = not self._groups.fused
        if several and isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            raise UsageError(
                "this model's BatchNorm takes three passes a step, and DistributedDataParallel would change its "
                "buffers between them: apply holdfast.group_batchnorm to the model before wrapping it, which makes it "
                "one pass."
            )

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

    def answers_for(self, outputs: Tensor, logs: Tensor | None = None) -> Nested:
        """What is stored of outputs; refused if the regularizer takes positions for one row, or has no gradient."""
        if outputs.dim() > 2 and self.positions is None and self.kind != "numbers":
            self.refuse(
                UsageError(
                    f"{name_of(self.regularizer)} compares logits (samples, classes), but the model's outputs have "
                    f"shape {tuple(outputs.shape)}: say where the classes are, as in class_dim=-1, or use l1, l2, linf "
                    "or mse."
                )
            )
        columns = outputs.shape[1:].numel() if self.positions is None else self.positions.last(outputs).shape[-1]
        if columns == 1 and self.kind != "numbers" and self.head is None:
            self.refuse(
                UsageError(
                    f"{name_of(self.regularizer)} does nothing where the model has one output, since its gradient is 0 "
                    "there: use l1, l2, linf or mse."
                )
            )
        return super().answers_for(outputs, logs)

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Algorithm 1 of the paper up to its loss: two draws, the outputs for all, three terms; and the offer."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, draw1, draw2 = self._draw_twice(x, y)
        if self.large is not None and self._groups.needless:  # a language model's: all terms from one reading
            return self._read_once(self.large, x, y, draw2)
        plan = self.plan(x, y)
        outputs, now, replayed = self._outputs(x, draw1, draw2)
        self.check_labels(y, outputs)
        now, then = self.compare(now, draw1, self.kind)
        targets, labels = self.targets(x, y), self.targets(draw2.x, draw2.y)
        total, current, replay, consistency, outputs = self.objective(outputs, targets, now, then, replayed, labels)
        if self.validate and now.requires_grad and not consistency.requires_grad:
            self.refuse(_no_gradient(name_of(self.regularizer)))
        offer = self.offer(x, y, outputs, plan)
        return Losses(total, current=current, replay=replay, consistency=consistency, offer=offer)

    @pure
    def objective(
        self, outputs: Tensor, y: Nested, now: Tensor, then: Tensor, replayed: Tensor, labels: Nested
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The loss and its three terms, from the outputs for the minibatch, draw 1 and draw 2; and the first, widened.

        Outputs are widened here, where a compiler fuses it with the losses.
        """
        outputs, now, replayed = widen(outputs), widen(now), widen(replayed)
        current = self.criterion(outputs, y)
        replay = self.criterion(replayed, labels)
        consistency = self.distance(now, then)
        return current + self.alpha * replay + self.beta * consistency, current, replay, consistency, outputs

    def distance(self, now: Tensor, then: Tensor) -> Tensor:
        """How far outputs are from where they were; 0 if there are none."""
        return self.regularizer(_rows(now), _rows(then)) if len(now) else now.sum()

    def _draw_twice(self, x: Nested, y: Nested) -> tuple[Nested, Nested, Draw, Draw]:
        """The minibatch and two draws, of one length; with the option `replay`, the two are one."""
        draws = [] if self.replay is not None else [self.buffer.sample(self.consistency_size or rows(y))]
        x, y, draws = self.align(x, y, *draws, self.draw(y))
        return x, y, draws[0], draws[-1]

    def _outputs(self, x: Nested, draw1: Draw, draw2: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs for the minibatch and both draws; one draw is not shown twice."""
        inputs = [x, draw1.x] if draw1 is draw2 else [x, draw1.x, draw2.x]
        outputs = self.forward_groups(*inputs, widened=False)
        return outputs[0], outputs[1], outputs[-1]

    def _read_once(self, large: Largest, x: Nested, y: Nested, drawn: Draw) -> Losses:
        """What `compute_losses` gives with one draw, from one reading of the outputs; nothing waits after the pass."""
        plan = self.plan(x, y)
        try:
            past = large.look(drawn, self.kind)
        except UsageError as error:
            self.refuse(error)
        reading, offer = self._read(large.positions, x, y, plan, drawn, past=past)
        (current, replay), consistency = reading.losses(), self.distance(*reading.pair(past))
        total = current + self.alpha * replay + self.beta * consistency
        return Losses(total, current=current, replay=replay, consistency=consistency, offer=offer)


def _rows(outputs: Tensor) -> Tensor:
    """Outputs as (B, C), which they mostly are."""
    return outputs if outputs.dim() == 2 else outputs.reshape(len(outputs), -1)


def _bound(given: str | Regularizer, options: Mapping[str, float]) -> Regularizer:
    """The regularizer with its hyper-parameters bound; an unknown name raises now, not at the first step."""
    function = REGULARIZERS[given] if isinstance(given, str) else given
    taken = signature(function)
    try:
        taken.bind_partial(None, None)
    except TypeError:
        wanted = "two arguments: the outputs now, and those stored"
        raise UsageError(f"the regularizer {name_of(function)} must take {wanted}.") from None
    known = dict(list(taken.parameters.items())[2:])  # the first two are the outputs
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
    if not value.requires_grad:
        raise _no_gradient(name)


def _no_gradient(name: str) -> UsageError:
    return UsageError(
        f"the regularizer {name} has no gradient, so that it would do nothing: what it returns must depend on its "
        "first argument, without detach, argmax or rounding."
    )
