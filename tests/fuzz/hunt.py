"""Damage to files, and what reading a damaged file may do: read it rightly or say in a HoldfastError what is wrong.

Never another exception, never a wait, never memory for what a header merely announces, and nothing is executed,
written or connected to.
"""

import copy
import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError

ROOM = 1 << 30  # bytes that reading may take beyond what the process has; the files here have at most some thousands
PATIENCE = 20  # seconds a single read may take, on a busy machine as well
MORE = 20  # times as many examples in the slow run

FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"),
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.symlink", "shutil.rmtree"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen"),
}
seen: list[str] = []
watching = False


def _watch(event, arguments):
    if watching and (event in FORBIDDEN or (event == "open" and _is_for_writing(arguments))):
        seen.append(f"{event} {arguments}")


def _is_for_writing(arguments):
    _, mode, flags = arguments
    return any(letter in "wxa+" for letter in mode or "") or (isinstance(flags, int) and flags & 0b11 != 0)


sys.addaudithook(_watch)  # cannot be taken away again, so that it is told when to look


class Stuck(BaseException):
    """Reading went on for too long. No Exception, so that no reader takes it for a damaged file."""


@contextmanager
def limits():
    """Inside the block: little memory, little time, no side effects."""
    global watching
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def stop(_signal, _frame):
        raise Stuck

    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    signal.alarm(PATIENCE)
    seen.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not seen, f"reading a file did this: {seen}"


def outcome(read: Callable, *arguments, **options):
    """What `read` returned, or the HoldfastError it raised; everything else fails the test."""
    with limits():
        try:
            return read(*arguments, **options)
        except HoldfastError as error:
            told = error
    assert len(str(told)) > 10, "an error must say something"
    return told


def fuzz(strategy, examples=60):
    """Makes a property of (damaged thing, folder) a test with few examples, and a slow one with many."""

    def make(check):
        many = pytest.param(MORE * examples, marks=pytest.mark.slow, id="many")

        @pytest.mark.parametrize("count", [pytest.param(examples, id="few"), many])
        def test(count, tmp_path):
            health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
            chosen = settings(
                max_examples=count,
                deadline=None,
                database=None,
                derandomize=count == examples,
                suppress_health_check=health,
            )
            chosen(given(strategy)(lambda damaged: check(damaged, tmp_path)))()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return make


# --- bytes ---


class Content(bytes):
    """Bytes that are not spelled out in a report; how they were damaged says more."""

    def __repr__(self):
        return f"<{len(self)} bytes>"


def truncated(content: bytes):
    """The beginning of it."""
    return st.integers(0, len(content) - 1).map(lambda length: Content(content[:length]))


def flipped(content: bytes):
    """With up to eight bits turned over."""

    def flip(places):
        altered = bytearray(content)
        for place in places:
            altered[place // 8] ^= 1 << place % 8
        return Content(altered)

    # Headers are short and decide most: half of the flips happen there.
    bits = st.integers(0, 8 * len(content) - 1) | st.integers(0, 8 * min(len(content), 200) - 1)
    return st.lists(bits, min_size=1, max_size=8).map(flip)


def patched(content: bytes):
    """With a stretch of it replaced by other bytes, perhaps of another length."""

    def patch(cut):
        at, gone, piece = cut
        return Content(content[:at] + piece + content[at + gone :])

    places = st.integers(0, len(content)) | st.integers(0, min(len(content), 200))
    return st.tuples(places, st.integers(0, 16), st.binary(max_size=16)).map(patch)


def damaged(content: bytes):
    """Any of these, or something else altogether."""
    return truncated(content) | flipped(content) | patched(content) | st.binary(max_size=400)


# --- JSON ---

DEEP = 100_000
STRANGE = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1.5, 1e308, -1e308, float("nan"), float("inf"), 10**12, -(10**12), 10**400, 2**63),
        *("", "x", "0", "nan", "1e999", "\ud800", "../../etc/passwd", "\x00", "🐚" * 50),
        *([], {}, [[]], [None], [[[[[]]]]], {"a": {"b": []}}, {"": 0}, ["x"] * 50),
    ]
)


def altered(value):
    """JSON text of `value` with one or two places replaced by something strange, removed or doubled."""
    paths = list(_paths(value))

    def alter(changes):
        made = copy.deepcopy(value)
        for path, kind, strange in changes:
            made = _changed(made, path, kind, copy.deepcopy(strange))  # else it might come to contain itself
        return json.dumps(made).encode()

    change = st.tuples(st.sampled_from(paths), st.sampled_from(["replace", "remove", "wrap"]), STRANGE)
    # Also text nested so deeply that no parser follows.
    shells = st.sampled_from([("[", "]"), ('{"a":', "}")])
    deep = shells.map(lambda shell: (shell[0] * DEEP + "1" + shell[1] * DEEP).encode())
    return st.lists(change, min_size=1, max_size=2).map(alter) | deep


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _changed(value, path, kind, strange):
    if not path:
        return strange if kind == "replace" else [value]
    *front, last = path
    inner = value
    try:
        for key in front:
            inner = inner[key]
        if kind == "replace":
            inner[last] = strange
        elif kind == "remove":
            del inner[last]
        else:
            inner[last] = [inner[last]]
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took the place away
    return value
