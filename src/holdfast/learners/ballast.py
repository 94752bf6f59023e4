"""Ballast: a slow average of the network steadies it, and is the network that counts.

A method of Holdfast's own. docs/concepts/beyond.md has what was tried beside it, and how far it comes.

The average is CLS-ER's (Arani et al., ICLR 2022), with one copy in place of two. What keeps the newest classes from
pushing the others aside is in fairness.py, and turned images are in turned.py.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.averages import averaged, follow, keep_mode, pace
from holdfast.learners.fairness import FairEntropy
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer, adopt
from holdfast.learners.options import ReplayOptions, check_choice, check_shares, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.learners.turned import AtAllAngles, TurnedClasses, turn_images
from holdfast.methods import LEARNERS
from holdfast.models import GroupedForward, count_outputs, last_layer, seen_by
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
    `decay` suits the stream. With `asymmetric` or `adjusted` the network prefers the newest classes less, and the
    average can and must be faster.

    Options of this learner:

    - alpha: weight of the draw's cross-entropy. Default: 1.
    - beta: weight of the distance from the average. Default: 1.
    - target: "average" or "stored". Default: "average".
    - decay: how slowly the average moves, 0 to 1. Default: 0.999.
    - asymmetric: whether the minibatch's cross-entropy leaves out the classes that were seen before and are absent from
        it. Default: False.
    - adjusted: whether cross-entropy adds to each output the logarithm of 1 + how often the step has its class, so that
        the classes of the minibatch gain nothing from being frequent. Default: False.
    - strength: how many times `adjusted` adds that logarithm. Stored samples that are known by heart hardly pull on the
        network, so the more often a task's samples are repeated, the stronger it should be. Default: 1.
    - recall: what share of the counts of earlier steps `adjusted` adds to those of a step, 0 to 1. Of many classes most
        are absent from a single step; 1 / (1 - recall) steps tell better how frequent each is. Default: 0.
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
        asymmetric: bool = False,
        adjusted: bool = False,
        strength: float = 1.0,
        recall: float = 0.0,
        hold_features: float = 0.0,
        teacher: float = TEACHER,
        turn: float = 0.0,
        looks: str = "once",
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(alpha=alpha, beta=beta, hold_features=hold_features, turn=turn)
        check_shares(decay=decay, teacher=teacher)
        check_choice(("average", "stored"), target=target)
        check_choice(("once", "angles"), looks=looks)
        self.alpha, self.beta, self.target, self.decay = alpha, beta, target, decay
        self.hold_features, self.teacher_decay, self.turn, self.looks = hold_features, teacher, turn, looks
        self._check_together()
        self.entropies = FairEntropy(
            count_outputs(self.model),
            self.device,
            asymmetric=asymmetric,
            adjusted=adjusted,
            strength=strength,
            recall=recall,
            class_weights=self.class_weights,
        )
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
        # An engine or torch.compile may have compiled it; compiled code does not tell what a layer sees.
        plain = inspect.unwrap(self.network)
        self._uncompiled = getattr(plain, "_orig_mod", plain)

    def _check_together(self) -> None:
        """Refuse options that do nothing, or that cannot be heeded, beside the others."""
        if self.loss is not None:
            raise UsageError("Ballast changes cross-entropy by itself: leave out loss=.")
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

    @property
    def seen(self) -> Tensor:
        """Which classes were in the stream so far, (C,)."""
        return self.entropies.seen

    @classmethod
    def wrap(cls, model: nn.Module, **settings: Any) -> nn.Module:
        """The model itself, or the network that looks at an image from all sides."""
        return AtAllAngles(model) if settings.get("looks") == "angles" else model

    @classmethod
    def arguments(cls, config: RunConfig) -> dict[str, Any]:
        """The weights, and the size of the draw: that of a run's replay batch."""
        return {"alpha": config.alpha, "beta": config.beta, "replay_size": config.replay_size}

    def plan(self, x: Nested, y: Nested) -> None:
        """None: the classes of all samples are remembered, also of those that will not be stored."""

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy of the minibatch and of a draw, and the distance from the average on the draw."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        labels, sizes = [y, drawn.y], [rows(y), rows(drawn.y)]
        learned = [torch.cat(labels)]
        view = self.view(x, drawn.x)
        keep_mode(self.model, self.average, *([] if self.teacher is None else [self.teacher]))
        # Each network gets images of its own: it may work in place on them.
        with torch.no_grad():  # whatever the target is: the average's BatchNorm statistics come from here
            steady = self.forward(transform(torch.clone, split(view, sizes)[1]), self.average)
        taught = view if self.teacher is None else transform(torch.clone, view)
        images = [view]
        if self.turned is not None:
            turned, classes = turn_images(view, learned[0], len(self.seen), self.angles)
            images.append(turned)
            learned.append(classes)
        (outputs, now, *others), features = self._outputs(concat(images), sizes * len(images))
        self.check_labels(y, outputs)
        offer = self.offer(x, y, outputs)
        consistency = F.mse_loss(*((now, steady) if self.target == "average" else self.compare(now, drawn)))
        if self.teacher is not None:
            consistency = consistency + self.hold_features * self._apart(features, taught, sizes)
        current, replay = self.entropies([outputs, now], labels)
        total = current + self.alpha * replay + self.beta * consistency
        terms = {"current": current, "replay": replay, "consistency": consistency}
        if self.turned is not None:
            every = self.turned.complete(torch.cat(others), features[sum(sizes) :])
            terms["turned"] = self._turned_loss(every, classes, sizes)
            total = total + self.turn * terms["turned"]
        return Losses(total, offer=offer, kept=learned, **terms)

    def _outputs(self, view: Nested, sizes: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The outputs for each part of a view and, if they are needed, the features of all, (rows, D)."""
        if self.teacher is None and self.turned is None:
            return self.forward_parts(view, sizes), torch.empty(0)
        features: list[Tensor] = []
        outputs = self.forward_parts(view, sizes, network=self._noting(self._uncompiled, features))
        return outputs, _last(features, sizes)

    def _apart(self, features: Tensor, view: Nested, sizes: Sequence[int]) -> Tensor:
        """How far the features of a view are turned away from the teacher's: 1 - cosine."""
        assert self._teacher_groups is not None
        taught: list[Tensor] = []
        with torch.no_grad(), self.autocast():
            self._teacher_groups(view, sizes, self._noting(self._teacher_groups.model, taught))
        cosines = F.cosine_similarity(features[: sum(sizes)], _last(taught, sizes))
        return torch.stack([1 - each.mean() for each in torch.split(cosines, list(sizes))]).sum()

    def _noting(self, network: nn.Module, features: list[Tensor]) -> Callable[[Nested], Tensor]:
        """What a network answers; what its last layer sees of each sample is added to `features`."""
        layer = last_layer(network)

        def answer(part: Nested) -> Tensor:
            with seen_by(layer) as seen:
                outputs = self.answer(part, network)
            if sum(map(len, seen)) != rows(part):
                self.refuse(
                    UsageError("hold_features and turn need a model that calls its last nn.Linear once a sample.")
                )
            features.extend(seen)
            return outputs

        return answer

    def _turned_loss(self, outputs: Tensor, classes: Tensor, sizes: list[int]) -> Tensor:
        """Cross-entropy of the turned images, weighed as that of the others: alpha for those of the draw."""
        observed, replayed = self.entropies(torch.split(outputs, sizes), torch.split(classes, sizes))
        return observed + self.alpha * replayed

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer, remember its classes, and let the averages follow the network."""
        super().commit(losses)
        if losses.offer is not None:
            self.entropies.commit(losses.offer.y, losses.kept or ())
        self.updates += 1
        share = pace(self.updates, self.decay)
        follow(self.average, self.model, share)
        if self.teacher is not None:
            follow(self.teacher, self.model, pace(self.updates, self.teacher_decay))
        if self.turned is not None and self.at_all_angles is not None:
            follow(self.at_all_angles.turned, self.turned, share)

    def extra_state(self) -> dict[str, nn.Module | Tensor | torch.Generator]:
        """With what cross-entropy remembers, the teacher, and the layer for turned classes and its average, if any."""
        found = super().extra_state() | self.entropies.state()
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


def _last(features: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The features (rows, D) of minibatches of these sizes: the last ones, as `GroupedForward` may repeat a pass."""
    found = list(features)
    while sum(map(len, found)) > sum(sizes):
        del found[0]
    return widen(torch.cat(found)).flatten(1)
