"""Candidates for a method past the published ones, each beside the others on a validation split.

    python benchmarks/beyond.py --list
    python benchmarks/beyond.py --seconds 540 --out beyond --summary beyond.jsonl
    python benchmarks/beyond.py --full best --buffer-size 200 --buffer-size 500 --seeds 3 --out beyond --small best

One learner holds all ideas as settings, so that each can be tried alone and together with others. Runs are short
(--epochs) and are tested on a tenth of the training samples, never on the test set: all candidates once, then all of
them with the next seed. Runs whose results are there are passed over, so a second call continues the first. The
summary has a line of JSON per candidate, the best first.

With --full NAME, one candidate is run at the benchmark's full length, without a validation split: every buffer size
with the first seed, then with the next. It is run as `ballast` if that has all its settings. "best" is the candidate
with the highest mean among those that were run most often under --out. Results are written to --small as files such as
seq-cifar10/ballast-200-seed0.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import fmean, median_low, stdev
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.buffer.reservoir import distinct
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import condensed, load_results
from holdfast.learners import settings_for, settings_of
from holdfast.learners.averages import follow
from holdfast.learners.ballast import Ballast
from holdfast.learners.losses import NEVER, Losses
from holdfast.learners.optimizers import Optimizer
from holdfast.learners.options import ReplayOptions, check_shares, check_weights
from holdfast.learners.turned import turn_images
from holdfast.methods import LEARNERS, REGULARIZERS
from holdfast.models import MODELS, ResNet18, count_outputs, evaluating, features, last_layer
from holdfast.nested import Nested, concat, rows, split
from holdfast.registry import unknown_name
from holdfast.rng import generator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fairness import FairEntropy
from work_off import work_off, write_small

VALIDATION = 0.1
EPOCHS, SAMPLES = 5, 10_000
"""Of a task in the runs for which the candidates' decays are meant, see `config_of`."""

MODELS.register("narrow", "resnet18 with an eighth of the channels, for CPUs")(partial(ResNet18, width=8))


FINAL = {*settings_of(LEARNERS["ballast"]), "balanced", *(each.name for each in fields(RunConfig))}
CHOICES = {
    "statistics": ("own", "buffer"),
    "mix": ("none", "mixup", "cutmix"),
    "looks": ("once", "mirrored", "angles"),
}


