"""Ballast: a slow average of the network steadies it, and is the network that counts.

A method of Holdfast's own. docs/concepts/beyond.md has what was tried beside it, and how far it comes. Its ideas are
CLS-ER's average (Arani et al., ICLR 2022), with one copy in place of two; logit adjustment (Menon et al., "Long-tail
learning via logit adjustment", ICLR 2021), with the counts of one step; and label augmentation, see turned.py.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.averages import averaged, follow, keep_mode, pace
from holdfast.learners.features import Noted
from holdfast.learners.losses import Losses
from holdfast.learners.optimizers import Optimizer, adopt
from holdfast.learners.options import ReplayOptions, check_choice, check_shares, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.learners.turned import AtAllAngles, TurnedClasses, turn_images
from holdfast.methods import LEARNERS
from holdfast.models import GroupedForward
from holdfast.nested import Nested, concat, rows, split, transform
from holdfast.rng import generator

__all__ = ["Ballast"]

TEACHER = 0.9995
"""How slowly the teacher moves if nothing else is said."""


@LEARNERS.register("ballast", "replay, held to one averaged network, which is evaluated")
class Ballast(ReplayLearner):
    """Replay of one draw, held to the answers of an averaged network.

    loss = CE(minibatch) + alpha * CE(draw) + beta * MSE(outputs now, target; draw)

    The target is what the average answers or, with `target="stored"`, what the network answered when it saw the sample.
    After each step the average moves: w <- d * w + (1 - d) * network, where d is `decay`, at first limited to 1 -
    1/step. It stays in training mode and sees draws only, so that its BatchNorm statistics are those of all classes. It
    is evaluated.

    The network prefers the newest classes, and the average lags behind on them. Both faults compensate each other if
    `decay` suits the stream. With `adjusted` the network prefers the newest classes less, and the average can and must
    be faster.

    Options of this learner:

    - alpha: weight of the draw's cross-entropy. Default: 1.
    - beta: weight of the distance from the average. Default: 1.
    - target: "average" or "stored". Default: "average".
    - decay: how slowly the average moves, 0 to 1. Default: 0.999.
    - adjusted: whether cross-entropy adds to each output the logarithm of 1 + how often the step has its class, so that
        the classes of the minibatch gain nothing from being frequent. Default: False.
    - strength: how many times `adjusted` adds that logarithm. Stored samples that are known by heart hardly pull on the
        network, so the more often a task's samples are repeated, the stronger it should be. Default: 1.
    - hold_features: weight, relative to beta, of 1 - cosine between the network's features and those of a slow teacher,
        on minibatch and draw. The teacher is a second average. Features are what the last nn.Linear sees. Default: 0.
    - teacher: how slowly the teacher moves, 0 to 1; it should remember more than a task. Default: 0.9995.
    - turn: weight of the cross-entropy of the same square images turned by one, two or three right angles. Each class
        at each angle is a class of its own. So a few stored samples are harder to learn by heart, and features have
        more to tell apart. The outputs for turned classes come from a layer of the learner's own. Default: 0.
    - looks: how the evaluated network looks at an image: "once", or at all four "angles", which needs `turn` and costs
        four passes. It answers with the mean of its outputs for the classes at each angle. Default: "once".
    """

    passes: tuple[tuple[int, int], ...] = ((1, 1), (2, 2))
    terms = ("current", "replay", "consistency", "turned")
    grows = False
    stores_outputs = True
    own_state = ("average", "updates")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        target: str = "average",
        decay: float = 0.999,
        adjusted: bool = False,
        strength: float = 1.0,
        hold_features: float = 0.0,
        teacher: float = TEACHER,
        turn: float = 0.0,
        looks: str = "once",
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(alpha=alpha, beta=beta, strength=strength, hold_features=hold_features, turn=turn)
        check_shares(decay=decay, teacher=teacher)
        check_choice(("average", "stored"), target=target)
        check_choice(("once", "angles"), looks=looks)
        self.alpha, self.beta, self.target, self.decay = alpha, beta, target, decay
        self.adjusted, self.strength, self.hold_features, self.turn = adjusted, strength, hold_features, turn
        self.teacher_decay, self.looks = teacher, looks
        self._check_together()
        self.average = averaged(self.model)
        self.updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self.teacher = deepcopy(self.average) if hold_features else None
        self._teacher_groups = None if self.teacher is None else GroupedForward(self.teacher)
        self.turned = TurnedClasses(self.model) if turn else None
        self.angles = generator(self.seed, "angles", self.device)
        if self.turned is not None:
            adopt(self.optimizer, list(self.turned.parameters()))
            self.passes = (*(Ballast.passes if self.teacher else Ballast.passes[:1]), (4, 4))
        self.at_all_angles = AtAllAngles(self.average) if looks == "angles" else None

    def _check_together(self) -> None:
        """Refuse options that do nothing, or that cannot be heeded, beside the others."""
        if self.loss is not None:
            raise UsageError("Ballast changes cross-entropy by itself: leave out loss=.")
        if self.strength != 1.0 and not self.adjusted:
            raise UsageError("strength belongs to adjusted=True: set adjusted=True, or strength=1.")
        if self.hold_features and not self.beta:
            raise UsageError("hold_features is a multiple of beta, which is 0: nothing would be held.")
        if self.teacher_decay != TEACHER and not self.hold_features:
            raise UsageError(f"teacher belongs to hold_features: give both, or set teacher={TEACHER}.")
        if self.turn and self.ranks is not None:
            raise UsageError("turn has a layer of its own, which several ranks would train apart: leave it out.")
        if self.looks == "angles" and not self.turn:
            raise UsageError('looks="angles" needs outputs for turned classes: give turn.')
        if self.looks == "angles" and (self.call is not None or self.take_outputs is not None):
            raise UsageError('looks="angles" needs a model that maps images to outputs: leave out call= and outputs=.')

    @classmethod
    def wrap(cls, model: nn.Module, **settings: Any) -> nn.Module:
        """The model itself, or the network that looks at an image from all sides."""
        return AtAllAngles(model) if settings.get("looks") == "angles" else model

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The weights, and the size of the draw: that of a run's replay batch."""
        return {"alpha": config.alpha, "beta": config.beta, "replay_size": config.replay_size}

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy of the minibatch and of a draw, and the distance from the target on the draw."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        labels, sizes = torch.cat([y, drawn.y]), [rows(y), rows(drawn.y)]
        view = self.view(x, drawn.x)
        keep_mode(self.model, self.average, *([] if self.teacher is None else [self.teacher]))
        # Each network gets images of its own: it may work in place on them.
        with torch.no_grad():  # whatever the target is: the average's BatchNorm statistics come from here
            steady = self.forward(transform(torch.clone, split(view, sizes)[1]), self.average)
        taught = view if self.teacher is None else transform(torch.clone, view)
        images, turned_labels = [view], labels
        if self.turned is not None:
            turned, turned_labels = turn_images(view, labels, self.turned.classes, self.angles)
            images.append(turned)
        (outputs, now, *others), features = self._outputs(concat(images), sizes * len(images))
        self.check_labels(y, outputs)
        offer = self.offer(x, y, outputs)
        consistency = F.mse_loss(*((now, steady) if self.target == "average" else self.compare(now, drawn)))
        if self.teacher is not None:
            consistency = consistency + self.hold_features * self._apart(features[: sum(sizes)], taught, sizes)
        current, replay = self.entropies([outputs, now], labels)
        total = current + self.alpha * replay + self.beta * consistency
        terms = {"current": current, "replay": replay, "consistency": consistency}
        if self.turned is not None:
            every = self.turned.complete(torch.cat(others), features[sum(sizes) :])
            observed, replayed = self.entropies(torch.split(every, sizes), turned_labels)
            terms["turned"] = observed + self.alpha * replayed
            total = total + self.turn * terms["turned"]
        return Losses(total, offer=offer, **terms)

    def entropies(self, outputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """The cross-entropy of the minibatch and that of the draw, given their outputs and the labels of both.

        Outputs are (B, C), or (B, 4 C) where a class at each of four angles is a class of its own, with the weight of
        the class.
        """
        classes, sizes = outputs[0].shape[1], list(map(len, outputs))
        if self.adjusted:
            counts = torch.ones_like(outputs[0][0]).index_add(
                0, labels, torch.ones_like(labels, dtype=outputs[0].dtype)
            )
            outputs = [each + self.strength * counts.log() for each in outputs]
        weights = self.class_weights
        if weights is not None:
            weights = weights.to(outputs[0].dtype).repeat(classes // len(weights))
        return [F.cross_entropy(*each, weights) for each in zip(outputs, torch.split(labels, sizes), strict=True)]

    def _outputs(self, view: Nested, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The outputs for each part of a view and, if they are needed, the features of all, (rows, D)."""
        if self.teacher is None and self.turned is None:
            return self.forward_parts(view, sizes), torch.empty(0)
        noted = Noted(self, self.network)
        return self.forward_parts(view, sizes, network=noted), noted.features(sizes)

    def _apart(self, features: Tensor, view: Nested, sizes: Sequence[int]) -> Tensor:
        """How far the features of a view are turned away from the teacher's: 1 - cosine."""
        assert self._teacher_groups is not None
        noted = Noted(self, self._teacher_groups.model)
        with torch.no_grad(), self.autocast():
            self._teacher_groups(view, sizes, noted)
        cosines = F.cosine_similarity(features, noted.features(sizes))
        return torch.stack([1 - each.mean() for each in torch.split(cosines, list(sizes))]).sum()

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer, and let the averages follow the network."""
        super().commit(losses)
        self.updates += 1
        share = pace(self.updates, self.decay)
        follow(self.average, self.model, share)
        if self.teacher is not None:
            follow(self.teacher, self.model, pace(self.updates, self.teacher_decay))
        if self.turned is not None and self.at_all_angles is not None:
            follow(self.at_all_angles.turned, self.turned, share)

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """With the teacher, and the layer for turned classes and its average, if any."""
        found = super().extra_state()
        if self.teacher is not None:
            found["teacher"] = self.teacher
        if self.turned is not None:
            found |= {"turned": self.turned, "angles": self.angles}
        if self.at_all_angles is not None:
            found["turned average"] = self.at_all_angles.turned
        return found

    def evaluated(self) -> nn.Module:
        """The average, which may look at an image from all sides."""
        return self.at_all_angles or self.average
