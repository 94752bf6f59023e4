"""DualNet: a slow network learns features from stored samples without labels, and fast layers adapt them to the labels.

Pham, Liu, Hoi, "DualNet: Continual Learning, Fast and Slow", NeurIPS 2021. What differs here from the authors' code:

- The slow network is the model of the benchmark, and its last layer is the classifier. An MLP has linear fast layers.
- Samples are stored with the outputs of the step in which they came, and replayed from the next step on. The authors
  store outputs when a task ends, and replay from the second task on. Here no boundaries are needed.
- A minibatch is one supervised step (theirs: two). The slow steps follow it and see what is stored by then.
- The views for the slow network are those of the benchmark, cropped and with other contrast and brightness. The authors
  also mirror and blur images and change their colours; a mirrored digit would be another one.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.augment import CropFlip
from holdfast.errors import UsageError
from holdfast.learners.losses import Losses, widen
from holdfast.learners.optimizers import Optimizer, adopt
from holdfast.learners.options import ReplayOptions, check_counts, check_shares, check_weights
from holdfast.learners.replay import ReplayLearner
from holdfast.methods import LEARNERS
from holdfast.models import Adapted, GroupedForward, features
from holdfast.nested import Nested
from holdfast.rng import generator, seeded_globally

__all__ = ["DualNet"]

PROJECTED, REDUNDANCY, JITTER = 256, 2e-3, 0.4
"""Hidden units of the projector, weight of Barlow Twins' second term, largest change of contrast and brightness."""


