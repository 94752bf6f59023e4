"""The options that all learners share: their types, their defaults, and one list of what they mean."""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from holdfast.augment import View, takes_targets
from holdfast.config import PRECISIONS
from holdfast.errors import UsageError
from holdfast.learners.losses import Loss
from holdfast.learners.optimizers import Scheduler
from holdfast.learners.positions import Mask
from holdfast.registry import unknown_name

__all__ = [
    "Options",
    "ReplayOptions",
    "check_choice",
    "check_class_weights",
    "check_counts",
    "check_shares",
    "check_sizes",
    "check_weights",
    "complete",
]


class Options(TypedDict, total=False):
    """Options of every learner, all of them keywords:

    - augment: a function from inputs as they are stored to what the network sees. One of two parameters gets targets as
        well and returns both, as mixup does; what is stored stays as it came. Default: the inputs themselves.
    - loss: a function (outputs, targets) -> mean over samples, in place of cross-entropy. Targets are then whatever it
        understands, with one row per sample: numbers, masks, dicts of tensors. With `head`, they are class labels.
        Default: cross-entropy.
    - class_dim: where the outputs have their classes, if a sample has classes at many positions: -1 for tokens
        (samples, positions, classes), 1 for pixels (samples, classes, height, width). Labels then have a row per sample
        and one number per position, -100 where nothing is supervised. Losses are means over the supervised positions,
        and a regularizer compares the logits of each position. Default: outputs are (samples, classes).
    - mask: a function (inputs as stored, labels) -> which positions count, bool, of the labels' shape; with
        `class_dim`. A regularizer compares all positions that count, also those without a label. Default: those with a
        label.
    - call: a function (model, view) -> what the model returns. Default: model(view); model(**view) if the view is a
        dict and the model is one of transformers or peft.
    - outputs: a function from what the model returns to its outputs, as in lambda returned: returned.scores. Default:
        what it returns, or the attribute `logits` of that.
    - class_weights: cross-entropy's weights, one positive number per class. Default: 1 each.
    - clip: upper limit for the norm of the whole gradient. Default: no limit.
    - scheduler: any of torch.optim.lr_scheduler, or one with step_update(number of updates) as those of timm; it steps
        once per minibatch and is saved with the learner. Default: a constant learning rate.
    - head: name of the model's last nn.Linear, which then grows: a label beyond its outputs adds the missing ones,
        initialised as in a new layer, while the optimiser keeps its state. See `grow`. Default: the head is fixed.
    - on_grow: a function of the learner that is called after its head has grown, by a label or by `load`. Averaged
        copies of the model can grow there. Default: none.
    - precision: "float32", or "bfloat16" to compute the network under autocast. Weights, losses and the buffer stay in
        float32, so that any optimiser works. Default: "float32".
    - validate: check each minibatch before anything changes, and refuse a loss that is not finite. On a CPU the learner
        is then as it was before the refused step, generators and BatchNorm statistics included; only model buffers
        above 1 MiB keep the values of the forward pass, and a head that grew stays grown. On a GPU the loss is read
        every 100 steps, because reading waits for the device. False: nothing in a step waits for the device, so that
        the step can be captured in a CUDA graph. Default: True.
    - seed: decides what the buffer stores and draws, and how new outputs begin. Default: 0.
    """

    augment: View | None
    loss: Loss | None
    class_dim: int | None
    mask: Mask | None
    call: Callable[[Any, Any], Any] | None
    outputs: Callable[[Any], Tensor] | None
    class_weights: Tensor | Sequence[float] | None
    clip: float | None
    scheduler: Scheduler | None
    head: str | None
    on_grow: Callable[[Any], object] | None
    precision: str
    validate: bool
    seed: int
    network: Any  # for engines: computes the model's outputs in its place, for instance compiled


