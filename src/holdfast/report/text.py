"""Numbers, times and names as people read them."""

import re
from collections.abc import Iterable
from math import isnan

__all__ = ["count", "duration", "latex", "markdown", "plus_minus", "shorten", "shorten_all", "slug", "visible"]

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "✓": r"$\checkmark$",
    "✗": r"$\times$",
    "≈": r"$\approx$",
    "–": "--",
}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal would obey or cannot show: control characters, changes of direction, broken UTF-8."""


def plus_minus(mean: float, std: float | None = None, n: int = 0, *, decimals: int = 2) -> str:
    """A mean with its standard deviation and the number of runs, each where it is known; empty if the mean is NaN.

    >>> plus_minus(52.0, 1.0, 3)
    '52.00 ± 1.00 (3)'
    """
    if isnan(mean):
        return ""
    spread = "" if std is None or isnan(std) else f" ± {std:.{decimals}f}"
    return f"{mean:.{decimals}f}{spread}" + (f" ({n})" if n else "")


def duration(seconds: float) -> str:
    """A time to about two digits.

    >>> duration(42), duration(600), duration(9000), duration(300_000)
    ('42 s', '10 min', '2.5 h', '3.5 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 172_800:
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:,.1f} days" if seconds < 864_000 else f"{seconds / 86_400:,.0f} days"


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(1, "seed"), count(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def shorten(name: str, longest: int) -> str:
    """The name in characters that can be drawn, cut to at most `longest` of them."""
    name = visible(name)
    return name if len(name) <= longest else name[: longest - 1] + "…"


def shorten_all(names: Iterable[str], longest: int) -> dict[str, str]:
    """Each name cut to at most `longest` characters; those that would become the same are numbered.

    >>> shorten_all(["er, lr 0.1", "er, lr 0.2", "l2"], 8)
    {'er, lr 0.1': 'er, l… 1', 'er, lr 0.2': 'er, l… 2', 'l2': 'l2'}
    """
    alike: dict[str, list[str]] = {}
    for name in sorted(set(names)):  # a name has the same number in every figure
        alike.setdefault(shorten(name, longest), []).append(name)
    found = {}
    for short, same in alike.items():
        for number, name in enumerate(same, start=1):
            end = f" {number}" if len(same) > 1 else ""
            found[name] = shorten(name, longest - len(end)) + end if end else short
    return found


def slug(text: str) -> str:
    """The text as a file name and HTML id: letters, digits and hyphens only.

    >>> slug("rot-mnist, buffer 200")
    'rot-mnist-buffer-200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def visible(text: str) -> str:
    r"""The text with codes in place of control characters: names of files must not steer a terminal.

    >>> print(visible("a\x1b[31mb"))
    a\x1b[31mb
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def markdown(text: str) -> str:
    """The text in one line, escaped so that Markdown shows it as it is."""
    for sign in ("\\", "|", "*", "_", "`", "[", "<"):
        text = text.replace(sign, f"\\{sign}")
    return visible(" ".join(text.split()))


def latex(text: str) -> str:
    """The text in one line, escaped so that LaTeX shows it as it is."""
    return visible("".join(LATEX.get(sign, sign) for sign in " ".join(text.split())))
