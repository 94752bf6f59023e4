"""A program that chaos is done to, and one execution of it in a process of its own."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError

PATIENCE = 300
"""Seconds after which an execution counts as stuck, on a busy machine as well."""


class Program(NamedTuple):
    """What is executed in a folder again and again, until it ends with exit code 0."""

    name: str
    act: Callable[[Path], None]
    """Carries it out in a folder, and continues what an earlier execution left there."""
    ending: Callable[[Path], Mapping[str, bytes]]
    """What it left in the end, by name; empty if it has not come to its end."""
    guarded: Callable[[Path], list[Path]]
    """Files whose damage the program must notice, or can do without."""
    truncated: Callable[[Path], list[Path]] = lambda place: []
    """Files without a checksum: their loss is noticed, single bits are not."""


class Fault(Exception):
    """The program did what it must never do."""


class Execution:
    """A forked child that carries out a program; its output goes to the file `log`."""

    def __init__(self, program: Program, place: Path, log: Path) -> None:
        self.log, self.code = log, None
        self.pid = os.fork()
        if self.pid == 0:
            _live(program, place, log)

    def ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(0.005)
        return True

    def finish(self, *expected: int) -> int:
        """Wait for its end, and for that of all processes it started; returns its exit code, one of the expected."""
        if not self.ended(PATIENCE):
            self.end(signal.SIGKILL, everyone=True)
            raise Fault(f"it hangs:\n{self.output()}")
        deadline = time.monotonic() + PATIENCE
        while _group_lives(self.pid):
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise Fault("processes it started go on after its end")
            time.sleep(0.01)
        if "Traceback" in self.output() or self.code not in expected:
            raise Fault(f"it ended with {self.code}, expected was one of {expected}:\n{self.output()}")
        return self.code

    def end(self, number: int, *, everyone: bool) -> None:
        """Send it a signal, or all processes it started as well. One that has ended gets none: its number is free."""
        if self.code is None:
            # A child that has just begun has no group of its own yet, and no children either.
            (os.killpg if everyone and _group_lives(self.pid) else os.kill)(self.pid, number)

    def output(self) -> str:
        """What it printed."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""


def _live(program: Program, place: Path, log: Path) -> None:
    """The child: errors for people are exit code 1, all others a traceback and 70."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = sys.stderr = os.fdopen(file, "w", encoding="utf-8", buffering=1)
    code = 70
    try:
        program.act(place)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except HoldfastError as error:
        print(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _group_lives(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
