"""Name -> object, with a description. A name that is taken raises; an unknown one raises and names the nearest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from holdfast.errors import UsageError

__all__ = ["Registry", "unknown_name"]

T = TypeVar("T")


def unknown_name(kind: str, name: str, known: list[str]) -> UsageError:
    """The error for a name that nobody registered, with the nearest known name or, failing that, all of them."""
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.52)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}."
    return UsageError(f"unknown {kind} '{name}': {hint}")


def _redefines(new: object, old: object) -> bool:
    """Whether both were defined under one name in one module, so that the former one is gone there."""
    names = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "<unnamed>")) for each in (new, old)]
    return names[0] == names[1] and "<" not in names[0][1]


class Registry(Mapping[str, T]):
    """A read-only mapping that grows by registration only.

    >>> SHAPES: Registry[int] = Registry("shape")
    >>> SHAPES.register("triangle", "three corners")(3)
    3
    >>> SHAPES["triangle"], SHAPES.describe("triangle")
    (3, 'three corners')
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._descriptions: dict[str, str] = {}

    def register(self, name: str, description: str | None = None) -> Callable[[T], T]:
        """A decorator that files an object under `name`; the description defaults to its docstring's first line.

        Defined anew, as by a cell of a notebook that is run again, an object takes the place of its former self.
        """

        def add(entry: T) -> T:
            if name in self._entries and not _redefines(entry, self._entries[name]):
                raise UsageError(f"{self.kind} '{name}' is registered already; choose another name.")
            self._entries[name] = entry
            self._descriptions[name] = description or (entry.__doc__ or "").strip().partition("\n")[0]
            return entry

        return add

    def describe(self, name: str) -> str:
        """One line about the entry `name`."""
        self[name]
        return self._descriptions[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise unknown_name(self.kind, name, list(self._entries))
        return self._entries[name]

    # Mapping's own `in` and `get` expect a KeyError; ours is a UsageError.
    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get(self, name: str, default: Any = None, /) -> Any:
        """The entry, or `default` where there is none."""
        return self._entries.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
