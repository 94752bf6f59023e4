"""Numbers on their way out: rows under named columns, as CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

__all__ = ["Numbers", "Value", "plain_text"]

Value = str | int | float | None


@dataclass(frozen=True)
class Numbers:
    """A table of plain values. A missing value is None or NaN; both become an empty cell."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]

    def csv(self) -> str:
        """RFC 4180 with a heading; text that a spreadsheet would run as a formula gets an apostrophe."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return text.getvalue()

    def plain(self) -> list[dict[str, Value]]:
        """An object per row, None where a value is missing."""
        rows = ([None if value != value else value for value in row] for row in self.rows)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def json(self) -> str:
        """A list of objects, one per row."""
        return json.dumps(self.plain(), indent=1) + "\n"

    def data_uri(self) -> str:
        """The CSV as an address that a page can offer for download without a server."""
        return "data:text/csv;charset=utf-8," + quote(self.csv(), safe=",;:+-./()")


def plain_text(value: Value) -> str:
    """The value with at most six digits; empty where it is missing."""
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(value: Value) -> str:
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else plain_text(value)