@LEARNERS.register("beyond", "replay with any of the ideas of benchmarks/beyond.py")
class Candidate(Ballast):
    """Replay of one draw, held to the answers of an averaged network, with ideas that can be switched on one by one.

    loss = CE(minibatch) + alpha * CE(draw) + beta * regularizer(outputs now, target; draw)

    Options of this learner:

    alpha, beta: weights of the terms.
    regularizer: name of the regularizer.
    target: "average" for the outputs of the averaged network on the same view, "stored" for those that were stored.
    refresh: how far the stored outputs of drawn samples move to the averaged network's in each step, 0 to 1.
    decay: how slowly the averaged network follows, 0 to 1. The averaged network is evaluated. 0: there is none.
    statistics: "own" for the average's BatchNorm statistics from the draws it sees; "buffer" to estimate them anew from
        all stored samples before each evaluation.
    nearest: whether the evaluated network answers with the cosine between a sample's features and the mean direction of
        those of each class's stored samples, in place of its last layer. The network needs `features(x)`.
    asymmetric: whether the minibatch leaves classes alone that were seen before and are absent from it, as in ER-ACE.
    adjusted: whether cross-entropy adds to each output the logarithm of 1 + how often the step has its class, so that
        the classes of the minibatch gain nothing from being frequent.
    strength: how many times `adjusted` adds that logarithm.
    recall: what share of the counts of earlier steps `adjusted` adds to those of a step, 0 to 1. Of many classes most
        are absent from a single step; 1 / (1 - recall) steps tell better how frequent each is.
    mix: "mixup" or "cutmix" to mix each drawn sample with its neighbour in the draw; labels and targets are mixed by
        the same shares. The averaged network sees the samples unmixed.
    jitter: how strongly drawn images are cropped, scaled and recoloured for the network, 0 to 1. The averaged network
        sees them as they are.
    jitter_all: whether images of the minibatch are treated like drawn ones, also for the outputs that are stored.
    hold: weight, relative to beta, of the mean square distance from the teacher on the minibatch, in outputs of classes
        that were seen before and are absent from it.
    hold_features: weight, relative to beta, of the angle between the network's features and the teacher's on minibatch
        and draw: 1 - cosine. The network needs `features(x)`.
    teacher: the teacher of `hold` and `hold_features` is a second, slower average with this decay. 0: that of `hold` is
        the same average.
    anchor: how far the network's weights move towards the teacher's after each step, 0 to 1.
    turn: weight of the cross-entropy of turned images, as in Ballast.
    looks: as in Ballast; or "mirrored" to answer with the mean of its outputs for an image and for its mirror image.
    limit: upper limit for the norm of the gradient, so that new classes cannot move the network far at once. 0: none.
    contrast: weight of supervised contrast between two views of the minibatch and of the draw, the ordinary one and a
        jittered one: features of one class shall point one way. The network needs `features(x)`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        regularizer: str = "mse",
        target: str = "average",
        refresh: float = 0.0,
        decay: float = 0.999,
        statistics: str = "own",
        nearest: bool = False,
        asymmetric: bool = False,
        adjusted: bool = False,
        strength: float = 1.0,
        recall: float = 0.0,
        mix: str = "none",
        jitter: float = 0.0,
        jitter_all: bool = False,
        hold: float = 0.0,
        hold_features: float = 0.0,
        teacher: float = 0.0,
        contrast: float = 0.0,
        anchor: float = 0.0,
        limit: float = 0.0,
        turn: float = 0.0,
        looks: str = "once",
        **shared: Unpack[ReplayOptions],
    ) -> None:
        ideas = {"target": target, "turn": turn, "looks": "angles" if looks == "angles" else "once"}
        ideas |= {"hold_features": hold_features, "teacher": teacher} if hold_features else {}
        super().__init__(model, optimizer, alpha=alpha, beta=beta, decay=decay, **ideas, **shared)
        fairness = {"asymmetric": asymmetric, "adjusted": adjusted, "strength": strength, "recall": recall}
        self.fair = FairEntropy(count_outputs(model), self.device, **fairness, class_weights=self.class_weights)
        for name, value in (("statistics", statistics), ("mix", mix), ("looks", looks)):
            if value not in CHOICES[name]:
                raise unknown_name(name, value, list(CHOICES[name]))
        check_weights(hold=hold, contrast=contrast, limit=limit)
        check_shares(teacher=teacher, jitter=jitter, refresh=refresh, anchor=anchor)
        if not decay and (target == "average" or hold or refresh):
            raise UsageError('without an averaged network (decay=0), give target="stored", hold=0 and refresh=0.')
        if hold_features and not teacher:
            raise UsageError("hold_features needs a teacher of its own.")
        if contrast and (hold_features or turn):
            raise UsageError("contrast shows the images once more: give neither hold_features nor turn.")
        self.regularizer, self.statistics, self.mix = REGULARIZERS[regularizer], statistics, mix
        if nearest and looks == "angles":
            raise UsageError('nearest answers for images as they are: give looks="once" or "mirrored".')
        self.looks = looks
        self.refresh, self._fresh = refresh, None
        self.nearest = deepcopy(self.average) if nearest else None
        self.jitter, self.jitter_all, self.hold, self.contrast = jitter, jitter_all, hold, contrast
        if (hold or anchor) and teacher and self.teacher is None:
            self.teacher = deepcopy(self.average)
        if anchor and not teacher:
            raise UsageError("anchor needs a teacher.")
        self.teacher_decay, self.anchor, self.clip = teacher, anchor, limit or self.clip
        self.generator = generator(self.seed, "jitter", self.device)

    def compute_losses(self, x: Nested, y: Tensor) -> Losses:
        """The three terms of consistency replay on one draw, with the ideas that are switched on."""
        if not self.buffer.stored:
            return self.losses_alone(x, y)
        slots = distinct(self.buffer.stored, self.replay_size or rows(y), self.buffer.generator)
        drawn = self.buffer._draw(self.buffer._storage.read(slots))
        sizes = [rows(y), rows(drawn.y)]
        observed, replayed = split(self.view(x, drawn.x), sizes)
        labels, then, learned = drawn.y, drawn.logits, [torch.cat([y, drawn.y])]
        if self.decay:  # the average sees every draw: its BatchNorm statistics come from there
            averaged = self._answers(replayed)
            if self.refresh:
                self._fresh = (slots, torch.lerp(drawn.logits, averaged.to(drawn.logits.dtype), self.refresh))
            then = averaged if self.target == "average" else then
        if self.jitter and self.jitter_all:
            observed, replayed = split(jittered(concat([observed, replayed]), self.jitter, self.generator), sizes)
        elif self.jitter and not self.contrast:
            replayed = jittered(replayed, self.jitter, self.generator)
        if self.mix != "none":
            replayed, share = MIXTURES[self.mix](replayed, self.generator)
            chosen = torch.zeros_like(then).scatter_(1, labels[:, None], 1.0)
            labels, then = blend(chosen, share), blend(then, share)
        contrast: Tensor | float = 0.0
        if self.contrast:
            (outputs, now), contrast = self._contrast((observed, replayed), (y, drawn.y))
        else:
            images = [concat([observed, replayed])]
            if self.turned is not None:
                turned, classes = turn_images(images[0], learned[0], len(self.fair.seen), self.angles)
                images.append(turned)
                learned.append(classes)
            (outputs, now, *others), found = self._outputs(concat(images), sizes * len(images))
        self.check_labels(y, outputs)
        offer = self.offer(x, y, outputs)
        consistency = self.regularizer(now, then)
        absent = self.fair.absent(y, len(self.fair.seen))
        if self.hold:
            apart = outputs - self._taught(observed)
            consistency = consistency + self.hold * (apart.square() * absent).mean()
        if self.hold_features:
            consistency = consistency + self.hold_features * self._apart(found[: sum(sizes)], images[0], sizes)
        if self.fair.asymmetric:
            outputs = outputs.masked_fill(absent, NEVER)
        if self.fair.adjusted:
            advantage = self.fair.advantage(outputs, [y, drawn.y])
            outputs, now = outputs + advantage, now + advantage
        current, replay = self.criterion(outputs, y), self.criterion(now, labels)
        total = current + self.alpha * replay + self.beta * consistency + self.contrast * contrast
        if self.turned is not None:
            every = self.turned.complete(torch.cat(others), found[sum(sizes) :])
            turned_current, turned_replay = self.fair(torch.split(every, sizes), torch.split(classes, sizes))
            total = total + self.turn * (turned_current + self.alpha * turned_replay)
        return Losses(total, current=current, replay=replay, consistency=consistency, offer=offer, kept=learned)

    def _contrast(self, views: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The outputs for a minibatch and a draw, and supervised contrast between each and a second view of it."""
        views = [*views, *(jittered(each, self.jitter, self.generator) for each in views)]
        found = self.forward_parts(concat(views), list(map(rows, views)), network=self._outputs_and_features)
        parts = [each.tensor_split([len(self.fair.seen)], 1) for each in found]
        directions = [F.normalize(found) for _, found in parts]
        pairs = zip(directions[:2], directions[2:], labels, strict=True)
        contrasts = [supervised_contrast(torch.cat(two), each.repeat(2)) for *two, each in pairs]
        return [outputs for outputs, _ in parts[:2]], torch.stack(contrasts).sum()

    def _outputs_and_features(self, view: Tensor) -> Tensor:
        """Both in one tensor, (B, C + D), since a pass for several minibatches returns one."""
        found = features(self.network, view)
        return torch.cat([last_layer(self.network)(found), found], 1)

    @torch.no_grad()
    def _taught(self, view: Tensor) -> Tensor:
        """What the teacher answers; minibatches leave no trace in the BatchNorm statistics of one that is evaluated."""
        with nullcontext() if self.teacher else evaluating(self.average):
            return self.forward(view, self.teacher or self.average)

    @torch.no_grad()
    def _answers(self, view: Nested) -> Tensor:
        """What the averaged network answers."""
        return self.forward(view, self.average)

    def commit(self, losses: Losses) -> None:
        """As in Ballast; before that, drawn samples get the outputs that they shall have from now on."""
        if self._fresh is not None:
            storage = self.buffer._storage
            storage.columns[list(storage.layout).index("logits")].index_copy_(0, *self._fresh)
        super().commit(losses)
        if losses.offer is not None:
            self.fair.commit(losses.offer.y, losses.kept or ())
        if self.anchor:
            follow(self.model, self.teacher, torch.full((), self.anchor, device=self.device))

    def extra_state(self) -> dict[str, Any]:
        """As in Ballast, what cross-entropy remembers, and the random numbers of mixtures and jitter."""
        return super().extra_state() | self.fair.state() | {"generator": self.generator}

    def plan(self, x: Nested, y: Nested) -> None:
        """None: the classes of all samples are remembered, also of those that will not be stored."""

    def evaluated(self) -> nn.Module:
        """The network that answers, which may look at an image more than once."""
        if self.looks == "mirrored":
            return Mirrored(self._steady())
        steady = self._steady()
        return steady if self.at_all_angles is None else super().evaluated()

    def _steady(self) -> nn.Module:
        """The averaged network, if there is one; with statistics of the stored samples, if wanted."""
        if not self.decay:
            return self.model
        if self.statistics == "buffer" and self.buffer.stored:
            estimate_statistics(self.average, self.view(self.buffer.contents().x))
        if self.nearest is None or not self.buffer.stored:
            return self.average
        self.nearest.load_state_dict(self.average.state_dict())
        stored = self.buffer.contents()
        answer_nearest(self.nearest, getattr(self.augment, "normalize", self.augment)(stored.x), stored.y)
        return self.nearest


