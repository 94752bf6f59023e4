"""Results of runs: what they are, and how they are written to and read from files."""

from holdfast.results.result import RunResult, environment
from holdfast.results.store import LOGITS, RESULT, WEIGHTS, check_writable, find, parse_json, read, save

__all__ = [
    "LOGITS",
    "RESULT",
    "WEIGHTS",
    "RunResult",
    "check_writable",
    "environment",
    "find",
    "parse_json",
    "read",
    "save",
]
