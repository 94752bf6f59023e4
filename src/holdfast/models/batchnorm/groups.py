"""BatchNorm with statistics per minibatch, so that several minibatches can share one forward pass.

Replay learners show the network several minibatches a step. Concatenating them is fast, but ordinary BatchNorm would
then normalise old and new samples together, which is another method: on S-CIFAR-10 it costs many points of accuracy,
on small problems it may gain some. `group_batchnorm` replaces every BatchNorm of a model by one that keeps the
minibatches apart; `GroupedForward` then runs them in one pass with the outputs, gradients and running statistics of
separate passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from holdfast.errors import UsageError
from holdfast.models.batchnorm import fused
from holdfast.models.batchnorm.normalize import Normalize
from holdfast.nested import Nested, split
from holdfast.rng import global_state, restore_globally

__all__ = ["GroupedBatchNorm", "GroupedForward", "group_batchnorm", "normalized_relu"]


class _Groups:
    """The sizes of the minibatches in the pass at hand, shared by all BatchNorms of a model; empty means one."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.rows = 0
        """Their sum."""
        self.strayed = False
        """Whether a BatchNorm was given other rows than one per sample, which no size of a minibatch tells apart."""


class GroupedBatchNorm(_BatchNorm):
    """BatchNorm over inputs of any rank that gives each group of the batch its own statistics in training mode."""

    calls = 0
    """How often it was called in the grouped pass at hand; the order of running statistics is right for one call."""

    def __init__(self, original: _BatchNorm, groups: _Groups) -> None:
        nn.Module.__init__(self)
        # Parameters, buffers and hooks are the original's own, so optimisers and state dicts stay valid.
        self.__dict__.update(original.__dict__)
        self.groups = groups

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input, of the same shape."""
        if self.has_kernels(input):
            return self.with_kernels(input)
        sizes = self.groups.sizes
        if len(sizes) < 2 or not (self.training or self.running_mean is None):  # statistics come from the batch
            return super().forward(input)
        self.calls += 1
        if input.shape[0] != self.groups.rows:
            self.groups.strayed = True
            return super().forward(input)  # what it gives does not matter: `GroupedForward` takes the pass back
        if self._equal(input):
            return self._forward_equal(input, len(sizes))
        return torch.cat([super(GroupedBatchNorm, self).forward(part) for part in torch.split(input, list(sizes))])

    def _equal(self, input: Tensor) -> bool:
        """Whether the groups are of one size, with more than one value each: torch says that one has no variance."""
        sizes = self.groups.sizes or (input.shape[0],)
        return len(set(sizes)) == 1 and sizes[0] * len(sizes) == input.shape[0] and input[0, 0].numel() * sizes[0] > 1

    def has_kernels(self, input: Tensor) -> bool:
        """Whether `with_kernels` computes what `forward` is to compute; what does not fit is for torch to refuse."""
        usual = self.training and self.affine and self.momentum is not None
        fits = usual and input.dim() > 1 and input.shape[1] == self.num_features and input.device == self.weight.device
        return fits and fused.supports(input) and self._equal(input)

    def with_kernels(self, input: Tensor, shortcut: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """The normalised input, on a GPU; plus `shortcut` and behind a ReLU at no cost."""
        groups = len(self.groups.sizes) or 1
        self.calls += groups > 1
        out, statistics = fused.batchnorm(
            input, self.weight, self.bias, groups=groups, eps=self.eps, relu=relu, shortcut=shortcut
        )
        if self.track_running_stats:
            fused.follow(statistics, self, count=input.numel() // statistics[0].numel())
        return out

    def _forward_equal(self, input: Tensor, groups: int) -> Tensor:
        """All groups at once: one reduction instead of one per group."""
        x = input.view(groups, -1, *input.shape[1:])
        out, mean, variance = Normalize.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            count = x[0].numel() // x.shape[2]
            self._update_running(mean.flatten(1), variance.flatten(1) * (count / (count - 1)))
        normalised: Tensor = out.view_as(input)
        return normalised

    def _update_running(self, means: Tensor, variances: Tensor) -> None:
        """Running statistics after the groups (G, C) in order, as if each had been a pass of its own."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        means, variances = means.to(self.running_mean.dtype), variances.to(self.running_var.dtype)
        for mean, variance in zip(means, variances, strict=True):
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                step = 1 / self.num_batches_tracked.double()  # 0-d, so it does not widen the rest
                self.running_mean += step * (mean - self.running_mean)
                self.running_var += step * (variance - self.running_var)
            else:
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance, self.momentum)


