"""How figures look: a colour, dash and marker for each method, the two themes, the letters.

Neutral colours for the baselines, blues and greens for the strict regularizers, warm colours for the approximate ones.
Each colour can be read as text (a contrast of at least 4.5 to 1) on the background of its theme. Colour never stands
alone: dash and marker differ as well.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

__all__ = [
    "DARK",
    "INK",
    "LIGHT",
    "METHODS",
    "QUIET",
    "STYLE",
    "VARIANTS",
    "Style",
    "color_map",
    "looks",
    "method_style",
    "theme_colors",
]


@dataclass(frozen=True)
class Style:
    """A line's look. `color` is for white paper, `dark` for the page's dark theme."""

    color: str
    dark: str
    dash: str = "-"
    marker: str = "o"
    width: float = 1.6

    def line(self, **options: Any) -> dict[str, Any]:
        """The look of a line as options of matplotlib's `plot`, changed by those given."""
        shape = {"linestyle": self.dash, "linewidth": self.width, "marker": self.marker, "markersize": 4.5}
        return {"color": self.color, **shape, **options}


METHODS: dict[str, Style] = {
    "joint": Style("#555555", "#bdbdbd", "-.", ""),
    "sgd": Style("#6b6b6b", "#a0a0a0", ":", ""),
    "er": Style("#1a1a1a", "#f0f0f0", "--", "s"),
    "l1": Style("#1d3f8a", "#9db8f5", "-", "o"),
    "l2": Style("#0b7285", "#5ad1dc", "-", "s"),
    "linf": Style("#237a35", "#6fd67f", "-", "^"),
    "mse": Style("#0072c6", "#4fb0f5", "-", "D"),
    "kl": Style("#5f3dc4", "#b8a1ff", "-", "v"),
    "mi": Style("#a85400", "#ffa94d", "-", "X"),
    "simclr": Style("#c92a2a", "#ff8787", "-", "P"),
    "byol": Style("#8e44ad", "#d0a0f0", "-", "*"),
    "dino": Style("#b5307f", "#f78fc4", "-", "p"),
    "barlow": Style("#7d5a00", "#e0b84c", "-", "<"),
}
"""In the paper's order."""

OTHERS = (
    Style("#2b6777", "#7cc4d4", "-", "o"),
    Style("#94421a", "#f2a679", "-", "s"),
    Style("#5a6e00", "#b8cc52", "-", "^"),
    Style("#70449c", "#c3a1e8", "-", "D"),
    Style("#a03358", "#f09ab4", "-", "v"),
)
"""For methods that are not the paper's, in turn."""

VARIANTS = tuple(style for style in METHODS.values() if style.dash == "-")
"""For variants of one method, in turn."""

COLORS = {
    "ink": ("#1c1e22", "#e8eaee"),
    "muted": ("#595f69", "#a9b0bb"),
    "quiet": ("#b6bbc4", "#5d6470"),
    "grid": ("#d8dbe0", "#3a404a"),
    "paper": ("#ffffff", "#14171c"),
    "surface": ("#f4f5f7", "#1d2128"),
    "line": ("#c9cdd4", "#414854"),
    "link": ("#0b57a4", "#7db7f5"),
    "good": ("#0b6b3a", "#7ddba3"),
    "good-bg": ("#e2f4e8", "#12321f"),
    "bad": ("#a11d1d", "#ff9d97"),
    "bad-bg": ("#fce8e6", "#421b1b"),
    "warn": ("#744d00", "#f2c661"),
    "warn-bg": ("#fdf1d0", "#3a2d0a"),
    "open": ("#595f69", "#a9b0bb"),
    "open-bg": ("#eef0f3", "#262b34"),
}
"""The colours of the page in the light and the dark theme."""
LIGHT, DARK = ({name: pair[theme] for name, pair in COLORS.items()} for theme in (0, 1))
INK = {name: LIGHT[name] for name in ("ink", "muted", "quiet", "grid", "paper")}
"""The colours of text, secondary text, lines in the background, grid lines and paper in figures."""
QUIET = Style(INK["quiet"], DARK["quiet"], marker="", width=1.0)
"""For lines that only show where most methods lie."""
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "text.color": INK["ink"],
    "text.parse_math": False,  # names come from files: a dollar sign is a dollar sign
    "axes.edgecolor": INK["muted"],
    "axes.facecolor": "none",
    "axes.labelcolor": INK["ink"],
    "axes.titlecolor": INK["ink"],
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # a fixed place is faster than the search for a free one
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": INK["grid"],
    "xtick.color": INK["muted"],
    "ytick.color": INK["muted"],
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",  # the same figure is the same file
}
"""Settings of matplotlib for every figure."""


def color_map() -> Any:
    """The colours of heat maps: cividis, which keeps its order in grey and for colour-blind readers.

    It begins where the colour can be told from the paper of both themes.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["cividis"](0.25 + 0.75 * np.arange(256) / 255))


def method_style(method: str, others: Iterable[str] = ()) -> Style:
    """The look of a method. One that is not the paper's gets the next free look among the `others` in the figure."""
    if method in METHODS:
        return METHODS[method]
    strangers = sorted({method, *others} - METHODS.keys())
    return OTHERS[strangers.index(method) % len(OTHERS)]


def looks(methods: Mapping[str, str], *, variants_differ: bool = True) -> dict[str, Style]:
    """The look of each label, given its method; variants of one method get looks of their own, if they differ."""
    found = {}
    for label, method in methods.items():
        namesakes = [other for other in methods if methods[other] == method]
        variant = VARIANTS[namesakes.index(label) % len(VARIANTS)]
        is_variant = variants_differ and len(namesakes) > 1
        found[label] = variant if is_variant else method_style(method, methods.values())
    return found


@cache
def theme_colors() -> dict[str, tuple[str, str, str]]:
    """The colours figures use: light hex -> (name of its CSS variable, light hex, dark hex)."""
    colors = {INK[name]: (name, INK[name], DARK[name]) for name in INK}
    looks = {f"m-{name}": style for name, style in METHODS.items()}
    looks |= {f"o-{number}": style for number, style in enumerate(OTHERS)}
    return colors | {style.color: (name, style.color, style.dark) for name, style in looks.items()}
