"""How a step is executed: eagerly, or on a GPU as one captured graph around compiled functions."""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data import data_root
from holdfast.engine.bfloat import BfloatTwin
from holdfast.engine.captured import CapturedEngine
from holdfast.engine.eager import Engine, LossLog, prepare_cpu
from holdfast.learners import Learner, Optimizer, PlainSgd
from holdfast.pure import pure

__all__ = ["BfloatTwin", "CapturedEngine", "Engine", "LossLog", "accelerate", "make_engine", "prepare_cuda"]


def accelerate(
    model: nn.Module, optimizer: Optimizer, precision: str, device: torch.device, *, twin: bool = True
) -> tuple[Callable[[Any], Tensor], Optimizer]:
    """The function that computes the model's outputs in a step, and the optimiser; on a GPU, faster equivalents.

    Networks with convolutions are compiled there, unless they have an attribute `compiles` that is False. In
    bfloat16, a `twin` of the network is trained where that is possible.
    """
    if device.type != "cuda" or not _has_convolutions(model):
        return model, optimizer
    network: Callable[[Any], Tensor] = model
    if twin and precision == "bfloat16" and type(optimizer) is PlainSgd and isinstance(optimizer.lr, float):
        optimizer = BfloatTwin(model, optimizer.lr, optimizer.weight_decay)
        network = optimizer.network
    return (pure(network) if getattr(model, "compiles", True) else network), optimizer


def make_engine(
    learner: Learner, device: torch.device, generators: Sequence[torch.Generator], batch_size: int
) -> Engine:
    """The engine for a device: eager on a CPU, captured on a GPU."""
    if device.type != "cuda":
        prepare_cpu()
        return Engine(learner, device)
    prepare_cuda()
    compiled = _has_convolutions(learner.model)  # for smaller networks, compiling takes longer than it saves
    if compiled:
        _start_compiler()
    return CapturedEngine(learner, device, generators, batch_size=batch_size, compiled=compiled)


def _start_compiler() -> None:
    """Start the processes of PyTorch's compiler: they need seconds, and the first step that is compiled needs them."""
    # Every method of a fleet compiles the same functions for other constants; the default limit is eight.
    torch._dynamo.config.recompile_limit = 64
    with suppress(ImportError, AttributeError):  # compiling starts them too, so nothing is lost in another version
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def prepare_cuda() -> None:
    """Process-wide settings: let cuDNN choose its fastest kernels, reuse compiled code across runs and processes."""
    torch.backends.cudnn.benchmark = True
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(data_root() / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(data_root() / "compiled" / "triton"))
    # The advice is about matrix products in float32; compiled networks have only one of them.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
