"""Modules that register regularizers, learners or benchmarks of one's own."""

import importlib
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from holdfast.errors import HoldfastError, UsageError

__all__ = ["import_plugins"]


def import_plugins(names: Iterable[str] | None, folder: Path | None = None) -> None:
    """Import the modules. A module that is not installed is looked for in `folder` (the current one if None).

    The folder is on the search path only while such a module is imported, and comes last. Otherwise a file there could
    take the place of any package that Holdfast imports.
    """
    for name in names or ():
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"'{name}' is not the name of a Python module. Name a plugin like this: my_module.")
        place = os.fspath(folder or Path.cwd())
        try:
            local = find_spec(name.partition(".")[0]) is None
            if local:
                importlib.invalidate_caches()
                sys.path.append(place)
            try:
                importlib.import_module(name)
            finally:
                if local:
                    sys.path.remove(place)
        except (Exception, SystemExit) as error:  # a module may raise anything
            plain = isinstance(error, ImportError | HoldfastError)
            reason = (f"{error}" if plain else f"{type(error).__name__}: {error}").rstrip(".")
            advice = " Leave out '.py'." if name.endswith(".py") else ""
            raise HoldfastError(f"plugin '{name}' could not be imported: {reason}.{advice}") from error
