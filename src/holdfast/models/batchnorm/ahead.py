"""Compiling the kernels of a network's BatchNorms in threads, while its run is being set up.

One after the other they take more than ten seconds, before the first step ends. Nothing depends on this: a kernel that
was not compiled here is compiled when it is called.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module

import torch
from torch import nn
from torch.func import functional_call

from holdfast.models.anatomy import evaluating
from holdfast.models.batchnorm import fused
from holdfast.models.batchnorm.groups import GroupedBatchNorm

__all__ = ["compile_kernels", "compiling_ahead", "input_shapes"]

KINDS = ((True, False), (True, True), (False, False))
"""With or without a ReLU and a shortcut: a block's first BatchNorm, its second, and the one in its shortcut."""


@contextmanager
def compiling_ahead(
    model: nn.Module,
    passes: Sequence[tuple[int, int]],
    shape: tuple[int, ...],
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[None]:
    """Inside the block, kernels for steps on samples of `shape` are compiled; leaving it waits for them.

    `passes` are those of a learner's steps: minibatches, and the groups that they make. Only networks of residual
    blocks, which have `compiles = False`, need it; others are compiled as a whole.
    """
    fits = fused.compiles_for(device) and not getattr(model, "compiles", True)
    with ExitStack() as stack:
        if fits:
            with suppress(Exception):  # an old Triton; a network that cannot compute with meta tensors
                import triton

                pool = stack.enter_context(ThreadPoolExecutor())
                stack.enter_context(triton.AsyncCompileMode(pool, ignore_errors=True))
                with torch.cuda.device(device):
                    for _, *rest in sorted(input_shapes(model, shape)):
                        for minibatches, groups in passes:
                            compile_kernels((minibatches * batch_size, *rest), groups, dtype)
        yield
        if fits:  # the first step needs PyTorch's compiler, whose import takes seconds: time for the threads
            with suppress(Exception):  # the step will say what is wrong
                import_module("torch._inductor.compile_fx")


def input_shapes(model: nn.Module, shape: tuple[int, ...]) -> set[torch.Size]:
    """The shapes of the inputs of the BatchNorms in `model` for one sample."""
    found: set[torch.Size] = set()
    norms = [module for module in model.modules() if isinstance(module, GroupedBatchNorm)]
    handles = [norm.register_forward_pre_hook(lambda _, given: found.add(given[0].shape)) for norm in norms]
    try:
        with evaluating(model), torch.no_grad():
            tensors = {name: each.to("meta") for name, each in model.state_dict().items()}
            functional_call(model, tensors, torch.empty(1, *shape, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return found


def compile_kernels(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    """Compile the kernels for inputs of `shape` (B, C, ...) in so many groups."""
    from holdfast.models.batchnorm import kernels

    x = torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(shape[1], device="meta")
    for relu, shortcut in KINDS:
        y, statistics = kernels.forward(x, weight, weight, x if shortcut else None, groups, 1e-5, relu)
        kernels.backward(x, x, y if shortcut else None, weight, weight, statistics, 1e-5, relu)
    batches = torch.empty((), dtype=torch.int64, device="meta")
    kernels.update_running(statistics, weight, weight, batches, 0.1, 1.5)
