"""Ctrl-C ends the command `holdfast` with exit code 130 and without a traceback, whenever it comes.

The package imports this module before anything else, as the import of PyTorch takes seconds. It does nothing in other
programs that import Holdfast.
"""

import atexit
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["ended", "interrupt", "is_starting", "started"]


class _Interrupted(KeyboardInterrupt):
    """A type of its own: after a plain KeyboardInterrupt inside `exec`, caught or not, Python ends by the signal.

    While modules are imported, dataclasses and named tuples are made by `exec`.
    """


def is_starting() -> bool:
    """Whether this process is `holdfast ...` or `python -m holdfast ...`."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""  # noqa: PTH119 - pathlib is not imported yet
    # For `-m`, Python has not yet put the name of the module into sys.argv.
    return name.removesuffix(".exe") == "holdfast" or (name == "-m" and sys.orig_argv[-len(sys.argv)] == "holdfast")


def started() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt again."""
    _exchange(_stop, interrupt)


def ended() -> None:
    """From now on, Ctrl-C ends the process at once: nothing is left that an exception could stop in good order."""
    _exchange(interrupt, _stop)


def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    """What Ctrl-C does while a command is carried out."""
    raise _Interrupted


def _stop(_signal: int, _frame: FrameType | None) -> None:
    os.write(2, b"stopped.\n")
    os._exit(130)  # an exception could be caught by the module that is being imported


def _exchange(before: object, after: object) -> None:
    """Put another handler in the place of this one; leave any other where it is."""
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)  # type: ignore[arg-type]


if is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
    # The first that is registered is the last to be called. Then Python takes its handlers away, and while it frees its
    # memory, the signal would end a process that has done its work.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
