"""Files that may come from anywhere: what is read is of the expected type, or it is refused with a ValueError."""

import json
import re
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from holdfast.files import read_regular, replacing

__all__ = ["Count", "Percent", "Share", "parse_json", "read_json", "validated", "write_json"]

MOST_BYTES = 64 << 20
"""A larger JSON file is none of ours."""

PLAIN = {int, float, str, bool, NoneType}
SURROGATE = re.compile("[\ud800-\udfff]")
NUMBERS: dict[Any, set[type]] = {float: {float}, float | None: {float, NoneType}}

Percent = Annotated[float, lambda value: 0 <= value <= 100]
Share = Annotated[float, lambda value: 0 <= value <= 1 + 1e-9]
"""Of 1; a sum of shares may be rounded up."""
Count = Annotated[int, lambda value: value >= 0]

LARGEST = 2**63
"""Whole numbers from here on fit into no tensor and no float."""


def read_json(path: Path) -> Any:
    """The value in a regular JSON file. Raises an OSError, or a ValueError if it is something else."""
    content = read_regular(path, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    return parse_json(content)


def write_json(path: Path, values: Any) -> None:
    """Write the values to `path`, whole or not at all; raises an OSError. Its folder is made if need be."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """The value that the text describes, or a ValueError. NaN and Infinity are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def validated(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`, or a ValueError that says which part of `where` is wrong.

    A kind is a type as in annotations: numbers (finite, below 2**63), str (no lone surrogates), None, Literal, unions,
    lists, tuples (from lists), dicts, Any, dataclasses (from dicts; entries that are no fields are ignored), and
    Annotated[kind, check] with a function that says whether a value is right.
    """
    if kind is Any or (kind in PLAIN and _is_plain(kind, value)):
        return value
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated and parts[1](made := validated(parts[0], value, where)):
        return made
    if origin in (Union, UnionType):
        return _one_of(parts, value, where)
    if origin is Literal and value in parts:
        return value
    if origin is list and isinstance(value, list):
        # Matrices have many numbers: they are checked together, and one by one only if any is wrong.
        if NUMBERS.get(parts[0], set()).issuperset(map(type, value)) and all(map(isfinite, filter(None, value))):
            return value
        return [validated(parts[0], item, f"{where}[{number}]") for number, item in enumerate(value)]
    if origin is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        if len(kinds) == len(value):
            pairs = zip(kinds, value, strict=True)
            return tuple(validated(*pair, f"{where}[{number}]") for number, pair in enumerate(pairs))
    if origin is dict and isinstance(value, dict):
        return {validated(str, key, where): validated(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(origin) and isinstance(value, dict):
        return _dataclass(origin, value, where)
    raise ValueError(f"{where} is {_brief(value)}")


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """The value as the first kind that it fits; with a single kind beside None, its error says more."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    for kind in others[:-1]:
        with suppress(ValueError):
            return validated(kind, value, where)
    return validated(others[-1], value, where)


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    if hasattr(kind, "from_dict"):  # which checks the range of numbers, but neither texts nor how large a number may be
        return _from_dict(kind, value, where)
    hints, found = _hints(kind), {}
    for field in fields(kind):
        if field.name in value:
            found[field.name] = validated(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return kind(**found)


def _from_dict(kind: Any, value: dict[str, Any], where: str) -> Any:
    try:
        made = kind.from_dict(value)
    except (TypeError, AttributeError, KeyError, OverflowError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    for name, each in _hints(kind).items():
        validated(each, getattr(made, name), f"{where}.{name}")
    return made


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _is_plain(kind: type, value: Any) -> bool:
    """Whether a value is of one of the types that JSON itself has; a whole number is a float as well."""
    if kind is float and isinstance(value, float):
        return isfinite(value)
    if kind is str:
        return isinstance(value, str) and not SURROGATE.search(value)
    if kind in (bool, NoneType) or isinstance(value, bool):
        return type(value) is kind
    return isinstance(value, int) and abs(value) < LARGEST


def _brief(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < LARGEST else "a number of too many digits"
    return text if len(text) <= 40 else f"{text[:37]}..."
