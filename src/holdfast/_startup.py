"""Ctrl-C while the command `holdfast` imports PyTorch, which takes seconds, ends it without a traceback.

The package imports this module before anything else. It does nothing in other programs that import Holdfast.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["is_starting", "started"]


def is_starting() -> bool:
    """Whether this process is `holdfast ...` or `python -m holdfast ...`."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""  # noqa: PTH119 - pathlib is not imported yet
    # For `-m`, Python has not yet put the name of the module into sys.argv.
    return name.removesuffix(".exe") == "holdfast" or (name == "-m" and sys.orig_argv[-len(sys.argv)] == "holdfast")


def started() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    os.write(2, b"stopped.\n")
    os._exit(130)  # an exception could be caught by the module that is being imported


if is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
