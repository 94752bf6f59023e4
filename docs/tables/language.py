"""Tables of the page "Replay for language models"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables.common import SPACE, measured, table


def language(kind: str) -> str:
    """A table of what benchmarks/language_numbers.py found: perplexity, lora, pairs, texts or cost."""
    found = measured("language-models")
    names = {lora: [name for name in found["arms"] if name.startswith("lora-") == lora] for lora in (False, True)}
    made: dict[str, Callable[[], str]] = {
        "perplexity": lambda: _perplexities(found, names[False]),
        "lora": lambda: _perplexities(found, names[True]),
        "pairs": lambda: _pairs(found),
        "texts": lambda: _both_texts(found),
        "cost": lambda: _cost(found),
    }
    return made[kind]()


def _perplexities(found: dict[str, Any], names: list[str]) -> str:
    """A row per method and buffer: the perplexity of each domain that was learned, after each stage."""
    domains, rows = found["settings"]["domains"], []
    shown = [(stage, domain) for number, stage in enumerate(domains) for domain in domains[: number + 1]]
    for name in sorted(names, key=_arm_order):
        arm = found["arms"][name]
        cells = [f"{arm[stage][domain]['mean']:,.0f} ± {arm[stage][domain]['sd']:,.0f}" for stage, domain in shown]
        rows.append([_arm_title(name), *cells])
    return table(["", *(f"{domain} after {stage}" for stage, domain in shown)], rows)


def _arm_order(name: str) -> tuple[float, int]:
    method, _, size = name.removeprefix("lora-").partition("-")
    return float(size.replace("_", ".") or 0), ("plain", "joint", "replay", "kl", "mse", "linf").index(method)


def _arm_title(name: str) -> str:
    method, _, size = name.removeprefix("lora-").partition("-")
    title = "replay alone" if method == "replay" else method
    return f"{title}, {size.replace('_', '.')}{SPACE}%" if size else title


def _pairs(found: dict[str, Any]) -> str:
    """A row per regularizer and buffer: its perplexity at the end by that of replay alone, of the same seeds."""
    domains, rows = found["settings"]["domains"], []
    for name in sorted(found["pairs"], key=lambda name: (name.startswith("lora-"), *_arm_order(name))):
        title = _arm_title(name) + (", LoRA" if name.startswith("lora-") else "")
        for other, pair in found["pairs"][name].items():
            if "replay-" in other:
                rows.append([title, *(_ratio(pair[column]) for column in (*domains, "all"))])
    return table(["", *domains, "all three"], rows)


def _both_texts(found: dict[str, Any]) -> str:
    """The same ratios without LoRA, and beside each that of the earlier runs with other texts."""
    domains, rows = found["settings"]["domains"], []
    named = [name for name in found["pairs"] if not name.startswith(("lora-", "replay-"))]
    for name in sorted(named, key=_arm_order):
        for other, pair in found["pairs"][name].items():
            both = (pair, found["earlier"]["pairs"][name][other])
            rows.append([_arm_title(name), *(_ratio(each[domain]) for domain in domains for each in both)])
    return table(["", *(head for name in domains for head in (name, "other texts"))], rows)


def _ratio(pair: dict[str, Any]) -> str:
    """A ratio and its interval; in bold if the whole interval lies on one side of 1."""
    low, high = pair["interval"]
    ratio = f"{pair['ratio']:.2f}" if pair["clear"] == "open" else f"**{pair['ratio']:.2f}**"
    return f"{ratio} ({low:.2f} to {high:.2f})"


def _cost(found: dict[str, Any]) -> str:
    """A row per method: the time of a step alone and under load, memory, and bytes of a stored sample."""
    many, rows = f"{found['settings']['workers']} at once", []
    heads = ["a step alone", "beside plain", many, "beside plain", "peak memory", "beside plain", "a stored sample"]
    for name, each in found["speed"].items():
        load, arm = found["load"][name], found["arms"].get(f"{name}-2")
        stored = f"{arm['buffer_bytes'] / arm['buffer_size'] / 1000:.1f}{SPACE}KB" if arm else ""
        cells = [f"{1000 * each['seconds_per_step']:.1f}{SPACE}ms", f"{each['seconds_per_step_ratio']:.2f}"]
        cells += [f"{1000 * load['seconds_per_step']:.0f}{SPACE}ms", f"{load['ratio']:.2f}"]
        cells += [f"{each['peak_memory_bytes'] / 1e9:.2f}{SPACE}GB", f"{each['peak_memory_bytes_ratio']:.2f}", stored]
        rows.append([_arm_title(name), *cells])
    return table(["", *heads], rows)


def trainer() -> str:
    """What benchmarks/trainer_overhead.py found on a GPU: the time of a step, and that time by the Trainer's."""
    titles = {
        "Trainer": "`Trainer`",
        "nothing": "`ReplayTrainer`, samples stored and none drawn",
        "quarter": "`ReplayTrainer`, a quarter drawn",
    }
    rows = []
    for kind, title in titles.items():
        each = measured("trainer-h200")["steps"][kind]
        time = f"{1000 * each['seconds']:.1f}{SPACE}ms"
        rows.append([title, time, f"{each['ratio']:.2f}", f"{each['least_ratio']:.2f}"])
    return table(["", "a step", "beside `Trainer`", "shortest steps"], rows)
