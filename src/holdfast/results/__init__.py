"""Results of runs: what they are, and how they are written to and read from files."""

from holdfast.results.result import RunResult, environment
from holdfast.results.schema import parse_json, read_json, validated, write_json
from holdfast.results.store import (
    LOGITS,
    RESULT,
    WEIGHTS,
    check_writable,
    find,
    read,
    read_logits,
    read_weights,
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
    "parse_json",
    "read",
    "read_json",
    "read_logits",
    "read_weights",
    "save",
    "validated",
    "write_json",
]
