"""Processes that are copies of this one: to start Python and import PyTorch takes longer than most tests."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.context import BaseContext

import pytest
import torch

trains_in_a_fork = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="where there is a GPU, PyTorch computes no gradients in a copy of a process that has computed some",
)
"""Marks a test whose copies of this process train."""


def from_server() -> BaseContext:
    """Processes that begin with Holdfast imported: copies of one that has done nothing else. It is started once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["holdfast.sweep", "torch._dynamo"])  # the second is what torch.optim imports late
    return context


def forked(act: Callable[[], object]) -> int:
    """The number of a process that carries out `act` and ends, with 1 if that raises."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            act()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return number


def ended(numbers: list[int]) -> list[int]:
    """The exit codes of these processes, once all have ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]
