"""Write the numbers and tables of the README and of all pages anew, from what was measured: `make numbers`.

Behind a number, a comment says where it comes from, and how it is written if not with one decimal:
`66.31<!-- how-sure.measures.tail.holdfast.mean:.2f -->` is in pictures/how-sure.json, under "measures" and so on. A
sign before the number belongs to it, and so do its commas and the percent sign that its form writes. Whoever writes
the page may put `?` for the number.

A table stands between `<!-- lag:begin -->` and `<!-- lag:end -->`; tables/ has what makes the one of that name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from holdfast.errors import HoldfastError
from tables import TABLES
from tables.common import measured, typeset

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
VALUE = re.compile(r"[+−]?\d+(?:,\d{3})*(?:\.\d+)?%?")
# A number begins where no other does: what is left of a longer one, or a second sign, would stay on the page.
NUMBER = re.compile(
    rf"(?P<old>(?<![\w.,+−-])(?:{VALUE.pattern}|\?))?(?P<comment><!--(?!\s*test:)\s*(?P<said>.*?)\s*-->)", re.DOTALL
)
TABLE = re.compile(r"<!-- (?P<name>[^>\n]*):(?P<side>begin|end) -->")


def filled(page: str) -> str:
    """The text of a page with everything up to date. What cannot be filled is a ValueError that tells its line."""
    return with_tables(with_numbers(page))


def with_numbers(page: str) -> str:
    """The page with the value before each comment written anew."""

    def written(mark: re.Match[str]) -> str:
        if TABLE.fullmatch(mark["comment"]):
            return mark[0]
        with told_where(mark):
            return f"{renewed(mark['old'], mark['said'])}{mark['comment']}"

    return NUMBER.sub(written, page)


def renewed(old: str | None, said: str) -> str:
    """The number of which a comment says so much, in place of the old one."""
    name, _, form = said.partition(":")
    if old is None:
        raise ValueError(f"directly before <!-- {said} --> must be a number, or ? for one that is to be written.")
    new = number(name, form or ".1f")
    if any(sign in old and sign not in form for sign in "+%"):
        raise ValueError(f"<!-- {said} --> would make {new} of {old}; if it may, put ? there, else change its form.")
    return new


def number(name: str, form: str = ".1f") -> str:
    """A number in that form: `trust.er.ece` is in trust.json, which is beside its picture or in this folder."""
    file, *keys = name.split(".")
    try:
        value = measured(file)
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        made = typeset(f"{value:{form}}")
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"there is no number {name} to be written as {form} ({error!r}).") from error
    if not VALUE.fullmatch(made):
        raise ValueError(f"{name} is {made!r}, which would not be found again as a number.")
    return made


def with_tables(page: str) -> str:
    """The page with everything between the two comments of each table written anew."""
    parts, place = [], 0
    marks = list(TABLE.finditer(page))
    for begin, end in zip_longest(marks[::2], marks[1::2]):
        with told_where(begin):
            if begin["side"] == "end":
                raise ValueError(f"<!-- {begin['name']}:end --> ends what was not begun.")
            if end is None or (end["name"], end["side"]) != (begin["name"], "end"):
                raise ValueError(f"the next mark of a table must be <!-- {begin['name']}:end -->.")
            parts += [page[place : begin.end()], f"\n\n{table(begin['name'])}\n\n"]
        place = end.start()
    return "".join([*parts, page[place:]])


def table(name: str) -> str:
    """The table of that name; further words are what it is told, as in `candidates narrow 1`."""
    made, *arguments = name.split()
    if made not in TABLES:
        raise ValueError(f"there is no table {made}; there are {', '.join(sorted(TABLES))}.")
    try:
        return TABLES[made](*arguments).strip()
    except (HoldfastError, OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the table {name} cannot be made ({error!r}).") from error


@contextmanager
def told_where(mark: re.Match[str]) -> Iterator[None]:
    """What is wrong with a mark is said with its line."""
    try:
        yield
    except ValueError as error:
        line = mark.string.count("\n", 0, mark.start()) + 1
        raise ValueError(f"line {line}: {error}") from error


def main() -> None:
    """Fill every page. One that cannot be filled is left as it is, and named at the end."""
    wrong = []
    for path in PAGES:
        text, page = path.read_text("utf-8"), path.relative_to(ROOT)
        try:
            made = filled(text)
        except ValueError as error:
            wrong.append(f"{page}, {error}")
            continue
        if made != text:
            path.write_text(made, "utf-8")
            print(f"wrote {page}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
