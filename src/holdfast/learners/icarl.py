"""iCaRL: stored exemplars represent their classes, and the nearest mean of exemplars is the answer.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017. As in the code of Buzzega et
al., from which the published values come, features are not normalised. A draw of exemplars joins each minibatch, where
the original mixes them into the data of the task.
"""

from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.buffer import Draw
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.learners.checks import check_begun, named_classes
from holdfast.learners.losses import NEVER, Losses, widen
from holdfast.learners.making import Parts
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.models import check_features, copied, evaluating, features, last_layer
from holdfast.nested import Nested, chosen_rows, concat, rows, transform

__all__ = ["Icarl"]

CHUNK = 256
"""Samples of one pass at the end of a task."""


@LEARNERS.register("icarl", "iCaRL: herded exemplars, and the nearest mean of exemplars as the answer")
class Icarl(ReplayLearner):
    """Binary cross-entropy per class; classes of earlier tasks have the last task's network as their target.

    loss = mean over samples and classes seen so far of BCE(sigmoid(output), target), with target = sigmoid(output of
    the last task's network) for classes of earlier tasks, 1 for the label, and 0 otherwise

    It needs to be told where tasks begin and end: `begin_task(classes)`, `end_task(x, y)`. When a task ends, the buffer
    is divided evenly among the classes. The exemplars of a class are those whose mean comes closest to the mean of all
    its samples, chosen one after the other (herding). The evaluated network is as of the last task's end: its outputs
    for features f are |f - c|^2 - |f - mean of the class|^2, where c is the mean of all means. The model needs a method
    `features(x)`, and its last layer must be an nn.Linear with a bias.

    """

    passes = ((1, 1), (2, 1))
    needs_boundaries = True
    grows = False
    chooses = True
    terms = ("current",)
    own_state = ("teacher", "nearest", "seen", "old")

    def __init__(self, model: nn.Module, optimizer: Optimizer, **shared: Unpack[ReplayOptions]) -> None:
        super().__init__(model, optimizer, **shared)
        if self.loss is not None or self.class_weights is not None:
            raise UsageError("iCaRL has a loss of its own: leave out loss= and class_weights=.")
        last = last_layer(self.model)
        if last.bias is None:
            raise UsageError("iCaRL needs a model whose last nn.Linear has a bias.")
        if "weight" not in last._parameters:
            raise UsageError(
                "iCaRL writes the weight of the last nn.Linear, but here it is computed from other parameters: leave "
                "that layer as it is, without weight_norm and the like."
            )
        self.teacher, self.nearest = (copied(self.model).eval() for _ in range(2))
        self.wrap(self.nearest)
        # Which outputs belong to classes of this task or an earlier one, and which to those of earlier tasks only.
        self.seen, self.old = (torch.zeros(last.out_features, dtype=torch.bool, device=self.device) for _ in range(2))

    @classmethod
    def from_config(cls, config: RunConfig, parts: Parts) -> Self:
        """The learner of a run, whose classes are all known: a buffer that is too small is refused before it begins."""
        learner = super().from_config(config, parts)
        learner._check_room(len(learner.seen))
        return learner

    @classmethod
    def wrap(cls, model: nn.Module, **settings: Any) -> nn.Module:
        """The model whose last layer has weights of its own: shared with an embedding, they would change features."""
        layer = last_layer(model)
        for name, each in layer.named_parameters(recurse=False):
            setattr(layer, name, nn.Parameter(each.detach().clone(), each.requires_grad))
        return model

    def begin_task(self, classes: tuple[int, ...]) -> None:
        """Let the outputs of these classes learn from labels, and those of all others from the last task's network."""
        numbers = named_classes(classes, len(self.seen))
        self.old.copy_(self.seen)
        self.old[numbers] = False
        self.seen[numbers] = True
        self._check_room(int(self.seen.sum()))

    def _check_room(self, classes: int) -> None:
        if self.buffer.capacity < classes:
            raise UsageError(f"{classes} classes need as many exemplars: choose a larger buffer size.")

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Binary cross-entropy of the minibatch and a draw together."""
        inputs, labels = [x], y
        if self.buffer.stored:
            x, y, (drawn,) = self.align(x, y, self.draw(y))
            inputs, labels = [x, drawn.x], concat([y, drawn.y])
        view = self.view(*inputs)
        taught = transform(torch.clone, view)  # each network has its own: it may work in place
        outputs = self.forward(view)
        self.check_labels(y, outputs)
        check_begun(self, self.seen, y)
        targets = torch.zeros_like(outputs).scatter_(1, labels[:, None], 1)
        with torch.no_grad():
            targets = torch.where(self.old, self.forward(taught, self.teacher).sigmoid(), targets)
        terms = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none") * self.seen
        loss = terms.sum() / (self.seen.sum() * len(labels))
        return Losses(loss, current=loss)

    @torch.no_grad()
    def end_task(self, x: Tensor, y: Tensor) -> None:
        """Choose exemplars, and make the network as it is now the teacher and the evaluated one."""
        x, y = self.task_samples(x, y)
        if not bool(self.seen.any()):
            raise UsageError("no task has begun: call begin_task(classes) first.")
        few = self._plain_view(chosen_rows(x, slice(2)))
        check_features(self.model, few, lambda view: self.answer(view, self.model))
        share = self.buffer.capacity // int(self.seen.sum())
        if self.buffer.stored:
            stored = self.buffer.contents()
            xs, ys = (transform(lambda each: each.to(self.device), part) for part in stored[:2])
            x, y, (earlier,) = self.align(x, y, Draw(xs, ys, None))
            x, y = concat([earlier.x, x]), concat([earlier.y, y])
        fresh, found = torch.arange(len(y)) >= self.buffer.stored, self._features(x)
        chosen, means = [], {}
        for label in torch.unique(y).tolist():
            places = (y == label).nonzero().squeeze(1)
            if fresh[places.cpu()].any():  # else its exemplars are in the order of their importance already
                places = places[_herd(found[places], share)]
            chosen.append(places[:share])
            means[label] = found[chosen[-1]].mean(0)
        order = torch.cat(chosen)
        self.buffer.replace(chosen_rows(x, order), y[order])
        self.teacher.load_state_dict(self.model.state_dict())
        self.nearest.load_state_dict(self.model.state_dict())
        _answer_nearest(self.nearest, means)

    def _features(self, x: Nested) -> Tensor:
        """The features of these samples in evaluation mode, (B, D)."""
        parts = [chosen_rows(x, slice(start, start + CHUNK)) for start in range(0, rows(x), CHUNK)]
        with evaluating(self.model), self.autocast():
            return torch.cat([widen(features(self.model, self._plain_view(part))) for part in parts])

    def _plain_view(self, x: Nested) -> Nested:
        """What the network is shown of samples, without augmentation if the view can do without."""
        view = getattr(self.augment, "normalize", self.augment)
        return view(transform(torch.clone, x))

    def evaluated(self) -> nn.Module:
        """The network of the last task's end, with the nearest mean of exemplars as its answer."""
        return self.nearest


def _herd(found: Tensor, count: int) -> Tensor:
    """Choose rows of the features (B, D) one after the other, so that their mean is as near as can be to that of all.

    Returns the numbers of at most `count` rows, in the order of choice.
    """
    mean, total = found.mean(0), torch.zeros_like(found[0])
    left, chosen = torch.ones(len(found), dtype=torch.bool, device=found.device), []
    for number in range(1, min(count, len(found)) + 1):
        distances = (number * mean - total - found).square().sum(1)
        best = distances.masked_fill(~left, torch.inf).argmin()
        left[best] = False
        total += found[best]
        chosen.append(best)
    return torch.stack(chosen)


def _answer_nearest(network: nn.Module, means: dict[int, Tensor]) -> None:
    """Make the last layer compute |f - c|^2 - |f - mean|^2 = 2 (mean - c) f + |c|^2 - |mean|^2 for every class."""
    head = last_layer(network)
    centre = torch.stack(list(means.values())).mean(0)
    head.weight.zero_()
    head.bias.fill_(NEVER)  # for classes without exemplars
    for label, mean in means.items():
        head.weight[label] = 2 * (mean - centre)
        head.bias[label] = centre.square().sum() - mean.square().sum()
