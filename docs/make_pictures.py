"""The pictures of the concept pages: `make pictures` computes and draws them anew, in about two minutes.

Each picture has two parts. `compute_*` runs the library and returns plain numbers, which are saved as
pictures/NAME.json; `draw_*` turns those numbers into pictures/NAME.svg and knows nothing else. The same numbers give
the same file, byte for byte.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import holdfast as hf
from holdfast import data
from holdfast.report.draw.runs import draw_heatmaps
from holdfast.report.draw.style import INK, METHODS, STYLE, Style
from holdfast.report.series import Heatmap

FOLDER = Path(__file__).parent / "pictures"
DEMO = Path(__file__).parent / "demo.png"
ANALYSIS = Path(__file__).parents[1] / "results" / "seq-cifar10" / "analysis" / "analysis.json"
Numbers = dict[str, Any]

PHASES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # Okabe and Ito: for colour-blind readers as well
LINF, ER = METHODS["linf"], METHODS["er"]
MEASURED = ("l1", "l2", "linf", "mse", "kl", "mi", "simclr", "byol", "dino", "barlow")  # as in the paper's tables
KINDS = ("logits", "labels")  # names of tensors in a result: the answers, and the right ones
LANGUAGE = {"plain": "plain", "joint": "joint", "replay": "replay alone", "kl": "kl", "mse": "mse", "linf": "linf"}
LANGUAGE_BUFFERS = ("0_5", "2", "5")  # sizes of buffers, in percent, as the names of runs have them
STEP = 32  # samples a step
READ_EVERY = 20  # steps between two looks at the answers


# --- the reservoir ---


def compute_reservoir(samples: int = 2000, capacity: int = 200, every: int = 100) -> Numbers:
    """Five phases of a stream one after the other: how many samples of each the buffer holds, over time."""
    buffer = hf.Reservoir(capacity, generator=torch.Generator().manual_seed(0))
    seen, held = [], []
    for start in range(0, len(PHASES) * samples, every):
        phase = torch.arange(start, start + every) // samples
        buffer.add(torch.zeros(every, 1), phase)
        seen.append(start + every)
        held.append(torch.bincount(buffer.contents().y, minlength=len(PHASES)).tolist())
    return {"capacity": capacity, "samples": samples, "seen": seen, "held": held}


def draw_reservoir(numbers: Numbers) -> Figure:
    """A stacked area: the buffer fills at once, then every phase has its share of everything seen so far."""
    figure, (panel,) = _panels(1, width=7.4, height=3.3)
    columns = list(zip(*numbers["held"], strict=True))
    panel.stackplot(numbers["seen"], *columns, colors=PHASES, linewidth=0, alpha=0.85)
    for phase in range(1, len(PHASES)):
        panel.axvline(phase * numbers["samples"], color=INK["ink"], linewidth=0.8, linestyle=":")
    below = 0
    for phase, last in enumerate(column[-1] for column in columns):
        panel.text(
            numbers["seen"][-1] * 1.01, below + last / 2, f"phase {phase + 1}: {last}", va="center", fontsize=9.5
        )
        below += last
    panel.set_xlim(numbers["seen"][0], numbers["seen"][-1])
    panel.set_ylim(0, numbers["capacity"])
    panel.set_xlabel("samples seen so far (a new phase begins at each dotted line)")
    panel.set_ylabel("samples in the buffer")
    figure.subplots_adjust(right=0.86)
    return figure


# --- what the consistency term compares ---


def compute_consistency(limit: int | None = 4000) -> Numbers:
    """Digits two by two, with and without the consistency term: the answers to 200 zeros and ones, then and now."""
    images, labels = data.load("mnist").train
    probe = (labels < 2).nonzero().flatten()[:200]
    drift, then, now = {}, {}, {}
    for name, beta in (("er", 0.0), ("linf", 0.5)):
        drift[name], then[name], now[name] = _follow(beta, limit, images.float() / 255, labels, probe)
    # One digit to show: the one that replay alone moved by the median amount.
    chosen = int((now["er"] - then["er"]).abs().amax(dim=1).argsort()[len(probe) // 2])
    return {
        "every": STEP * READ_EVERY,
        "drift": drift,
        "image": images[probe[chosen], 0].tolist(),
        "label": int(labels[probe[chosen]]),
        "answers": {name: {"then": then[name][chosen].tolist(), "now": now[name][chosen].tolist()} for name in then},
    }


def _follow(
    beta: float, limit: int | None, images: Tensor, labels: Tensor, probe: Tensor
) -> tuple[list[float], Tensor, Tensor]:
    """Train on five tasks. Returns how far the logits of the `probe` have moved since the first task, every so many
    steps, and these logits after the first task and at the end."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=200, regularizer="linf", beta=beta)
    drift: list[float] = []
    then = torch.empty(0)
    for task in range(5):
        chosen = (labels // 2 == task).nonzero().flatten()[:limit]
        for number, batch in enumerate(torch.split(chosen, STEP)):
            learner.observe(images[batch], labels[batch])
            if task and number % READ_EVERY == 0:
                drift.append(float((_ask(model, images[probe]) - then).abs().amax(dim=1).mean()))
        if task == 0:
            then = _ask(model, images[probe])
    return drift, then, _ask(model, images[probe])


@torch.no_grad()
def _ask(model: nn.Module, x: Tensor) -> Tensor:
    answer: Tensor = model(x)
    return answer


def draw_consistency(numbers: Numbers) -> Figure:
    """Left: the ten logits of one stored digit, then and now. Right: how far the answers to old digits wander."""
    figure, (bars, lines) = _panels(2, width=9.2, height=3.5)
    kinds = [
        ("after the first task", numbers["answers"]["linf"]["then"], "#b9bec7", None),
        ("now, replay alone", numbers["answers"]["er"]["now"], ER.color, "////"),
        ("now, with consistency (linf)", numbers["answers"]["linf"]["now"], LINF.color, None),
    ]
    for place, (label, values, color, hatch) in enumerate(kinds):
        offsets = [digit + (place - 1) * 0.27 for digit in range(10)]
        face = "none" if hatch else color
        bars.bar(offsets, values, 0.25, label=label, facecolor=face, edgecolor=color, hatch=hatch, linewidth=0.6)
    bars.set_xticks(range(10))
    bars.set_xlabel(f"class (the digit is a {numbers['label']})")
    bars.set_ylabel("logit")
    bars.set_title("The answers to one old digit")
    bars.legend(frameon=False, fontsize=8.5, loc="upper right")
    low, high = bars.get_ylim()
    bars.set_ylim(low, low + 1.5 * (high - low))  # room for the names and the digit
    picture = bars.inset_axes((0.06, 0.7, 0.17, 0.3))
    picture.imshow(numbers["image"], cmap="gray_r", interpolation="nearest")
    picture.set_axis_off()
    for name, style, label in (("er", ER, "replay alone"), ("linf", LINF, "with consistency")):
        steps = [number * numbers["every"] / 1000 for number in range(len(numbers["drift"][name]))]
        _line(lines, steps, numbers["drift"][name], style, label)
    lines.set_ylim(0, 1.15 * max(max(values) for values in numbers["drift"].values()))
    lines.set_xlabel("thousand samples since the first task ended")
    lines.set_ylabel("largest change of a logit, mean")
    lines.set_title("The answers to 200 digits of the first task")
    return figure


# --- BatchNorm ---


class Shared(nn.Module):
    """BatchNorm over whatever comes in one pass, old and new samples together: what one should not do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = [nn.BatchNorm1d(width)]  # in a list, where learners do not find it and run one pass
        self.weight, self.bias = self.inner[0].weight, self.inner[0].bias

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input."""
        self.inner[0].train(self.training)
        normalised: Tensor = self.inner[0](x)
        return normalised


def compute_batchnorm(limit: int | None = 4000, seeds: int = 3) -> Numbers:
    """Accuracy on all tasks seen so far with BatchNorm statistics of each minibatch, and with common ones."""
    norms: dict[str, Callable[[int], nn.Module]] = {"apart": nn.BatchNorm1d, "together": Shared}
    runs = {name: [_train_normalised(norm, limit, seed) for seed in range(seeds)] for name, norm in norms.items()}
    return {"runs": runs, "final": {name: fmean(run[-1] for run in each) for name, each in runs.items()}}


def _train_normalised(norm: Callable[[int], nn.Module], limit: int | None, seed: int) -> list[float]:
    train, test = data.load("mnist")[:2]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [nn.Linear(784, 100), norm(100), nn.ReLU(), nn.Linear(100, 100), norm(100), nn.ReLU()]
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))
    learner = hf.ConsistencyReplay(
        model, torch.optim.SGD(model.parameters(), lr=0.03), buffer_size=200, regularizer="mse", seed=seed
    )
    accuracies = []
    for task in range(5):
        for batch in torch.split((train.labels // 2 == task).nonzero().flatten()[:limit], STEP):
            model.train()
            learner.observe(train.images[batch].float() / 255, train.labels[batch])
        model.eval()
        seen = test.labels // 2 <= task
        right = _ask(model, test.images[seen].float() / 255).argmax(dim=1) == test.labels[seen]
        accuracies.append(100 * float(right.double().mean()))
    return accuracies


def draw_batchnorm(numbers: Numbers) -> Figure:
    """Two lines over the tasks, a thin one per seed and a thick one for their mean."""
    figure, (panel,) = _panels(1, width=6.6, height=3.3)
    looks = {
        "apart": (METHODS["mse"], "statistics of each minibatch"),
        "together": (METHODS["simclr"], "common statistics"),
    }
    for name, (style, label) in looks.items():
        runs = numbers["runs"][name]
        tasks = [float(task) for task in range(1, len(runs[0]) + 1)]
        for run in runs:
            panel.plot(tasks, run, color=style.color, linewidth=0.7, alpha=0.5)
        _line(panel, tasks, [fmean(values) for values in zip(*runs, strict=True)], style, label, marks=True)
    panel.set_xticks(tasks)
    panel.set_xlabel("after task")
    panel.set_ylabel("accuracy on all tasks seen (%)")
    figure.subplots_adjust(right=0.7)
    return figure


# --- forgetting, and whether answers can be believed ---


def compute_runs(methods: tuple[str, ...] = ("sgd", "er", "linf"), **changes: Any) -> Numbers:
    """Runs on digits two by two: the accuracy matrix, calibration and recency of each."""
    made: Numbers = {}
    for method in methods:
        result, calibration, recency = _run_digits(method, 10, **changes)
        made[method] = {
            "matrix": _table(result.matrix),
            "accuracy": round(result.accuracy, 2),
            "ece": round(calibration.ece, 2),
            "confidence": calibration.confidence,
            "correct": calibration.accuracy,
            "count": calibration.count,
            "tasks": recency.task_probabilities,
        }
    return made


def _run_digits(
    method: str, bins: int = 15, **changes: Any
) -> tuple[hf.RunResult, hf.analysis.Calibration, hf.analysis.Recency]:
    """A run on digits two by two, with its calibration and recency."""
    result = hf.run(hf.RunConfig.preset("seq-mnist", method, buffer_size=200, **changes), device="cpu")
    tests = range(len(result.logits) // 2)
    logits, labels = (torch.cat([result.logits[f"{kind}.{task}"] for task in tests]) for kind in KINDS)
    recency = hf.analysis.recency(logits, [[2 * task, 2 * task + 1] for task in tests])
    return result, hf.analysis.calibration(logits, labels, bins), recency


def _table(matrix: Tensor) -> list[list[float | None]]:
    """Rows in percent; None where nothing was measured, as JSON has no NaN."""
    return [[None if isnan(value) else round(value, 2) for value in row] for row in matrix.tolist()]


def draw_matrices(numbers: Numbers) -> Figure:
    """The accuracy matrices side by side."""
    return draw_heatmaps(
        [
            Heatmap(name, name, 1, tuple(tuple(nan if v is None else v for v in row) for row in values["matrix"]))
            for name, values in numbers.items()
        ]
    )


def draw_trust(numbers: Numbers) -> Figure:
    """Left: how often answers of a given confidence are right. Right: how much belief each task's classes get."""
    figure, (reliability, belief) = _panels(2, width=9.2, height=3.7)
    reliability.plot([0, 100], [0, 100], color=INK["muted"], linewidth=0.8, linestyle=":")
    reliability.annotate("believable", (58, 62), rotation=36, fontsize=8.5, color=INK["muted"])
    shown = {name: numbers[name] for name in ("er", "linf") if name in numbers}
    for name, values in shown.items():
        style = METHODS[name]
        full = [place for place, count in enumerate(values["count"]) if count]
        x, y = ([100 * values[key][place] for place in full] for key in ("confidence", "correct"))
        label = f"{name}, error {values['ece']:.1f} %"
        reliability.plot(
            x,
            y,
            color=style.color,
            linestyle=style.dash,
            marker=style.marker,
            markersize=4.5,
            linewidth=1.6,
            label=label,
        )
    reliability.legend(frameon=False, fontsize=9, loc="upper left")
    reliability.set_xlim(0, 101)
    reliability.set_ylim(0, 101)
    reliability.set_xlabel("confidence (%)")
    reliability.set_ylabel("right (%)")
    reliability.set_title("How often is it right when it is sure?")
    for place, (name, values) in enumerate(shown.items()):
        style = METHODS[name]
        offsets = [task + 1 + (place - 0.5) * 0.38 for task in range(len(values["tasks"]))]
        hatch = None if place else "////"
        face = style.color if place else "none"
        shares = [100 * share for share in values["tasks"]]
        belief.bar(offsets, shares, 0.36, facecolor=face, edgecolor=style.color, hatch=hatch, linewidth=0.6, label=name)
    even = 100 / len(next(iter(shown.values()))["tasks"])
    belief.axhline(even, color=INK["muted"], linewidth=0.8, linestyle=":")
    belief.legend(frameon=False, fontsize=9, loc="upper left")
    belief.set_xlabel("task, in the order learned")
    belief.set_ylabel("average belief (%)")
    belief.set_title("Who gets the belief?")
    return figure


def compute_calibration(methods: tuple[str, ...] = ("er", *MEASURED), **changes: Any) -> Numbers:
    """Of every method: calibration error, confidence minus accuracy (both in percent), and recency gap.

    On digits two by two, from runs made here; on S-CIFAR-10, as analysed in the results folder.
    """
    (analysed,) = json.loads(ANALYSIS.read_text("utf-8"))["comparisons"]
    digits = {}
    for method in methods:
        _, found, recency = _run_digits(method, **changes)
        digits[method] = {"ece": round(found.ece, 2), "excess": _excess(vars(found)), "gap": round(recency.gap, 3)}
    pictures = {
        each["label"]: {
            "ece": round(each["ece"]["mean"], 2),
            "excess": _excess(each["calibration"]),
            "gap": round(each["recency_gap"]["mean"], 3),
        }
        for each in analysed["methods"]
    }
    return {"seq-cifar10": pictures, "seq-mnist": digits}


def _excess(found: dict[str, Any]) -> float:
    """Mean confidence minus accuracy, in points."""
    bins = zip(found["confidence"], found["accuracy"], found["count"], strict=True)
    return round(100 * sum((sure - right) * count for sure, right, count in bins) / sum(found["count"]), 2)


def draw_calibration(numbers: Numbers) -> Figure:
    """Bars, the largest error on top; replay alone is hatched."""
    figure, panels = _panels(2, width=9.2, height=3.9)
    for panel, (benchmark, errors) in zip(panels, numbers.items(), strict=True):
        order = sorted(errors, key=lambda method: float(errors[method]["ece"]))
        for place, method in enumerate(order):
            error, color = errors[method]["ece"], METHODS[method].color
            face, hatch = ("none", "////") if method == "er" else (color, None)
            panel.barh(place, error, 0.72, facecolor=face, edgecolor=color, hatch=hatch, linewidth=0.6)
            modest = ", too modest" if errors[method]["excess"] < 0 else ""
            panel.text(error, place, f" {error:.1f}{modest}", va="center", fontsize=8.5)
        panel.set_yticks(range(len(order)), order)
        panel.set_xlim(0, 1.32 * errors[order[-1]]["ece"])
        panel.set_xlabel("expected calibration error (%)")
        panel.set_title(benchmark)
    return figure


# --- a second opinion ---


def _found_by(script: str) -> Numbers:
    """The numbers that a script in benchmarks/ finds in the result files."""
    numbers: Numbers = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / script))["numbers"]()
    return numbers


def compute_how_sure() -> Numbers:
    """How Holdfast and a second implementation compare."""
    return _found_by("second_opinion.py")


def draw_how_sure(numbers: Numbers) -> Figure:
    """A dot for each run and a line for each mean: at the very last step, and over the last ten.

    A ring is a run whose last minibatch is uneven; of the second opinion and the authors' code nobody knows that.
    """
    figure, panels = _panels(2, width=9.2, height=3.3)
    names = {"authors": "authors' code", "second": "second opinion", "holdfast": "Holdfast"}
    looks = dict(zip(names, ("#7b8190", ER.color, LINF.color), strict=True))
    titles = {"last": "After the very last step", "tail": "Mean over the last ten steps"}
    for panel, (kind, title) in zip(panels, titles.items(), strict=True):
        for place, name in enumerate(reversed(names)):
            dots = numbers["points"][kind].get(name, [])
            rings = numbers["points"][kind].get("uneven", []) if name == "holdfast" else []
            runs = sorted([*((value, False) for value in dots), *((value, True) for value in rings)])
            for number, (value, ring) in enumerate(runs):
                look = {"markerfacecolor": "none", "markeredgewidth": 1.3} if ring else {"markeredgewidth": 0}
                height = place + 0.09 * (number % 5 - 2)
                panel.plot(value, height, "o", color=looks[name], markersize=4.5, alpha=0.75, **look)
            values = [*dots, *rings]
            if values:
                mean = fmean(values)
                panel.plot([mean, mean], [place - 0.36, place + 0.36], color=INK["ink"], linewidth=1.6)
            else:
                panel.text(67, place, "not recorded", va="center", ha="center", fontsize=9, color=INK["muted"])
        panel.set_yticks(range(len(names)), list(reversed(names.values())))
        panel.set_ylim(-0.6, len(names) - 0.4)
        panel.set_xlabel("accuracy (%)")
        panel.set_title(title)
    panels[1].set_yticklabels([])
    panels[1].set_xlim(62, 71)
    figure.subplots_adjust(left=0.16, wspace=0.08)
    return figure


# --- language models ---


def compute_language_models() -> Numbers:
    """What replay does for language models."""
    return _found_by("language_numbers.py")


def draw_language_models(numbers: Numbers) -> Figure:
    """The perplexity of each domain at the end over the size of the buffer; a small dot for each seed."""
    figure, panels = _panels(3, width=9.2, height=3.9)
    figure.subplots_adjust(wspace=0.3, bottom=0.25, top=0.91)
    arms, domains = numbers["arms"], numbers["settings"]["domains"]
    last = domains[-1]
    for panel, domain in zip(panels, domains, strict=True):
        for arm, method in (("plain", "sgd"), ("joint", "joint")):
            style, mean = METHODS[method], arms[arm][last][domain]["mean"]
            panel.axhline(mean, color=style.color, linestyle=style.dash, linewidth=1.3, label=LANGUAGE[arm])
        for place, method in enumerate(("replay", "kl", "mse", "linf")):
            style = ER if method == "replay" else METHODS[method]
            found = [arms[f"{method}-{size}"][last][domain] for size in LANGUAGE_BUFFERS]
            x = [number + 0.09 * (place - 1.5) for number in range(len(found))]
            panel.plot(x, [each["mean"] for each in found], label=LANGUAGE[method], **style.line())
            for at, each in zip(x, found, strict=True):
                values = each["values"]
                panel.plot([at] * len(values), values, ".", color=style.color, markersize=3.5, alpha=0.6)
        panel.set_yscale("log")
        ticks = [
            tick for tick in (*range(1, 11), 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000) if _within(panel, tick)
        ]
        panel.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xticks(range(len(LANGUAGE_BUFFERS)), [f"{size.replace('_', '.')} %" for size in LANGUAGE_BUFFERS])
        panel.set_xlabel("size of the buffer")
        panel.set_title(domain)
    panels[0].set_ylabel("perplexity at the end")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=9)
    return figure


