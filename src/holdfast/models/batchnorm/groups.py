"""BatchNorm with statistics per minibatch, so that several minibatches can share one forward pass.

Replay learners show the network several minibatches a step. To concatenate them is fast, but ordinary BatchNorm would
then normalise old and new samples together. That is another method: on S-CIFAR-10 it costs many points of accuracy, on
small problems it may gain some. `group_batchnorm` replaces every BatchNorm of a model by one that normalises each
minibatch by itself. `GroupedForward` then needs one pass, and gives the outputs, gradients and running statistics of
separate passes.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from holdfast.errors import UsageError
from holdfast.models.anatomy import way_back
from holdfast.models.batchnorm import fused
from holdfast.nested import Nested, split, transform
from holdfast.rng import global_generators

__all__ = ["GroupedBatchNorm", "GroupedForward", "group_batchnorm", "normalized_relu"]


class _Groups:
    """The minibatches of the current pass; all BatchNorms of a model share one such object."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        """Empty outside of grouped passes: everything is one minibatch."""
        self.several = False
        """Whether the last grouped pass had several minibatches."""
        self.strayed = False
        """Whether a BatchNorm was given another number of rows, which cannot be assigned to minibatches."""


class GroupedBatchNorm(_BatchNorm):
    """BatchNorm over inputs of any rank that gives each minibatch of the batch its own statistics in training mode."""

    own_forward = False
    """Whether the original layer is of a class with its own forward pass, which is then called for each minibatch."""
    calls = 0
    """How often it was called in this grouped pass; more than one call would update running statistics out of order."""

    def __init__(self, original: _BatchNorm, groups: _Groups) -> None:
        nn.Module.__init__(self)
        # Parameters, buffers and hooks are the original's, so optimisers and state dicts stay valid.
        self.__dict__.update(original.__dict__)
        self.groups = groups

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    @property
    def separates(self) -> bool:
        """Whether its output depends on which samples come together."""
        return self.training or self.running_mean is None or self.own_forward

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input, of the same shape."""
        if self.has_kernels(input):
            return self.with_kernels(input)
        self._check_not_again()
        sizes = self.groups.sizes
        if len(sizes) < 2 or not self.separates:
            return super().forward(input)
        self.calls += 1
        if input.shape[0] != sum(sizes):
            self.groups.strayed = True
            return super().forward(input)  # any output will do: `GroupedForward` repeats the pass
        return torch.cat([super(GroupedBatchNorm, self).forward(part) for part in torch.split(input, list(sizes))])

    def _check_not_again(self) -> None:
        """Refuse to be computed again in a backward pass, where the minibatches are no longer known."""
        if torch.compiler.is_compiling() or self.groups.sizes or not (self.groups.several and self.separates):
            return
        if torch._C._current_graph_task_id() >= 0:
            raise UsageError(
                "a BatchNorm is computed again in the backward pass, as torch.utils.checkpoint does: use the model "
                "without group_batchnorm, or let checkpoints leave BatchNorm out."
            )

    def _equal(self, input: Tensor) -> bool:
        """Whether all minibatches have one size and more than one value per channel; torch refuses a single one."""
        sizes = self.groups.sizes or (input.shape[0],)
        return len(set(sizes)) == 1 and sizes[0] * len(sizes) == input.shape[0] and input[0, 0].numel() * sizes[0] > 1

    def has_kernels(self, input: Tensor) -> bool:
        """Whether `with_kernels` can replace `forward`; inputs that do not fit are left for torch to refuse."""
        usual = self.training and self.affine and self.momentum is not None and not self.own_forward
        fits = usual and input.dim() > 1 and input.shape[1] == self.num_features and input.device == self.weight.device
        return fits and fused.supports(input) and self._equal(input)

    def with_kernels(self, input: Tensor, shortcut: Tensor | None = None, *, relu: bool = False) -> Tensor:
        """The normalised input, on a GPU; it costs nothing to add `shortcut` and apply a ReLU."""
        self._check_not_again()
        groups = len(self.groups.sizes) or 1
        self.calls += groups > 1
        out, statistics = fused.batchnorm(
            input, self.weight, self.bias, groups=groups, eps=self.eps, relu=relu, shortcut=shortcut
        )
        if self.track_running_stats:
            count = input.numel() // statistics[0].numel()
            running = (self.running_mean, self.running_var, self.num_batches_tracked)
            fused.update_running(statistics, *running, self.momentum, count / (count - 1))
        return out


