"""Pure functions of tensors, which an engine may run in compiled form without the caller knowing.

`@pure` marks a function whose result depends on its arguments only. Called normally, it is the function itself. Inside
`compiled_calls()`, calls go to its compiled form instead, which is made once per function and kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["compiled_calls", "pure"]

P = ParamSpec("P")
R = TypeVar("R")

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def pure(function: Callable[P, R]) -> Callable[P, R]:
    """Mark `function` as one that may be compiled.

    >>> @pure
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.tensor(3))
    tensor(6)
    """
    compiled = cache(lambda: torch.compile(function, dynamic=False))

    @wraps(function, updated=())  # a network is a function here, its weights are not attributes of this one
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Inside another compiled function, PyTorch's compiler follows the plain one.
        if not _compiling.get() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


@contextmanager
def compiled_calls(enabled: bool = True) -> Iterator[None]:
    """Inside the block, pure functions run compiled if `enabled`."""
    token = _compiling.set(enabled)
    try:
        yield
    finally:
        _compiling.reset(token)