class ReplayOptions(Options, total=False):
    """Options of learners with a buffer:

    - buffer_size: how many samples the buffer holds. No default.
    - balanced: store as many samples of each class as of any other, whatever their shares of the stream are; needs
        labels, memory and one process. Default: False, a uniform sample of the stream.
    - buffer_policy: which samples it holds: "reservoir", a uniform sample of the whole stream; "window", the last ones;
        "decay", the older the rarer, or "decay:10000", where a sample's chance of being stored falls to 1/e within
        10,000 more. Default: "reservoir".
    - storage: where stored samples are: in the memory of the "device" or the "host", or in files in a folder (a Path).
        Default: "device".
    - padding: for samples that differ in length, the tensors that vary along dimension 1 and what short ones are filled
        up with, as in {"input_ids": 0, "y": -100}; see `Reservoir`. Default: None, all samples have one shape.
    - answers: what is stored of outputs, where a method stores them: a type such as torch.bfloat16; holdfast.TopK(20)
        for the 20 largest of each position, which needs `class_dim`; or a pair of functions (encode, decode) of tensors
        with one row per sample. Default: the outputs as they are.
    - replay_size: samples drawn per step; GEM draws none. Default: as many as observed.
    - replay: how many samples are drawn per step as a share of the minibatch, as in 0.25; at least one is. In
        `ConsistencyReplay`, one draw then serves both terms. Default: None, `replay_size` says how many.
    - generator: decides what the buffer stores and draws, in place of `seed`; samples are drawn on its device.
    """

    buffer_size: int
    balanced: bool
    buffer_policy: str
    storage: str | Path
    padding: Mapping[str, float] | None
    answers: Any
    replay_size: int | None
    replay: float | None
    generator: torch.Generator | None


DEFAULTS = dict.fromkeys(Options.__annotations__) | {"precision": "float32", "validate": True, "seed": 0}


def complete(options: Mapping[str, Any], learner: Any) -> Options:
    """All options of a learner with a value, those not given with their default; unknown and unfit ones raise."""
    for name in options:
        if name not in DEFAULTS:
            own = [each.name for each in signature(learner).parameters.values() if each.kind is each.KEYWORD_ONLY]
            shared = (ReplayOptions if learner.needs_buffer else Options).__annotations__
            raise unknown_name(f"option of {learner.__name__}", name, [*own, *shared])
    full, method = cast(Options, {**DEFAULTS, **options}), learner.__name__
    check_choice(PRECISIONS, precision=full["precision"])
    clip = full["clip"]
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        raise UsageError(f"clip must be a finite number above 0, or None for no clipping, not {clip!r}.")
    if full["loss"] is not None and full["class_weights"] is not None:
        raise UsageError("class_weights belong to cross-entropy; with a loss of your own, leave them out.")
    if full["class_dim"] is not None and full["head"] is not None:
        raise UsageError("a head with classes at many positions cannot grow: leave out head= or class_dim=.")
    if full["mask"] is not None and full["class_dim"] is None:
        raise UsageError("mask says which positions count: give class_dim as well, which says where the classes are.")
    if full["augment"] is not None and takes_targets(full["augment"]) and not learner.learns_mixtures:
        raise UsageError(
            f"{method} needs outputs for each sample alone: its augment cannot change targets. Give a function of the "
            "inputs alone, or use ExperienceReplay."
        )
    if full["head"] is not None and not learner.grows:
        raise UsageError(
            f"the head of {method} cannot grow: leave out head=, and give the model as many outputs as there will be "
            "classes."
        )
    if full["class_dim"] is not None and not learner.takes_positions:
        raise UsageError(f"{method} needs outputs (samples, classes): leave out class_dim.")
    return full


def check_choice(known: Sequence[str], **choices: str) -> None:
    """Choices must be among the known ones."""
    for name, choice in choices.items():
        if choice not in known:
            raise unknown_name(name, choice, list(known))


def check_weights(**weights: float) -> None:
    """Weights of loss terms must be finite and not negative."""
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{name} must be a finite number of at least 0, not {weight!r}.")


def check_shares(**shares: float) -> None:
    """Shares and rates must lie between 0 and 1."""
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise UsageError(f"{name} must lie between 0 and 1, not at {share}.")


def check_sizes(**sizes: Any) -> None:
    """Sizes of draws must be whole numbers of at least 1, or None for as many as observed."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, Integral) or size < 1):
            raise UsageError(
                f"{name} must be at least 1 and a whole number, or None for as many samples as observed, not {size!r}."
            )


def check_counts(least: int, **counts: Any) -> None:
    """Counts must be whole numbers of at least `least`."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < least:
            raise UsageError(f"{name} must be a whole number of at least {least}, not {count!r}.")


def check_class_weights(given: Tensor | Sequence[float] | None, device: torch.device) -> Tensor | None:
    """The weights as a tensor (C,) on the device; None if none are given."""
    if given is None:
        return None
    weights = torch.as_tensor(given, device=device).detach()
    weights = weights if weights.is_floating_point() else weights.float()
    if weights.dim() != 1 or not bool((weights.isfinite() & (weights > 0)).all()):
        raise UsageError("class_weights must be one finite number above 0 for each of the model's outputs.")
    return weights
