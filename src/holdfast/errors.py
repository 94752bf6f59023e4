"""The errors Holdfast raises for people: what was wrong, what was expected, what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CheckpointError", "DataError", "DivergenceError", "HoldfastError", "StorageError", "TrainingError"]
__all__ += ["UnknownNameError", "UsageError", "needing"]


class HoldfastError(Exception):
    """Anything a user can be told in a sentence. The command line shows it and exits with `exit_code`."""

    exit_code = 1


class UsageError(HoldfastError, ValueError):
    """A request that cannot be carried out as written: an unknown name, a value out of range."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that nothing is registered under."""

    kind = ""
    """What it should be the name of, for instance a method."""


class DataError(HoldfastError):
    """A data file is missing, damaged, or not what its name says."""


class TrainingError(HoldfastError):
    """A run cannot go on, for instance because its loss is no longer finite."""


class DivergenceError(TrainingError):
    """The loss or the weights are no longer finite, and not for numbers in the data: other settings may do better."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written, or is damaged, of another version, or not what was asked for."""


class StorageError(HoldfastError):
    """The folder of a buffer cannot be written, or is damaged, of another version, or in use."""


@contextmanager
def needing(extra: str, what: str, kind: type[HoldfastError] = HoldfastError, or_else: str = "") -> Iterator[None]:
    """If a package cannot be imported inside the block, raise an error that says `what` and names the extra."""
    try:
        yield
    except ImportError as error:
        raise kind(f"{what}: install the extra '{extra}' (pip install 'holdfast[{extra}]'){or_else}.") from error