def _within(panel: Axes, value: float) -> bool:
    low, high = panel.get_ylim()
    return low <= value <= high


# --- all of them ---

PICTURES: dict[str, tuple[Callable[[], Numbers], Callable[[Numbers], Figure]]] = {
    "reservoir": (compute_reservoir, draw_reservoir),
    "consistency": (compute_consistency, draw_consistency),
    "batchnorm": (compute_batchnorm, draw_batchnorm),
    "matrices": (compute_runs, draw_matrices),
    "trust": (compute_runs, draw_trust),
    "calibration": (compute_calibration, draw_calibration),
    "how-sure": (compute_how_sure, draw_how_sure),
    "language-models": (compute_language_models, draw_language_models),
}


def render(name: str, numbers: Numbers) -> bytes:
    """The SVG of a picture; the same numbers give the same bytes."""
    with mpl.rc_context(STYLE), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        PICTURES[name][1](numbers).savefig(path, metadata={"Date": None})
        return path.read_bytes()


def saved(name: str) -> Numbers:
    """The numbers behind a committed picture."""
    numbers: Numbers = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return numbers


def _panels(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), facecolor=INK["paper"])
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    figure.subplots_adjust(left=0.75 / width, right=1 - 0.15 / width, bottom=0.55 / height, top=1 - 0.35 / height)
    figure.subplots_adjust(wspace=0.24)
    return figure, panels


