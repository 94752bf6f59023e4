"""Results of runs: what they are, and how they are written to and read from files."""

from holdfast.results.result import RunResult, environment
from holdfast.results.store import (
    LOGITS,
    RESULT,
    WEIGHTS,
    check_writable,
    find,
    read,
    read_logits,
    read_weights,
    remove_scratch,
    save,
)

__all__ = [
    "LOGITS",
    "RESULT",
    "WEIGHTS",
    "RunResult",
    "check_writable",
    "environment",
    "find",
    "read",
    "read_logits",
    "read_weights",
    "remove_scratch",
    "save",
]