@LEARNERS.register("dualnet", "DualNet: fast layers adapt features that a slow network learns without labels")
class DualNet(ReplayLearner):
    """Replay with stored outputs, for a slow network whose features are multiplied by those of fast layers.

    m_l = fast_l(m_(l-1)) * slow_l, layer by layer from m_0 = x; outputs = classifier(m of the last layer)
    loss = CE(current) + CE(draw) + distillation * KL(softmax(stored / T) || softmax(now / T); draw) / classes

    It trains fast layers, classifier and slow network. After each step, the slow network learns without labels. It
    makes `slow_steps` steps of plain SGD on Barlow Twins: sum_i (1 - C_ii)^2 + 0.002 sum_i!=j C_ij^2, where C is the
    correlation over a draw between projected features of two random views. Then it goes back most of the way
    (Look-ahead): w <- w_before + lookahead * (w - w_before).

    The model needs a method `features(x)`; `holdfast.models.Adapted` says which of its layers are adapted. The
    optimiser takes over the parameters of the fast layers, which are part of the evaluated network.

    Options of this learner:

    - distillation: weight of the distance from stored outputs. Default: 10.
    - temperature: T, by which outputs are divided before they are compared. Default: 2.
    - slow_lr: learning rate of the slow steps. Default: 0.0003.
    - slow_steps: slow steps after each step; 0 for none. Default: 2.
    - slow_size: samples drawn for each of them. Default: 32.
    - lookahead: which share of the way of the slow steps is kept, 0 to 1. Default: 0.05.
    """

    passes = ((1, 1), (2, 2))
    terms = ("current", "replay", "consistency", "slow")
    stores_outputs = True
    uses_parameters = True
    own_state = ("fast", "projector", "generator")
    grows = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        distillation: float = 10.0,
        temperature: float = 2.0,
        slow_lr: float = 3e-4,
        slow_steps: int = 2,
        slow_size: int = 32,
        lookahead: float = 0.05,
        **shared: Unpack[ReplayOptions],
    ) -> None:
        super().__init__(model, optimizer, **shared)
        check_weights(distillation=distillation, slow_lr=slow_lr)
        check_counts(0, slow_steps=slow_steps)
        check_counts(2, slow_size=slow_size)  # features are correlated over samples
        check_shares(lookahead=lookahead)
        if not 0 < temperature < torch.inf:
            raise UsageError(f"temperature must be a finite number above 0, not {temperature!r}.")
        if self.loss is not None:
            raise UsageError("DualNet compares probabilities of classes: leave out loss=.")
        if self.call is not None or self.take_outputs is not None:
            raise UsageError("DualNet makes outputs of the model's features itself: leave out call= and outputs=.")
        if self.ranks is not None:
            raise UsageError("DualNet adds layers that DistributedDataParallel does not see: use it in one process.")
        self.distillation, self.temperature, self.lookahead = distillation, temperature, lookahead
        self.slow_lr, self.slow_steps, self.slow_size = slow_lr, slow_steps, slow_size
        with seeded_globally(self.seed, "fast"):
            self.adapted = Adapted(self.model)
            width = self.adapted.classifier.in_features
            hidden = nn.Linear(width, PROJECTED, bias=False), nn.BatchNorm1d(PROJECTED), nn.ReLU()
            self.projector = nn.Sequential(*hidden, nn.Linear(PROJECTED, width, bias=False))
        self.projector.to(self.device, self.adapted.classifier.weight.dtype)
        self.network, self._groups = self.adapted, GroupedForward(self.adapted)
        self.fast = self.adapted.fast
        adopt(optimizer, list(self.fast.parameters()))
        self.generator = generator(self.seed, "views", self.device)
        self.crop = CropFlip(lambda images: images, self.generator)
        ours = {id(each) for each in self.adapted.classifier.parameters()}
        learned = [each for each in self.model.parameters() if each.requires_grad and id(each) not in ours]
        self.slow: list[Tensor] = [*learned, *self.projector.parameters()]
        """What the slow steps train."""

    @classmethod
    def wrap(cls, model: nn.Module, **settings: Any) -> nn.Module:
        """The model with fast layers."""
        return Adapted(model)

    def compute_losses(self, x: Nested, y: Nested) -> Losses:
        """Cross-entropy of the minibatch and of a draw, and the distance of the draw's outputs from the stored ones."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        x, y, (drawn,) = self.align(x, y, self.draw(y))
        outputs, replayed = self.forward_groups(x, drawn.x)
        self.check_labels(y, outputs)
        current, replay = self.criterion(outputs, y), self.criterion(replayed, drawn.y)
        now, then = (each / self.temperature for each in self.compare(replayed, drawn))
        distance = F.kl_div(now.log_softmax(1), then.softmax(1), reduction="batchmean") / now.shape[1]
        total = current + replay + self.distillation * distance
        terms = {"current": current, "replay": replay, "consistency": distance}
        return Losses(total, offer=self.offer(x, y, outputs), **terms)

    def commit(self, losses: Losses) -> None:
        """Offer the minibatch to the buffer; then the slow steps, whose last loss becomes the term `slow`."""
        super().commit(losses)
        if self.buffer.stored < 2:
            return  # there is no correlation over one sample
        buffers = (*self.model.buffers(), *self.projector.buffers())
        moving = self.slow + [each for each in buffers if each.is_floating_point()]  # statistics of BatchNorm as well
        with torch.no_grad():
            before = [each.clone() for each in moving]
        for _ in range(self.slow_steps):
            losses.terms["slow"] = self._slow_step()
        with torch.no_grad():
            torch._foreach_lerp_(before, moving, self.lookahead)
            torch._foreach_copy_(moving, before)

    @torch.enable_grad()
    def _slow_step(self) -> Tensor:
        """One step of plain SGD on Barlow Twins; returns the loss."""
        stored = self.buffer.sample(self.slow_size).x
        with self.autocast():
            seen = [self.projector(features(self.model, self._distort(self.view(stored)))) for _ in range(2)]
        a, b = (F.batch_norm(widen(each), None, None, training=True) for each in seen)
        correlation = a.T @ b / len(a)
        on, squares = correlation.diagonal(), correlation.square()
        loss = (1 - on).square().sum() + REDUNDANCY * (squares.sum() - squares.diagonal().sum())
        gradients = torch.autograd.grad(loss, self.slow, materialize_grads=True)  # 0 where features need no weight
        with torch.no_grad():
            torch._foreach_add_(self.slow, gradients, alpha=-self.slow_lr)
        return loss.detach()

    def _distort(self, view: Tensor) -> Tensor:
        """The view with random contrast and brightness, drawn for each sample; images are also cropped at random."""
        uniforms = torch.rand(4, len(view), 1, generator=self.generator, device=view.device).to(view.dtype)
        if view.dim() == 4:
            view = self.crop.crop_flip(view, torch.cat([uniforms[:2], torch.ones_like(uniforms[:1])]))  # 1: no flip
        contrast, brightness = (1 + JITTER * (2 * uniforms[2:] - 1)).view(2, -1, *[1] * (view.dim() - 1))
        mean = view.mean(tuple(range(1, view.dim())), keepdim=True)
        distorted: Tensor = brightness * (mean + contrast * (view - mean))
        return distorted

    def evaluated(self) -> nn.Module:
        """The slow network with the fast layers."""
        return self.adapted
