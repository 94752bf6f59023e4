"""What happens to a program: kills and stops, a full disk, a folder that disappears, damaged files."""

import re
import resource
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random

from .program import Execution, Fault, Program
from .runs import result

DISK = 48 << 20
"""Bytes of the disk that programs work on, where one can be mounted."""
TROUBLES = ("kills", "stops", "full_disks", "removed_folders", "damaged_files")


class Disk:
    """A small disk of its own, in memory. Where nothing can be mounted, files may not grow beyond a size instead."""

    def __init__(self, path: Path) -> None:
        self.path, self.ballast = path, path / "ballast"
        path.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(path)]
        try:
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            self.mounted = False

    def fill(self, left: int, pid: int) -> None:
        """Leave so many bytes of room."""
        if not self.mounted:
            limit = max(left, 4096)  # the program's own output is in a file as well
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
            return
        with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        with suppress(OSError), self.ballast.open("r+b") as file:
            file.truncate(max(0, self.ballast.stat().st_size - left))

    def empty(self) -> None:
        """Take the ballast away."""
        self.ballast.unlink(missing_ok=True)


class Round:
    """One program in a fresh folder: some troubles, then its end, which must be `expected`."""

    def __init__(
        self, program: Program, expected: Mapping[str, bytes], seconds: float, disk: Disk, draw: Random
    ) -> None:
        self.program, self.expected, self.disk, self.draw = program, expected, disk, draw
        self.seconds = seconds
        """How long an undisturbed execution takes."""
        self.place, self.log = disk.path / "place", disk.path.parent / "log"
        self.damaged = self.lost = False
        """Whether a file was damaged, or the folder taken away, since the program was last started anew."""
        self.counts: Counter[str] = Counter()
        self.execution: Execution | None = None

    def go(self) -> None:
        """Raises a Fault, unless all goes as it must."""
        self.disk.empty()
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        try:
            for _ in range(self.draw.randint(1, 6)):
                getattr(self, f"_{self.draw.choice(TROUBLES)}")()
                self._check_ending()
            self._finish()
        finally:
            if self.execution is not None:  # somebody stops chaos itself
                self.execution.end(signal.SIGKILL, everyone=True)

    def _finish(self) -> None:
        """An undisturbed execution. What was damaged may be refused; then whoever runs it starts anew."""
        may_refuse = (0, 1) if self.damaged or self.lost else (0,)
        if self._start().finish(*may_refuse) == 1:
            self.counts["refused"] += 1
            self._start_anew()
            self._start().finish(0)
        if self.program.ending(self.place) != self.expected:
            raise Fault(f"its end differs from that of an undisturbed run:\n{self.log.read_text()}")
        self.counts["equal"] += 1

    def _start(self) -> Execution:
        self.counts["executions"] += 1
        self.execution = Execution(self.program, self.place, self.log)
        return self.execution

    def _start_anew(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(exist_ok=True)
        self.damaged = self.lost = False

    def _moment(self) -> float:
        return self.draw.uniform(0, 1.1 * self.seconds)

    def _check_ending(self) -> None:
        """If there is an end, it is the right one: no trouble leaves half a result."""
        found = self.program.ending(self.place)
        if found and found != self.expected and not self.damaged:
            raise Fault(f"it left an end that differs from that of an undisturbed run:\n{self.log.read_text()}")

    def _settle(self, execution: Execution, *expected: int) -> None:
        """Wait for the end of an execution that may have met earlier damage."""
        more = (1,) if self.damaged or self.lost else ()
        if execution.finish(0, *expected, *more) == 1 and (self.damaged or self.lost):
            self.counts["refused"] += 1
            self._start_anew()

    def _kills(self) -> None:
        self.counts["kills"] += 1
        execution, everyone = self._start(), self.draw.random() < 0.5
        execution.ended(self._moment())
        execution.end(signal.SIGKILL, everyone=everyone)
        self._settle(execution, -signal.SIGKILL)

    def _stops(self) -> None:
        self.counts["stops"] += 1
        execution, number = self._start(), self.draw.choice([signal.SIGINT, signal.SIGTERM])
        execution.ended(self._moment())
        execution.end(number, everyone=self.draw.random() < 0.5)
        self._settle(execution, 130, -number)

    def _full_disks(self) -> None:
        """The disk fills up for a while; then there is room again, or the program is killed before."""
        self.counts["full_disks"] += 1
        execution = self._start()
        execution.ended(self._moment())
        self.disk.fill(self.draw.choice([0, 0, 1000, 30_000, 300_000]), execution.pid)
        if not execution.ended(self._moment()):
            if self.draw.random() < 0.5:
                execution.end(signal.SIGKILL, everyone=True)
            elif self.draw.random() < 0.5:
                self.disk.empty()
        self._settle(execution, 1, -signal.SIGKILL)
        self.disk.empty()
        if kept := re.search(r"saved to (.*) instead", re.sub(r"\s+", " ", execution.output())):
            self.counts["results_kept_elsewhere"] += 1
            if result(Path(kept[1].strip()).parent) != self.expected:
                raise Fault(f"the result that was kept elsewhere differs:\n{execution.output()}")

    def _removed_folders(self) -> None:
        """All of it, or one folder in it, disappears while the program is at work."""
        self.counts["removed_folders"] += 1
        execution = self._start()
        execution.ended(self._moment())
        inside = [path for path in self.place.rglob("*") if path.is_dir()]
        shutil.rmtree(self.draw.choice([self.place, *sorted(inside)]), ignore_errors=True)
        self.lost = True
        self._settle(execution, 1)
        self.place.mkdir(exist_ok=True)

    def _damaged_files(self) -> None:
        """Bits flip in a file, or a part of it is missing, while nobody uses it."""
        self._kills()
        guarded, truncated = sorted(self.program.guarded(self.place)), sorted(self.program.truncated(self.place))
        if guarded or truncated:
            path = self.draw.choice([*guarded, *truncated])
            content = path.read_bytes()
            path.write_bytes(_damage(content, self.draw, only_cut=path in truncated))
            self.counts["damaged_files"] += 1
            self.damaged = True


def _damage(content: bytes, draw: Random, only_cut: bool) -> bytes:
    """The content with a few bits flipped, cut off, patched, emptied or replaced by noise."""
    cut = content[: draw.randrange(max(1, len(content) - 2))]
    if only_cut or not content:
        return cut
    at = draw.randrange(len(content))
    flipped = bytearray(content)
    flipped[at] ^= 1 << draw.randrange(8)
    patched = content[:at] + draw.randbytes(draw.randint(1, 16)) + content[at + draw.randint(0, 16) :]
    return draw.choice([cut, bytes(flipped), patched, b"", draw.randbytes(len(content))])
