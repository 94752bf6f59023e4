"""Where runs compute: the device, the CPU threads, the stream of a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.models import MODELS, evaluating

__all__ = ["choose_device", "choose_threads", "cpu_threads", "host_memory", "lacks_bfloat16", "own_stream"]
__all__ += ["threads_for"]

SMALL = 100_000_000
"""Operations of a forward pass below which one thread is the fastest: sharing such products costs more than it saves.

The MLP of R-MNIST with 384 samples, 69 million operations, is slower with two threads (docs/speed.md).
"""


def threads_for(config: RunConfig) -> int:
    """torch's CPU threads for a run: what its network prefers, else as many as torch chose for this machine.

    The rule is the same wherever a run is carried out, since the number of threads decides how sums are rounded.
    """
    preferred: int | None = getattr(MODELS[config.model], "threads", None)
    return preferred or torch.get_num_threads()


def choose_threads(model: nn.Module, x: Any) -> int:
    """Let torch compute with one CPU thread, in the whole process, if `model` is small; returns the number of threads.

    `x` is a minibatch as the model gets it. A model is small if its forward pass on `x` takes fewer than 100 million
    operations; for a larger one, or one on a GPU, the number of threads stays as it is. The choice depends on the
    model and the shape of `x` alone: the same program rounds the same way wherever it runs.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        with FlopCounterMode(display=False) as counter, torch.random.fork_rng([]), torch.no_grad(), evaluating(model):
            model(x)
        if counter.get_total_flops() < SMALL:
            torch.set_num_threads(1)
    return torch.get_num_threads()


def host_memory() -> int | None:
    """The bytes of this machine's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}': use cpu, cuda or auto.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available here; use --device cpu.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"'{name}' is not a device: use cpu, cuda, cuda:0 or auto.") from None


def lacks_bfloat16(device: torch.device) -> bool:
    """Whether `device` is a CPU on which oneDNN has no convolutions in bfloat16; PyTorch's take ten times as long."""
    with suppress(AttributeError):  # a PyTorch without oneDNN, or one that asks in another way: nothing is known
        return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Inside, GPU work goes to a stream of its own: the default stream does not allow steps to be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