def normalized_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(x) + shortcut); one operation if `norm` has kernels for `x` and no hooks."""
    alike = shortcut is None or (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    if alike and isinstance(norm, GroupedBatchNorm) and norm.has_kernels(x) and not _hooked(norm):
        return norm.with_kernels(x, shortcut, relu=True)
    normalized = norm(x)
    # Nobody else needs this output, so it is overwritten: new tensors cost a small ResNet 4 % of a step on a CPU.
    # A class with its own forward pass may need its output for its gradient.
    if alike and isinstance(norm, GroupedBatchNorm) and not norm.own_forward and not _hooked(norm):
        return F.relu_(normalized if shortcut is None else normalized.add_(shortcut))
    return F.relu(normalized if shortcut is None else normalized + shortcut)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def group_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm in `model` by a grouped one that shares its parameters and buffers; returns the model.

    A second call changes nothing. Layers that cannot be converted stay as they are, and a warning gives the reasons:
    each minibatch then gets a forward pass of its own, with the same results but slower.

    A model with a LazyBatchNorm must have seen a minibatch before. The rows that reach a BatchNorm must be the samples
    in their order. If there are more or fewer rows, such as every frame of a sequence, this is noticed, and minibatches
    get separate passes. If they come in another order, this is not noticed, and minibatches would be mixed: do not
    convert such a model. One whose BatchNorms are inside of torch.utils.checkpoint is refused in the backward pass.
    """
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, norm in norms.items():
        if any(map(is_lazy, [*norm.parameters(), *norm.buffers()])):
            raise UsageError(f"the BatchNorm '{name}' has no shape yet: call model(x) on a minibatch first.")
    groups, left = _Groups(), Counter[str]()
    for name, norm in norms.items():
        if isinstance(norm, GroupedBatchNorm):
            continue
        if problem := _obstacle(norm, places[norm]):
            left[problem] += 1
        elif not name:
            return _grouped(norm, groups)
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _grouped(norm, groups))
    if left:
        reasons = " or ".join(f"{problem} ({count})" for problem, count in left.items())
        warnings.warn(
            f"{left.total()} of {len(norms)} BatchNorms were left as they were, because they {reasons}. "
            "Each minibatch gets a forward pass of its own: the results are right, but it is slower.",
            stacklevel=2,
        )
    return model


def _obstacle(norm: _BatchNorm, places: int) -> str | None:
    """Why `norm`, which is in so many places of a model, cannot be converted; None if it can."""
    if places > 1:  # separate passes would update its running statistics in another order
        return "are used in several places"
    if isinstance(norm, nn.SyncBatchNorm):
        return "are SyncBatchNorms"
    if "forward" in vars(norm) or len(inspect.signature(type(norm).forward).parameters) != 2:
        return f"have a special forward pass in {type(norm).__name__}"
    return None


def _grouped(norm: _BatchNorm, groups: _Groups) -> GroupedBatchNorm:
    kind: Any = type(norm)
    grouped = GroupedBatchNorm if kind.forward is _BatchNorm.forward else _grouped_kind(kind)
    return grouped(norm, groups)


@cache
def _grouped_kind(kind: type[_BatchNorm]) -> type[GroupedBatchNorm]:
    """A class for a `kind` with its own forward pass, such as timm's BatchNorm with an activation; still a `kind`."""

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:  # pickle does not find classes made on the fly
        return _restored, (kind,), self.__dict__

    return type(f"Grouped{kind.__name__}", (GroupedBatchNorm, kind), {"own_forward": True, "__reduce_ex__": reduce})


def _restored(kind: Any) -> nn.Module:
    return nn.Module.__new__(_grouped_kind(kind))


def _frozen(norm: _BatchNorm) -> bool:
    """Whether it normalises each sample by itself, with statistics that do not change."""
    known = type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(norm)
    return known and not norm.training and norm.running_mean is not None