def _line(panel: Axes, x: list[float], y: list[float], style: Style, label: str, *, marks: bool = False) -> None:
    marker = style.marker if marks else ""
    panel.plot(x, y, color=style.color, linestyle=style.dash, linewidth=1.8, marker=marker, markersize=5)
    if marks:
        panel.text(x[-1] + 0.12, y[-1], label, color=style.color, va="center", fontsize=9.5)
    else:
        panel.annotate(
            label, (x[-1], y[-1]), (-4, 7), textcoords="offset points", color=style.color, ha="right", fontsize=9.5
        )


def for_a_phone(picture: Image.Image) -> Image.Image:
    """The left of the demo's two panels: as large on a narrow screen as both are on a wide one."""
    dark = np.asarray(picture.convert("L"))[80:].min(axis=0) < 250  # below the title
    middle = len(dark) // 2
    gap = next(column for column in range(middle, len(dark)) if not dark[column : column + 8].any())
    return picture.crop((0, 0, gap + 8, picture.height))


def main() -> None:
    """Compute, save and draw every picture."""
    for_a_phone(Image.open(DEMO)).save(DEMO.with_stem("demo-phone"))
    FOLDER.mkdir(exist_ok=True)
    computed: dict[Callable[[], Numbers], Numbers] = {}
    with torch.random.fork_rng():
        for name, (compute, _) in PICTURES.items():
            if compute not in computed:
                computed[compute] = compute()
            (FOLDER / f"{name}.json").write_text(json.dumps(computed[compute], indent=1) + "\n", "utf-8")
            (FOLDER / f"{name}.svg").write_bytes(render(name, saved(name)))
            print(f"{FOLDER / name}.svg")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
