"""Which runs of a fleet go on when there is not enough time for all of them."""

import math
from collections.abc import Hashable, Iterable, Sequence
from time import monotonic

from holdfast.run_state import Progress

__all__ = ["Deadline"]

CHECK = 10.0
"""Seconds between two looks at how fast the runs are."""
MARGIN = 1.03
"""Runs are expected to take so many times as long as they should."""
SLOWER = {1: 1.35, 2: 1.15}
"""How much longer a step of a few runs takes than its share of a large fleet's (an H200, docs/speed.md)."""
SHORT = 60.0
"""Seconds in which a run that cannot end gets nowhere: most of them go into its preparation."""


class Deadline:
    """A moment at which a fleet ends.

    The runs of a fleet advance side by side. If time ends before all of them do, it ends for all of them shortly before
    their end, and nothing is finished. So as soon as they cannot all end in time, those with the most left to do wait:
    the others are faster without them, and end. If none can end in time, none waits.

    `at` is a moment of `time.monotonic`.
    """

    def __init__(self, at: float | None = None) -> None:
        self._at = math.inf if at is None else at
        self._left: dict[Hashable, float] = {}
        """Steps that each run has left."""
        self._lengths: list[float] = []
        """Steps of every run so far, from its beginning to its end."""
        self._seconds: float | None = None
        """Seconds that a step takes in a large fleet, from one step of any run to the next; None until measured."""
        self._counted, self._since = 0, monotonic()
        self.waiting: frozenset[Hashable] = frozenset()
        """The runs that wait."""

    def stepped(self, run: Hashable, progress: Progress) -> None:
        """Note a step of a run, and decide from time to time which runs wait."""
        if self._at == math.inf or not progress.fraction:
            return
        whole = progress.step / progress.fraction
        if run not in self._left:
            self._lengths.append(whole)
        self._left[run] = whole - progress.step
        self._counted += 1
        now = monotonic()
        if now - self._since >= CHECK:
            going = len(self._left) - len(self.waiting)
            self._seconds = (now - self._since) / self._counted / SLOWER.get(going, 1.0)
            self._counted, self._since = 0, now
            self._decide()

    def ended(self, run: Hashable) -> None:
        """A run is over, well or not: the others have more time."""
        self._left.pop(run, None)
        self._decide()

    def has_time_for_another(self) -> bool:
        """Whether a run as short as the shortest so far would end in time beside those that go on.

        The first run is always started. If none goes on, so is one that cannot end, unless time is about to end.
        """
        going = [left for run, left in self._left.items() if run not in self.waiting]
        if not going and (not self._lengths or not 0 < self._at - monotonic() <= SHORT):
            return True
        return self._in_time([*going, min(self._lengths)])

    def _decide(self) -> None:
        ending: list[Hashable] = []
        for run in sorted(self._left, key=self._left.__getitem__):
            if not self._in_time([self._left[each] for each in (*ending, run)]):
                break
            ending.append(run)
        self.waiting = frozenset(self._left).difference(ending) if ending else frozenset()

    def _in_time(self, left: Iterable[float]) -> bool:
        """Whether runs with so many steps left end in time."""
        return self._seconds is None or monotonic() + MARGIN * self._seconds * _work(sorted(left)) <= self._at


def _work(left: Sequence[float]) -> float:
    """The work of runs that advance side by side until each has ended, in steps of a large fleet."""
    work, done = 0.0, 0.0
    for ended, steps in enumerate(left):
        going = len(left) - ended
        work += (steps - done) * going * SLOWER.get(going, 1.0)
        done = steps
    return work