def _separately(network: Callable[[Any], Tensor], x: Nested, sizes: Sequence[int]) -> list[Tensor]:
    """A pass for each minibatch, of which the network gets a copy: it may work in place on what it is given."""
    return [network(transform(torch.clone, part)) for part in split(x, sizes)]


class GroupedForward:
    """Runs several minibatches through a model, each with its own BatchNorm statistics, in order.

    One pass is enough for all of them if every BatchNorm of the model is grouped, or frozen in evaluation mode.
    Otherwise each minibatch gets a pass. The first pass shows two more kinds of models that need separate passes: those
    that call a grouped BatchNorm several times a pass, where running statistics would be updated in another order, and
    those that give it other rows than one per sample.
    """

    def __init__(self, model: nn.Module, *, apart: bool = True) -> None:
        """Without `apart`, minibatches share their statistics: each pass is an ordinary one."""
        self.model, self._apart = model, apart
        self.renew()

    def renew(self) -> None:
        """Look for the model's BatchNorms, of which there may be others than before."""
        self._norms = self._found()
        self.ordinary = [norm for norm in self._norms if not isinstance(norm, GroupedBatchNorm)]
        self.grouped = [norm for norm in self._norms if isinstance(norm, GroupedBatchNorm)]
        # More than one if parts of the model were converted one by one.
        self.groups = {norm.groups for norm in self.grouped}
        self._fusible: bool | None = None
        """Whether one pass is enough; None until the first pass in which a BatchNorm separates minibatches shows it."""

    @property
    def current(self) -> bool:
        """Whether the model still has the BatchNorms that were found, and no others."""
        return self._found() == self._norms

    def _found(self) -> list[_BatchNorm]:
        return [module for module in self.model.modules() if isinstance(module, _BatchNorm)] if self._apart else []

    @property
    def needless(self) -> bool:
        """Whether one ordinary pass is all: the model has no BatchNorm, or its statistics are shared."""
        return not (self.ordinary or self.grouped)

    @property
    def fused(self) -> bool:
        """Whether one pass is enough. It may change: parts of a model can be frozen or thawed at any time."""
        return self._fusible is not False and all(map(_frozen, self.ordinary))

    def __call__(self, x: Nested, sizes: Sequence[int], network: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        """The outputs of the minibatches of these `sizes`, which are concatenated in `x`.

        `network` is called in place of the model if something else computes the same, such as its compiled form.
        """
        network = self.model if network is None else network
        if not self.fused:
            return _separately(network, x, sizes)
        first = self._fusible is None and any(norm.separates for norm in self.grouped)
        undo = self._way_back() if first else None
        outputs = self._pass(transform(torch.clone, x) if first else x, sizes, network)  # `x` may be needed again
        if fault := self._fault():
            if undo is None:
                raise UsageError(f"{fault}, but not in the first pass: use the model without group_batchnorm.")
            undo()
            self._fusible = False
            return _separately(network, x, sizes)
        self._fusible = self._fusible or first or None
        return outputs

    def _fault(self) -> str | None:
        """Why the last pass differs from separate passes, if it does."""
        if any(groups.strayed for groups in self.groups):
            return "a BatchNorm was given other rows than one per sample"
        for norm in self.grouped:
            if norm.calls > 1 and norm.track_running_stats:
                name = next(name for name, module in self.model.named_modules() if module is norm)
                return f"the BatchNorm {name} was called several times"
        return None

    def _pass(self, x: Nested, sizes: Sequence[int], network: Callable[[Any], Tensor]) -> list[Tensor]:
        """One pass for all minibatches."""
        for norm in self.grouped:
            norm.calls = 0
        for groups in self.groups:
            groups.sizes, groups.strayed, groups.several = tuple(sizes), False, len(sizes) > 1
        try:
            return list(torch.split(network(x), list(sizes)))
        finally:
            for groups in self.groups:
                groups.sizes = ()

    def _way_back(self) -> Callable[[], None]:
        """A function that undoes a pass: in the model's buffers and in torch's own generators, which dropout uses."""
        device = next(chain(self.model.buffers(), self.model.parameters()), torch.empty(0)).device
        return way_back(self.model.modules(), global_generators(device).values())
