"""Name -> object, with a description. A name that is taken is refused; an unknown name raises and gives the nearest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from holdfast.errors import UnknownNameError, UsageError

__all__ = ["Registry", "unknown_name"]

T = TypeVar("T")


def unknown_name(kind: str, name: str, known: list[str]) -> UnknownNameError:
    """The error for an unknown name. It gives the nearest known name or, if none is near, all of them."""
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.52)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}."
    error = UnknownNameError(f"unknown {kind} '{name}': {hint}")
    error.kind = kind
    return error


def _redefines(new: object, old: object) -> bool:
    """Whether `new` replaces `old` in its module: both have the same module and name."""
    names = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "<unnamed>")) for each in (new, old)]
    return names[0] == names[1] and "<" not in names[0][1]


class Registry(Mapping[str, T]):
    """A read-only mapping that grows only by registration. A name in the registry `beside` it is taken here too.

    >>> SHAPES: Registry[int] = Registry("shape")
    >>> SHAPES.register("triangle", "three corners")(3)
    3
    >>> SHAPES["triangle"], SHAPES.describe("triangle")
    (3, 'three corners')
    """

    def __init__(self, kind: str, *, beside: Registry[Any] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._descriptions: dict[str, str] = {}
        self._origins: dict[str, str] = {}
        self._beside = beside
        if beside is not None:
            beside._beside = self  # names are taken in both directions

    def register(self, name: str, description: str | None = None) -> Callable[[T], T]:
        """A decorator that files an object under `name`; the description defaults to its docstring's first line.

        An object that is defined again, as by a notebook cell that runs twice, replaces its earlier self.
        """
        origin = str(sys._getframe(1).f_globals.get("__name__", "__main__"))

        def add(entry: T) -> T:
            if name in self._entries and not _redefines(entry, self._entries[name]):
                raise UsageError(f"{self.kind} '{name}' is registered already; choose another name.")
            if self._beside is not None and name in self._beside:
                other = self._beside.kind
                raise UsageError(f"there is a {other} '{name}' already; choose another name for the {self.kind}.")
            self._entries[name] = entry
            self._descriptions[name] = description or (entry.__doc__ or "").strip().partition("\n")[0]
            self._origins[name] = origin
            return entry

        return add

    def describe(self, name: str) -> str:
        """One line about the entry `name`."""
        self[name]
        return self._descriptions[name]

    def origin(self, name: str) -> str | None:
        """The module that registered the entry `name`, which may be defined in another one; None if there is none."""
        return self._origins.get(name)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise unknown_name(self.kind, name, list(self._entries))
        return self._entries[name]

    # Mapping's own `in` and `get` expect a KeyError; ours is a UsageError.
    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get(self, name: str, default: Any = None, /) -> Any:
        """The entry, or `default` if there is none."""
        return self._entries.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