class Mirrored(nn.Module):
    """Answers with the mean of a network's outputs for an image (B, C, H, W) and for its mirror image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, view: Tensor) -> Tensor:
        return (self.network(view) + self.network(view.flip(3))) / 2


def mixup(view: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each sample and the one before it, in random shares; returns the mixtures and the shares of the first (B, 1)."""
    share = torch.rand(len(view), 1, generator=generator, device=view.device)
    weight = share.view(-1, *[1] * (view.dim() - 1)).to(view.dtype)
    return weight * view + (1 - weight) * view.roll(1, 0), share


def cutmix(view: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each image (B, C, H, W) with a box from the image before it; returns them, and the share outside the box (B, 1).

    The box has the image's proportions and a uniformly drawn area; its centre is uniform in the image, beyond whose
    edge it may reach.
    """
    down, right, area = torch.rand(3, len(view), 1, generator=generator, device=view.device)
    inside = []
    for centre, length in ((down, view.shape[2]), (right, view.shape[3])):
        places = (torch.arange(length, device=view.device) + 0.5) / length
        inside.append((places - centre).abs() < area.sqrt() / 2)
    box = inside[0][:, :, None] & inside[1][:, None, :]
    share = 1 - box.flatten(1).to(torch.float32).mean(1, keepdim=True)
    return torch.where(box[:, None], view.roll(1, 0), view), share


def jittered(view: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Each image (B, C, H, W) cropped at random, scaled to its size again, and with other colours, light and contrast.

    A crop has at least 1 - strength / 2 of the side; saturation and contrast lie within 1 +- strength, light within
    strength of the pixels' scale.
    """
    uniforms = torch.rand(6, len(view), 1, 1, 1, generator=generator, device=view.device)
    size, down, right, *colours = uniforms.to(view.dtype)
    side = 1 - strength / 2 * size.view(-1)
    corner = [(1 - side) * (2 * each.view(-1) - 1) for each in (right, down)]  # the centre of the crop
    none = torch.zeros_like(side)
    crop = torch.stack([torch.stack([side, none, corner[0]], 1), torch.stack([none, side, corner[1]], 1)], 1)
    view = F.grid_sample(view, F.affine_grid(crop, list(view.shape), align_corners=False), align_corners=False)
    saturation, contrast, light = (strength * (2 * each - 1) for each in colours)
    view = view + saturation * (view - view.mean(1, keepdim=True))
    return view + contrast * (view - view.mean((1, 2, 3), keepdim=True)) + light


def supervised_contrast(directions: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """How surely each of B directions (B, F) finds those of its class among all others: a mean, the lower the surer.

    Khosla et al., "Supervised contrastive learning", NeurIPS 2020.
    """
    alone = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    logs = (directions @ directions.T / temperature).masked_fill(alone, -1e9).log_softmax(1)
    alike = (labels[:, None] == labels[None, :]) & ~alone
    return -((logs * alike).sum(1) / alike.sum(1)).mean()


def blend(values: Tensor, share: Tensor) -> Tensor:
    """Each row (B, C) and the one before it, in the shares (B, 1) of a mixture."""
    return share * values + (1 - share) * values.roll(1, 0)


MIXTURES = {"mixup": mixup, "cutmix": cutmix}


@torch.no_grad()
def answer_nearest(network: nn.Module, view: Tensor, labels: Tensor) -> None:
    """Let the last layer compute the cosine with the mean direction of each class, times the features' length.

    Classes without samples get the lowest answer.
    """
    with evaluating(network):
        directions = F.normalize(features(network, view))
    head = last_layer(network)
    chosen = F.one_hot(labels, head.out_features).to(directions.dtype)
    head.weight.copy_(F.normalize(chosen.T @ directions))
    head.bias.copy_(torch.where(chosen.any(0), 0.0, -1e9))


@torch.no_grad()
def estimate_statistics(network: nn.Module, view: Tensor, size: int = 64) -> None:
    """Set the running statistics of all BatchNorms to those of these inputs: the mean over minibatches of `size`."""
    norms = [each for each in network.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    before = [each.momentum for each in norms]
    parts = [part for part in view.split(size) if len(part) > 1]
    for number, part in enumerate(parts):
        for norm in norms:
            norm.momentum = 1 / (number + 1)  # a running mean over the minibatches
        network(part)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def adjusted(times: float) -> dict[str, Any]:
    """Settings: cross-entropy is adjusted so many times."""
    return {"adjusted": True, "strength": float(times)}


PLAIN = {"decay": 0.0, "target": "stored"}
STEADY = {"alpha": 1.0, "beta": 0.2}  # both weights: between those of CLS-ER and of ESMER
ACE = STEADY | {"asymmetric": True}
ADJUSTED = STEADY | {"adjusted": True}
TWICE, THRICE = adjusted(2), adjusted(3)
STORED = {"target": "stored", "decay": 0.99}
JITTER_ALL = {"jitter": 0.4, "jitter_all": True}
HELD, FEATURES_HELD = {"hold": 5.0, "teacher": 0.9995}, {"hold_features": 5.0, "teacher": 0.9995}
CUTMIX, MIXUP = {"mix": "cutmix"}, {"mix": "mixup"}
ONCE = "average for evaluation only, adjusted, very fast"
MORE = "average for evaluation only, adjusted thrice, very fast"
KEPT = f"{MORE}, features held by a slow teacher"
KEPT_WELL = THRICE | FEATURES_HELD | {"weight_decay": 5e-4}
ALL = "average for evaluation only, adjusted thrice, very fast, jitter of all, features held by a slow teacher"
CANDIDATES: dict[str, dict[str, Any]] = {
    "average as target": STEADY,
    "average as target, asymmetric, cutmix": ACE | CUTMIX,
    "average as target, asymmetric": ACE,
    "average as target, cutmix": STEADY | CUTMIX,
    "average as target, asymmetric, mixup": ACE | MIXUP,
    "average as target, asymmetric, cutmix, hold, balanced": ACE | CUTMIX | {"hold": 1.0, "balanced": True},
    "average as target, asymmetric, hold": ACE | {"hold": 1.0},
    "average as target, adjusted, cutmix": ADJUSTED | CUTMIX,
    "average as target, asymmetric, cutmix, faster": ACE | CUTMIX | {"decay": 0.997},
    "average as target, asymmetric, cutmix, rate 0.1": ACE | CUTMIX | {"lr": 0.1},
    "plain": PLAIN,
    "average for evaluation only": {"target": "stored"},
    "average as target, asymmetric, cutmix, slower": ACE | CUTMIX | {"decay": 0.9997},
    "average as target, asymmetric, cutmix, draws of 64": ACE | CUTMIX | {"replay_size": 64},
    "average as target, asymmetric, cutmix, beta 1": ACE | CUTMIX | {"beta": 1.0},
    "average as target, asymmetric, cutmix, balanced": ACE | CUTMIX | {"balanced": True},
    "average as target, asymmetric, statistics of the buffer": ACE | {"statistics": "buffer"},
    "average as target, asymmetric, linf": ACE | {"regularizer": "linf"},
    # A slow average lags behind on the newest classes, which the working network prefers. Where it prefers them less,
    # the average must be faster.
    "average as target, fast": STEADY | {"decay": 0.997},
    "average as target, adjusted, fast": ADJUSTED | {"decay": 0.997},
    "average as target, asymmetric, fast": ACE | {"decay": 0.997},
    "average as target, very fast": STEADY | {"decay": 0.99},
    "average as target, adjusted, very fast": ADJUSTED | {"decay": 0.99},
    "average as target, asymmetric, very fast": ACE | {"decay": 0.99},
    "average as target, adjusted": ADJUSTED,
    "average for evaluation only, fast": {"target": "stored", "decay": 0.997},
    "average as target, adjusted, cutmix, fast": ADJUSTED | CUTMIX | {"decay": 0.997},
    "average as target, adjusted, hold, fast": ADJUSTED | {"decay": 0.997, "hold": 1.0},
    # The average is as fast as CLS-ER's is at full length: it hardly lags.
    "average for evaluation only, very fast": STORED,
    "average for evaluation only, adjusted, very fast": STORED | {"adjusted": True},
    "average for evaluation only, asymmetric, very fast": STORED | {"asymmetric": True},
    "average for evaluation only, adjusted, very fast, jitter": STORED | {"adjusted": True, "jitter": 0.4},
    "average for evaluation only, asymmetric, very fast, jitter": STORED | {"asymmetric": True, "jitter": 0.4},
    "average as target, adjusted, very fast, jitter": ADJUSTED | {"decay": 0.99, "jitter": 0.4},
    "average as target, adjusted, very fast, hold": ADJUSTED | {"decay": 0.99, "hold": 1.0},
    "average as target, adjusted, very fast, beta 1": ADJUSTED | {"decay": 0.99, "beta": 1.0},
    "average for evaluation only, adjusted, very fast, draws of 64": STORED | {"adjusted": True, "replay_size": 64},
    "average for evaluation only, adjusted, very fast, balanced": STORED | {"adjusted": True, "balanced": True},
    "average for evaluation only, adjusted, very fast, beta 0.5": STORED | {"adjusted": True, "beta": 0.5},
    "average for evaluation only, adjusted, very fast, cutmix": STORED | CUTMIX | {"adjusted": True},
    "average for evaluation only, adjusted, very fast, contrast": STORED
    | {"adjusted": True, "jitter": 0.4, "contrast": 0.5},
    "average for evaluation only, asymmetric, very fast, contrast": STORED
    | {"asymmetric": True, "jitter": 0.4, "contrast": 0.5},
    "average for evaluation only, adjusted, very fast, hold": STORED | {"adjusted": True, "hold": 5.0},
    "average for evaluation only, adjusted, very fast, jitter of all": STORED | {"adjusted": True} | JITTER_ALL,
    # The longer a task, the more the network prefers its classes, and the more there is to adjust.
    "average for evaluation only, adjusted twice, very fast": STORED | TWICE,
    "average for evaluation only, adjusted thrice, very fast": STORED | THRICE,
    "average for evaluation only, adjusted four times, very fast": STORED | adjusted(4),
    "average for evaluation only, adjusted six times, very fast": STORED | adjusted(6),
    "average for evaluation only, adjusted ten times, very fast": STORED | adjusted(10),
    "average for evaluation only, adjusted thrice, asymmetric, very fast": STORED | THRICE | {"asymmetric": True},
    "average as target, adjusted thrice, very fast": STEADY | THRICE | {"decay": 0.99},
    "average for evaluation only, adjusted thrice, very fast, beta 0.02": STORED | THRICE | {"beta": 0.02},
    "average for evaluation only, adjusted thrice, very fast, beta 0": ADJUSTED | STORED | THRICE | {"beta": 0.0},
    "average for evaluation only, adjusted thrice, very fast, jitter of all": STORED | THRICE | JITTER_ALL,
    "average for evaluation only, adjusted thrice, very fast, held by a slow teacher": STORED | THRICE | HELD,
    "average for evaluation only, very fast, nearest mean": STORED | {"nearest": True},
    "average for evaluation only, adjusted, very fast, nearest mean": STORED | {"adjusted": True, "nearest": True},
    "average for evaluation only, adjusted thrice, very fast, nearest mean": STORED | THRICE | {"nearest": True},
    "average for evaluation only, adjusted thrice, very fast, rate 0.1": STORED | THRICE | {"lr": 0.1},
    KEPT: STORED | THRICE | FEATURES_HELD,
    f"{KEPT}, rate 0.1": STORED | THRICE | FEATURES_HELD | {"lr": 0.1},
    f"{KEPT}, rate 0.1, weight decay": STORED | THRICE | FEATURES_HELD | {"lr": 0.1, "weight_decay": 5e-4},
    "average for evaluation only, adjusted four times, very fast, features held by a slow teacher, rate 0.1": STORED
    | adjusted(4)
    | FEATURES_HELD
    | {"lr": 0.1},
    # Turned images are further classes.
    "plain, turned": PLAIN | {"turn": 1.0},
    f"{ONCE}, turned": STORED | {"adjusted": True, "turn": 1.0},
    f"{ONCE}, turned, half as strongly": STORED | {"adjusted": True, "turn": 0.5},
    f"{ONCE}, turned, twice as strongly": STORED | {"adjusted": True, "turn": 2.0},
    f"{ONCE}, jitter of all, turned": STORED | {"adjusted": True, "turn": 1.0} | JITTER_ALL,
    **{
        f"{name}, turned, {told}": STORED | strength | {"turn": 1.0, "looks": looks}
        for looks, told in (("mirrored", "seen mirrored as well"), ("angles", "seen at all angles"))
        for name, strength in ((ONCE, adjusted(1)), (MORE, THRICE), (f"{KEPT}, weight decay", KEPT_WELL))
    },
    # Where there are many classes, a single step hardly tells how frequent each is.
    **{
        f"average for evaluation only, adjusted{strength}, very fast, features held by a slow teacher, weight decay, "
        f"turned{told}": STORED | KEPT_WELL | adjusted(times) | {"turn": 1.0} | recall
        for times, strength in ((1, ""), (3, " thrice"))
        for recall, told in (({}, ""), ({"recall": 0.9}, ", counted over ten steps"))
    },
    "average for evaluation only, asymmetric, very fast, features held by a slow teacher, weight decay, turned": STORED
    | FEATURES_HELD
    | {"weight_decay": 5e-4, "asymmetric": True, "turn": 1.0},
    f"{KEPT}, turned": STORED | THRICE | FEATURES_HELD | {"turn": 1.0},
    "average for evaluation only, adjusted thrice, very fast, turned": STORED | THRICE | {"turn": 1.0},
    f"{KEPT}, weight decay": STORED | THRICE | FEATURES_HELD | {"weight_decay": 5e-4},
    f"{KEPT}, three times as strongly": STORED | THRICE | FEATURES_HELD | {"hold_features": 15.0},
    "average for evaluation only, adjusted twice, very fast, jitter of all, features held by a slow teacher": STORED
    | TWICE
    | JITTER_ALL
    | FEATURES_HELD,
    ALL: STORED | THRICE | JITTER_ALL | FEATURES_HELD,
    f"{ALL}, weight decay": STORED | THRICE | JITTER_ALL | FEATURES_HELD | {"weight_decay": 5e-4},
    f"{ALL}, rate 0.1": STORED | THRICE | JITTER_ALL | FEATURES_HELD | {"lr": 0.1},
    # A teacher that remembers more than a task: what LwF has at task boundaries, without boundaries.
    "average for evaluation only, adjusted, very fast, held by a slow teacher": STORED | {"adjusted": True} | HELD,
    "average for evaluation only, adjusted, very fast, held strongly by a slow teacher": STORED
    | {"adjusted": True}
    | HELD
    | {"hold": 50.0},
    "average for evaluation only, adjusted, very fast, features held by a slow teacher": STORED
    | {"adjusted": True}
    | FEATURES_HELD,
    "average for evaluation only, adjusted, very fast, features held strongly by a slow teacher": STORED
    | {"adjusted": True}
    | FEATURES_HELD
    | {"hold_features": 50.0},
    # Stored outputs that follow what the average answers today.
    "average for evaluation only, adjusted thrice, very fast, refreshed slowly": STORED | THRICE | {"refresh": 0.01},
    "average for evaluation only, adjusted thrice, very fast, refreshed": STORED | THRICE | {"refresh": 0.1},
    "average for evaluation only, adjusted thrice, very fast, refreshed at once": STORED | THRICE | {"refresh": 1.0},
    "average for evaluation only, adjusted, very fast, refreshed": STORED | {"adjusted": True, "refresh": 0.1},
    "average for evaluation only, adjusted, very fast, statistics of the buffer": STORED
    | {"adjusted": True, "statistics": "buffer"},
    "average for evaluation only, adjusted, very fast, gradients up to 3": STORED | {"adjusted": True, "limit": 3.0},
    "average as target, adjusted, very fast, linf": ADJUSTED | {"decay": 0.99, "regularizer": "linf"},
    # What limits how far new classes can move the network.
    **{
        f"average for evaluation only, adjusted thrice, very fast, anchored {share:g}": STORED
        | THRICE
        | {"anchor": share, "teacher": 0.9995}
        for share in (0.0001, 0.001, 0.01)
    },
    **{
        f"average for evaluation only, adjusted thrice, very fast, gradients up to {limit:g}": STORED
        | THRICE
        | {"limit": limit}
        for limit in (0.3, 1.0, 3.0)
    },
    # Each regularizer, with several weights.
    **{
        f"average as target, adjusted thrice, very fast, {name}, beta {beta:g}": ADJUSTED
        | THRICE
        | {"decay": 0.99, "beta": beta}
        | ({} if name == "mse" else {"regularizer": name})
        for name in sorted(REGULARIZERS)
        for beta in (0.01, 0.05, 0.25, 1.0, 4.0)
    },
    "average as target, mixup": STEADY | MIXUP,
    "average as target, cutmix, balanced": STEADY | CUTMIX | {"balanced": True},
    "average as target, cutmix, hold": STEADY | CUTMIX | {"hold": 1.0},
    "average as target, cutmix, rate 0.1": STEADY | CUTMIX | {"lr": 0.1},
    "average as target, cutmix, draws of 64": STEADY | CUTMIX | {"replay_size": 64},
    "average as target, cutmix, beta 1": STEADY | CUTMIX | {"beta": 1.0},
}


def config_of(
    settings: dict[str, Any],
    *,
    benchmark: str = "seq-cifar10",
    buffer_size: int,
    seed: int,
    epochs: int | None = None,
    more: Sequence[str] = (),
) -> RunConfig:
    """The run of a candidate: a short one of so many epochs on a validation split, or one at full length.

    Weights and learning rate are those of mse, unless the candidate says otherwise. Decays are meant for runs of
    `EPOCHS` epochs. In longer ones the average follows more slowly, and faster where a task has fewer samples
    (train_limit), so that it remembers the same share of a task.
    """
    config = RunConfig.preset(benchmark, "mse", buffer_size=buffer_size, seed=seed)
    config = config.change(method="beyond")
    if epochs is not None:
        config = config.change(epochs=epochs, validation=VALIDATION)
    elif settings.get("decay", 1) and settings.get("looks") != "mirrored" and settings.keys() <= FINAL:
        config = config.change(method="ballast")
    known = settings_for(config)
    config = config.parse(more, known)
    decay = settings.get("decay", known["decay"])
    shorter = EPOCHS / config.epochs
    if config.train_limit is not None:
        shorter *= SAMPLES * (1 - VALIDATION) / (config.train_limit * (1 - config.validation))
    for name, value in (("decay", decay), ("teacher", settings.get("teacher"))):
        if value:
            settings = settings | {name: round(1 - (1 - value) * shorter, 9)}
    return config.parse([f"{name}={value}" for name, value in settings.items()], known)


def full_configs(
    name: str, buffer_sizes: Sequence[int], seeds: int, benchmark: str = "seq-cifar10", more: Sequence[str] = ()
) -> list[RunConfig]:
    """The runs of a candidate at full length: every buffer size with the first seed, then with the next."""
    return [
        config_of(CANDIDATES[name], benchmark=benchmark, buffer_size=size, seed=seed, more=more)
        for seed in range(seeds)
        for size in buffer_sizes
    ]


def full_name(config: RunConfig) -> str:
    """The path of a result at full length, such as seq-cifar10/ballast-200-seed0.json."""
    return f"{config.benchmark}/{config.method}-{config.buffer_size}-seed{config.seed}.json"


def summary(runs: dict[str, list[RunConfig]], out: Path) -> list[dict[str, Any]]:
    """One row per candidate that has results, the best first: a line of results/beyond/candidates.jsonl."""
    found, table = load_results(out), []
    for name, configs in runs.items():
        stored = [condensed(each) for each in map(found.get, configs) if each is not None]
        if stored:
            config, place = configs[0], stored[0]["environment"]
            table.append(
                {
                    "candidate": name,
                    "benchmark": config.benchmark,
                    "network": config.model,
                    **{each: getattr(config, each) for each in ("epochs", "buffer_size", "validation")},
                    "seeds": [each["seed"] for each in stored],
                    "accuracies": [each["accuracy"] for each in stored],
                    "last": [each["accuracy_matrix"][-1] for each in stored],
                    "task_il": [each["task_il_accuracy"] for each in stored],
                    "settings": CANDIDATES[name],
                    "fingerprints": [each["fingerprint"] for each in stored],
                    "device": place["device"],
                    "precision": config.precision,
                    "commit": place["commit"],
                }
            )
    return sorted(table, key=lambda row: -fmean(row["accuracies"]))


def best(table: list[dict[str, Any]]) -> str:
    """The candidate with the highest mean; those with fewer runs than most have are left out."""
    if not table:
        raise UsageError("no candidate has a result under --out: run the short runs first, or name the candidate.")
    usual = median_low([len(row["accuracies"]) for row in table])
    name: str = next(row["candidate"] for row in table if len(row["accuracies"]) >= usual)
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {settings}" for name, settings in CANDIDATES.items()))
        return 0
    sizes = options.buffer_size or [200]
    short = {"benchmark": options.benchmark, "buffer_size": sizes[0], "epochs": options.epochs, "more": options.set}
    runs = {
        name: [config_of(CANDIDATES[name], **short, seed=seed) for seed in range(options.seeds)]
        for name in options.only or CANDIDATES
    }
    if options.full:
        name = best(summary(runs, options.out)) if options.full == "best" else options.full
        print(f"at full length: {name}", flush=True)
        wanted = full_configs(name, sizes, options.seeds, options.benchmark, options.set)
    else:
        # All candidates once before any of them twice.
        wanted = [config for seed in zip(*runs.values(), strict=True) for config in seed]
    there = load_results(options.out)
    if missing := [config for config in wanted if config not in there]:
        given = {name: getattr(options, name) for name in ("seconds", "reserve", "fleet", "device", "data")}
        work_off(missing, options.out, **given, small=options.small if options.full else None, name=full_name)
    if options.full:
        for path in write_small(wanted, options.out, options.small, full_name):
            print(path)
        return 0
    table = summary(runs, options.out)
    for row in table:
        values = row["accuracies"]
        spread = f" +- {stdev(values):.2f}" if len(values) > 1 else ""
        print(f"{fmean(values):6.2f}{spread} ({len(values)})  {row['candidate']}")
    if options.summary:
        options.summary.write_text("".join(json.dumps(row) + "\n" for row in table), "utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", default="seq-cifar10")
    parser.add_argument("--buffer-size", type=int, action="append", help="default: 200; with --full, may be repeated")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of the short runs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", action="append", choices=CANDIDATES, help="a candidate; may be repeated")
    parser.add_argument(
        "--full", choices=["best", *CANDIDATES], metavar="NAME", help="a candidate, or best: run it at full length"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for every run; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("beyond"), help="results, and states of runs in flight")
    parser.add_argument("--summary", type=Path, help="file for the table of the short runs, a line of JSON each")
    parser.add_argument("--small", type=Path, default=Path("results"), help="folder for results at full length")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--reserve", type=float, default=40, help="of these, for saving states")
    parser.add_argument("--fleet", type=int, default=4, help="runs at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--list", action="store_true", help="name the candidates and run nothing")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HoldfastError as error:
        sys.exit(f"error: {error}")