def normalized_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """ReLU of what `norm` makes of `x`, plus `shortcut`; one operation where `norm` has kernels and nobody listens."""
    alike = shortcut is None or (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    if alike and isinstance(norm, GroupedBatchNorm) and norm.has_kernels(x) and not _hooked(norm):
        return norm.with_kernels(x, shortcut, relu=True)
    normalized = norm(x)
    return F.relu(normalized if shortcut is None else normalized + shortcut)


def _hooked(module: nn.Module) -> bool:
    """Whether there are hooks that want to see what `module` is given or gives."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def group_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm in `model` by a grouped one that shares its parameters and buffers; returns the model.

    Called twice, it changes nothing the second time. Works on models from anywhere; one with a LazyBatchNorm must have
    seen a minibatch before. The rows that reach a BatchNorm must be the samples in their order. A model that gives it
    another number of rows, for instance every frame of a sequence as one, gets separate passes. One that gives it as
    many in another order is not noticed and would mix the minibatches: leave that one as it is.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            raise UsageError(
                f"the BatchNorm '{name}' has no shape yet: pass a minibatch through the model, as in model(x), before."
            )
    groups = _Groups()
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))

    def convert(module: nn.Module) -> nn.Module:
        # Only modules that compute what the built-in BatchNorm does: a subclass may have a forward pass of its own.
        # And only those in one place: where one is used several times a pass, separate passes would update its running
        # statistics in another order. `GroupedForward` does without fusing then.
        once = names[module] == 1
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward and once:
            return GroupedBatchNorm(module, groups)
        for name, child in module.named_children():
            setattr(module, name, convert(child))
        return module

    return convert(model)


def _frozen(norm: _BatchNorm) -> bool:
    """Whether it normalises each sample by itself, with statistics that stay as they are."""
    known = type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return known and not norm.training and norm.running_mean is not None


class GroupedForward:
    """Runs several minibatches through a model, each with its own BatchNorm statistics, in order.

    One fused pass where that equals separate passes: in models whose BatchNorms are all grouped or frozen in evaluation
    mode, or that have none. Models with ordinary BatchNorm get one pass per minibatch. So do two kinds of which the
    first pass tells: those that call a grouped one several times a pass, where running statistics would be updated in
    another order, and those that give it other rows than one per sample.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.ordinary = [norm for norm in norms if not isinstance(norm, GroupedBatchNorm)]
        self.grouped = [norm for norm in norms if isinstance(norm, GroupedBatchNorm)]
        # Several where the model was put together from parts that had been converted one by one.
        self.groups = {norm.groups for norm in self.grouped}
        self._fusible: bool | None = None
        """Whether the model is of neither of these kinds; None as long as there was no pass to tell."""

    @property
    def fused(self) -> bool:
        """Whether one pass does; asked every time, since a part of a model may be frozen or thawed on the way."""
        return self._fusible is not False and all(map(_frozen, self.ordinary))

    def __call__(self, x: Nested, sizes: Sequence[int], network: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        """The outputs of the minibatches of these `sizes` that are concatenated in `x`.

        `network` stands in for the model where something else computes the same, such as its compiled form.
        """
        network = self.model if network is None else network
        if not self.fused:
            return [network(part) for part in split(x, sizes)]
        telling = self._fusible is None and any(norm.training or norm.running_mean is None for norm in self.grouped)
        undo = self._remember() if telling else None
        outputs = self._pass(x, sizes, network)
        if fault := self._fault():
            if undo is None:
                raise UsageError(
                    f"{fault} in this pass, but was not in the first: use the model without group_batchnorm."
                )
            undo()
            self._fusible = False
            return [network(part) for part in split(x, sizes)]
        self._fusible = self._fusible or telling or None
        return outputs

    def _fault(self) -> str | None:
        """What in the last pass was not as in separate ones."""
        if any(groups.strayed for groups in self.groups):
            return "a BatchNorm is given other rows than one per sample"
        for norm in self.grouped:
            if norm.calls > 1 and norm.track_running_stats:
                name = next(name for name, module in self.model.named_modules() if module is norm)
                return f"the BatchNorm {name} is called several times"
        return None

    def _pass(self, x: Nested, sizes: Sequence[int], network: Callable[[Any], Tensor]) -> list[Tensor]:
        """One pass for all minibatches."""
        for norm in self.grouped:
            norm.calls = 0
        for groups in self.groups:
            groups.sizes, groups.rows, groups.strayed = tuple(sizes), sum(sizes), False
        try:
            return list(torch.split(network(x), list(sizes)))
        finally:
            for groups in self.groups:
                groups.sizes = ()

    def _remember(self) -> Callable[[], None]:
        """A function that takes back what a pass moves: the model's buffers and what dropout drew."""
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        device = next(chain(self.model.buffers(), self.model.parameters()), torch.empty(0)).device
        states = global_state(device)

        def undo() -> None:
            for buffer, before in kept:
                buffer.copy_(before)
            restore_globally(states, device)

        return undo
