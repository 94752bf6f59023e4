"""What learners with a buffer share: what is stored of a minibatch, and what is drawn beside it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn

from holdfast.buffer import BalancedReservoir, Draw, Plan, Reservoir, ShardedReservoir, widened
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.answers import Answers, Largest, answers_of
from holdfast.learners.base import Learner
from holdfast.learners.losses import Losses, Offer
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import Options, ReplayOptions, check_sizes
from holdfast.learners.positions import Positions
from holdfast.learners.scores import Past, Reading
from holdfast.nested import Nested, pad, rows, transform
from holdfast.ranks import to_device
from holdfast.rng import generator as seeded_generator

__all__ = ["ReplayLearner"]

BUFFER_OPTIONS = ("buffer_size", "storage", "balanced", "buffer_policy", "generator", "padding")


class ReplayLearner(Learner):
    """Base of learners that store samples. Most of them draw `replay_size` stored samples in each step, see `draw`."""

    needs_buffer = True
    draws: ClassVar[bool] = True
    """Whether a step draws samples, so that there is a `replay_size`."""
    stores_outputs: ClassVar[bool] = False
    """Whether samples are stored with the outputs that the network had for them."""
    chooses: ClassVar[bool] = False
    """Whether the method chooses itself what to store, so that the buffer can have no policy."""
    buffer: Reservoir

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Unpack[ReplayOptions]) -> None:
        if "buffer_size" not in options:
            raise UsageError(f"{type(self).__name__} needs a buffer size, for instance buffer_size=200.")
        stored = {name: options.pop(name) for name in BUFFER_OPTIONS if name in options}  # type: ignore[misc]
        self.replay_size, self.replay = options.pop("replay_size", None), options.pop("replay", None)
        """How many samples a step draws: a number, or a share of the minibatch. Neither: as many as observed."""
        answers = options.pop("answers", None)
        super().__init__(model, optimizer, **cast(Options, options))
        self._check_draws()
        self.answers = self._make_answers(answers)
        """What is stored of outputs."""
        self.padding = self._padding(stored.pop("padding", None))
        """The tensors that vary in length, and what they are padded with. None: all samples have one shape."""
        self.buffer = self._make_buffer(**stored)

    def _make_buffer(
        self,
        buffer_size: int,
        storage: str | Path = "device",
        balanced: bool = False,
        buffer_policy: str = "reservoir",
        generator: torch.Generator | None = None,
    ) -> Reservoir:
        """The buffer that these options describe."""
        if self.chooses and (balanced or buffer_policy != "reservoir"):
            raise UsageError("this method chooses its samples itself: leave out balanced and buffer_policy.")
        if balanced and (self.ranks is not None or buffer_policy != "reservoir"):
            raise UsageError(
                "a buffer of several ranks, or with a buffer_policy, cannot be balanced: leave out balanced."
            )
        # Ranks share a generator on the CPU, which decides for all of them.
        device = self.device if self.ranks is None else torch.device("cpu")
        generator = generator or seeded_generator(self.seed, "buffer", device)
        given: dict[str, Any] = {"generator": generator, "storage": storage, "padding": self.padding}
        if balanced:
            return BalancedReservoir(buffer_size, **given)
        if self.ranks is None:
            return Reservoir(buffer_size, policy=buffer_policy, **given)
        return ShardedReservoir(buffer_size, ranks=self.ranks, device=self.device, policy=buffer_policy, **given)

    def _padding(self, given: Mapping[str, float] | None) -> dict[str, float] | None:
        """What varies in length: where outputs have positions, what is stored of them varies as well."""
        if given is None or self.positions is None:
            return None if given is None else dict(given)
        if self.positions.class_dim != -1:
            raise UsageError("samples that differ in length need outputs (samples, positions, classes): class_dim=-1.")
        return {**dict.fromkeys(self.answers.columns, 0.0), **given}

    def _check_draws(self) -> None:
        """One option says how many samples are drawn, and the method draws some."""
        check_sizes(replay_size=self.replay_size)
        if self.replay is not None and not (math.isfinite(self.replay) and self.replay > 0):
            raise UsageError(f"replay is a share of the minibatch, as in replay=0.25, not {self.replay!r}.")
        if self.replay is not None and self.replay_size is not None:
            raise UsageError("replay and replay_size both say how many samples are drawn: leave out one of them.")
        if (self.replay_size or self.replay) and not self.draws:
            raise UsageError(f"{type(self).__name__} draws no samples: leave out replay_size and replay.")

    def _make_answers(self, given: Any) -> Answers:
        """What this option describes, which must suit the method and its other options."""
        if given is not None and not self.stores_outputs:
            raise UsageError(f"{type(self).__name__} stores no outputs: leave out answers.")
        if given is not None and self.head is not None:
            raise UsageError("answers that are stored in another form cannot grow with the head: leave out answers.")
        return answers_of(given, self.positions)

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The draw has the size of a run's replay batch."""
        return {"replay_size": config.replay_size} if cls.draws else {}

    def draw(self, y: Nested) -> Draw:
        """The stored samples that are replayed beside a minibatch with these targets."""
        if self.replay is not None:
            return self.buffer.sample(max(1, round(self.replay * rows(y))))
        return self.buffer.sample(self.replay_size or rows(y))

    def align(self, x: Nested, y: Nested, *draws: Draw) -> tuple[Nested, Nested, list[Draw]]:
        """The minibatch and draws, filled up to one length where samples differ in length."""
        if self.padding is None:
            return x, y, list(draws)
        xs = pad([x, *(each.x for each in draws)], self.padding, "x")
        ys = pad([y, *(each.y for each in draws)], self.padding, "y")
        padded = zip(draws, xs[1:], ys[1:], strict=True)
        return xs[0], ys[0], [drawn._replace(x=inputs, y=labels) for drawn, inputs, labels in padded]

    def plan(self, x: Nested, y: Nested) -> Plan | None:
        """Which samples of a minibatch the buffer will store, if that is known and spares work.

        Call it when all samples of the step are drawn, and before the forward pass: it waits for the device.
        """
        spares = self.padding is not None or isinstance(self.answers, Largest)
        return self.buffer.plan(x, y) if self.alone and spares else None

    def offer(
        self, x: Nested, y: Nested, outputs: Tensor, plan: Plan | None = None, logs: Tensor | None = None
    ) -> Offer | None:
        """What the buffer is offered of a minibatch: the inputs as they came, and the outputs that their view had.

        With a `plan`, only of the samples that will be stored. `logs` are the outputs' log-probabilities, if known.
        """
        if plan is not None and len(plan.rows) < plan.offered:
            chosen = to_device(plan.rows, outputs.device)
            x, y = (transform(lambda part: part.index_select(0, chosen), each) for each in (x, y))
            if self.stores_outputs:
                outputs = outputs.detach().index_select(0, chosen)
                logs = None if logs is None else logs.index_select(0, chosen)
        return Offer(x, y, self.answers_for(outputs, logs) if self.stores_outputs else None, plan)

    def answers_for(self, outputs: Tensor, logs: Tensor | None = None) -> Nested:
        """What is stored of outputs; `logs` are their log-probabilities, if known."""
        try:
            return self.answers.store(outputs, logs)
        except UsageError as error:
            self.refuse(error)

    def compare(self, now: Tensor, drawn: Draw, kind: str = "numbers") -> tuple[Tensor, Tensor]:
        """The outputs of a draw as they are now and as they were stored; with positions, (rows, classes) each.

        `kind` is what they are compared by, see `holdfast.regularizers.compares`.
        """
        try:
            return self.answers.compare(now, drawn, kind)
        except UsageError as error:
            self.refuse(error)

    def losses_alone(self, x: Nested, y: Nested) -> Losses:
        """The loss of the minibatch alone: what a step descends while nothing is stored."""
        plan = None if self.buffer.stored else self.plan(x, y)  # else a draw may follow, and end the plan
        if isinstance(self.answers, Largest) and self.loss is None:
            reading, offer = self._read(self.answers.positions, x, y, plan)
            loss = reading.losses()[0]
        else:
            outputs, loss = self.learn_alone(x, y)
            offer = self.offer(x, y, outputs, plan)
        return Losses(loss, current=loss, offer=offer)

    def _read(
        self, positions: Positions, x: Nested, y: Nested, plan: Plan | None, *draws: Draw, past: Past | None = None
    ) -> tuple[Reading, Offer | None]:
        """One reading of the outputs for a minibatch, and for a draw if there is one; and the offer of the minibatch.

        `past` is what was looked up of the draw.
        """
        view, targets = self.show([x, *(each.x for each in draws)], [y, *(each.y for each in draws)])
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        reading = Reading(positions, outputs, targets, rows(y), self.class_weights, past)
        return reading, self.offer(x, y, outputs.detach()[: rows(y)], plan, reading.logs)

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer; its logits become wider if the head has grown since they were computed."""
        offer, head = losses.offer, self.head
        if head is not None and offer is not None and isinstance(offer.logits, Tensor):
            narrow = self.positions is None and offer.logits.shape[1] < head.outputs
            losses.offer = offer._replace(logits=widened(offer.logits, head.outputs)) if narrow else offer
        super().commit(losses)

    def forget(self, where: Callable[[Draw], Tensor] | Tensor) -> int:
        """Drop the stored samples that `where` marks, as in `lambda stored: stored.y == 3`; returns how many.

        The samples that remain are a uniform sample of the rest of the stream, and stay one. See `Reservoir.forget`. In
        files of a folder, the dropped samples stay until they are overwritten after the next `save`.
        """
        return self.buffer.forget(where)

    def forget_all(self) -> None:
        """Empty the buffer, which then fills up with what comes next: right when the rule to learn has changed."""
        self.buffer.forget_all()
