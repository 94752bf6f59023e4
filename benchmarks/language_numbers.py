"""What the runs of benchmarks/language.py show: every number of the page "Replay for language models".

    python benchmarks/language_numbers.py                         # prints them as JSON, from results/language/
    python benchmarks/language_numbers.py --pack build/language   # first puts new runs there, one line each
    python benchmarks/language_numbers.py --add build/language    # the same beside those that are there

Methods are compared by pairs of runs with the same seed, which begin with the same weights and see the same samples in
the same order. A ratio is the perplexity of a method by that of the other, geometric mean over seeds, with the 95 %
interval of Student's t distribution.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "language"
REGULARIZERS = ("kl", "mse", "linf")
BUFFERS = (0.5, 2.0, 5.0)
OWN = ("method", "buffer", "buffer_size", "beta", "seed", "lora")
"""Settings in which runs differ; the others are the same for all and stored once."""

Record = dict[str, Any]


# --- compact files ---------------------------------------------------------------------------------------------------


def pack(folder: Path, data: Path, out: Path = FOLDER) -> None:
    """Write what language.py left as lines of JSON; what all runs share becomes one line."""
    runs = _left_by_language(folder)
    tuning, speed = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("tuning", "speed"))
    with np.load(data) as file:
        about = json.loads(str(file["about"]))
    settings = _shared(runs) | {"data": about, "chosen": tuning["chosen"], "workers": tuning["workers"]}
    trials = _shared(tuning["trials"])
    differs = {name: trials[name] for name in trials if trials[name] != settings[name]}
    _write(out / "settings.jsonl", [settings | {"tuning": differs}])
    _write(out / "runs.jsonl", sorted((_line(run) for run in runs), key=_order))
    _write(out / "tuning.jsonl", sorted((_line(run) for run in tuning["trials"]), key=_order))
    measured = {"buffer": speed["run"]["buffer"], "buffer_steps": speed["run"]["steps"]}
    _write(out / "speed.jsonl", [_without(each, "about") | measured for each in speed["alone"]])


def add(folder: Path, out: Path = FOLDER) -> None:
    """Put what `language.py --add-to` left beside the runs that are there; it has compared the domains already."""
    runs = _left_by_language(folder)
    (settings,), known = read("settings", out), read("runs", out)
    if any(settings[name] != value for name, value in _rounded(_shared(runs)).items()):
        raise SystemExit(f"the runs differ from those of {out} in settings, versions or devices.")
    lines = {_order(line): line for line in [*known, *map(_line, runs)]}
    _write(out / "runs.jsonl", [lines[key] for key in sorted(lines)])


def _left_by_language(folder: Path) -> list[Record]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*-seed*.json"))]


def _shared(runs: list[Record]) -> Record:
    """What is the same in all of them. The other settings are written with each run."""
    same = ("domains", "parameters", "about")
    shared = [_without(run["run"], *OWN, "name") | {key: run[key] for key in same} for run in runs]
    if any(each != shared[0] for each in shared):
        raise SystemExit("the runs differ in settings, versions or devices: pack those of one call of language.py.")
    return shared[0]


def _line(run: Record) -> Record:
    own = {name: run["run"][name] for name in OWN}
    return own | _without(run, "run", "domains", "parameters", "about")


def _without(record: Record, *names: str) -> Record:
    return {name: value for name, value in record.items() if name not in names}


def _order(run: Record) -> tuple[Any, ...]:
    return run["lora"], run["method"], run["buffer"], run["beta"], run["seed"]


def _rounded(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _write(path: Path, records: list[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_rounded(record), separators=(",", ":")) for record in records]
    path.write_text("\n".join([*lines, ""]), "utf-8")


def read(name: str, folder: Path = FOLDER) -> list[Record]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]


# --- what they show --------------------------------------------------------------------------------------------------


def numbers(folder: Path = FOLDER) -> dict[str, Any]:
    (settings,), arms = read("settings", folder), _runs_by_arm(folder)
    (texts,), before = read("settings", folder / "earlier"), _runs_by_arm(folder / "earlier")
    stages = ("start", *settings["domains"])
    made = {
        "settings": settings | _counted(settings),
        "arms": {name: _arm(seeds, stages, settings["domains"]) for name, seeds in arms.items()},
        "pairs": _compared(arms, settings["domains"]),
        "earlier": {"data": texts["data"], "pairs": _compared(before, settings["domains"])},
        "speed": _beside(read("speed", folder), "method", "plain", ("seconds_per_step", "peak_memory_bytes")),
    }
    made["load"] = _load(made["arms"], 3 * settings["steps"])
    made["clear"] = _clear(made["pairs"], settings["domains"])
    rounded: dict[str, Any] = _rounded(made)
    return rounded


def _runs_by_arm(folder: Path) -> dict[str, dict[int, Record]]:
    """The runs of each method and buffer, by seed."""
    arms: dict[str, dict[int, Record]] = {}
    for run in read("runs", folder):
        arms.setdefault(arm_name(run["method"], run["buffer"], run["lora"]), {})[run["seed"]] = run
    return arms


def _compared(arms: dict[str, dict[int, Record]], domains: list[str]) -> Record:
    """What was asked about pairs of arms, answered."""
    return {
        name: {other: _pair(arms[name], arms[other], domains) for other in others}
        for name, others in _questions(arms).items()
    }


def arm_name(method: str, buffer: float = 0.0, lora: bool = False) -> str:
    """As in `mse-0_5` or `lora-plain`; pages separate the parts of a number's name by dots, so that it has none."""
    size = f"-{buffer:g}".replace(".", "_") if buffer else ""
    return f"{'lora-' if lora else ''}{method}{size}"


def _counted(settings: Record) -> Record:
    samples, tokens = settings["steps"] * settings["batch"], settings["steps"] * settings["batch"] * settings["length"]
    domains = settings["data"]["domains"].values()
    return {
        "stage_samples": samples,
        "stage_tokens": tokens,
        "all_tokens": 3 * tokens,
        "million_parameters": settings["parameters"] / 1e6,
        "stage_share": samples / min(each["train_samples"] for each in domains),
    }


def _arm(seeds: dict[int, Record], stages: tuple[str, ...], domains: list[str]) -> Record:
    """Mean, standard deviation and values of the perplexity of each domain after each stage."""
    matrix = np.array([seeds[seed]["perplexity"] for seed in sorted(seeds)])
    first = next(iter(seeds.values()))
    return {
        "beta": first["beta"],
        "buffer_size": first["buffer_size"],
        "buffer_bytes": first["buffer_bytes"],
        "trained_parameters": first["trained_parameters"],
        "seconds": float(np.mean([sum(run["seconds"]) for run in seeds.values()])),
        **{
            stage: {name: _describe(matrix[:, row, column]) for column, name in enumerate(domains)}
            for row, stage in enumerate(stages)
        },
    }


def _describe(values: np.ndarray) -> Record:
    return {"mean": float(values.mean()), "sd": float(values.std(ddof=1)), "values": values.tolist()}


def _questions(arms: dict[str, Any]) -> dict[str, list[str]]:
    """Which arm is compared with which: regularizers with replay alone, replay with plain and joint."""
    asked: dict[str, list[str]] = {}
    for lora in (False, True):
        for buffer in BUFFERS:
            replay, plain = arm_name("replay", buffer, lora), arm_name("plain", lora=lora)
            if replay in arms:
                asked[replay] = [plain] if lora else [plain, "joint"]
                asked |= {arm_name(each, buffer, lora): [replay] for each in REGULARIZERS}
    asked["lora-plain"] = ["plain"]
    return asked


def _pair(ours: dict[int, Record], theirs: dict[int, Record], domains: list[str]) -> Record:
    """Ratios of the perplexities at the end, by domain, and of their geometric means ("all")."""
    shared = sorted(ours.keys() & theirs.keys())
    logs = np.log([[run[seed]["perplexity"][-1] for seed in shared] for run in (ours, theirs)])
    apart = logs[0] - logs[1]
    return {
        name: compare(values) for name, values in [*zip(domains, apart.T, strict=True), ("all", apart.mean(axis=1))]
    }


def compare(logs: np.ndarray) -> Record:
    """The ratio that differences of logarithms stand for, and whether it lies clearly on one side of 1."""
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    low, high = math.exp(logs.mean() - half), math.exp(logs.mean() + half)
    return {
        "ratio": math.exp(logs.mean()),
        "interval": [low, high],
        "lower": int((logs < 0).sum()),
        "seeds": len(logs),
        "clear": "lower" if high < 1 else "higher" if low > 1 else "open",
    }


def _clear(pairs: Record, domains: list[str]) -> Record:
    """How many comparisons of a regularizer with replay alone, by domain, are clear; and how many chance would give."""
    found = [
        pair[domain]["clear"]
        for name, others in pairs.items()
        for other, pair in others.items()
        for domain in domains
        if "replay-" in other
    ]
    return {"comparisons": len(found), "by_chance": 0.05 * len(found)} | {
        kind: found.count(kind) for kind in ("lower", "higher", "open")
    }


def _beside(records: list[Record], key: str, base: str, measures: tuple[str, ...]) -> Record:
    """The records by name, with the ratio of each measure to that of `base`."""
    by_name = {each[key]: each for each in records}
    return {
        name: each | {f"{measure}_ratio": each[measure] / by_name[base][measure] for measure in measures}
        for name, each in by_name.items()
    }


def _load(arms: Record, steps: int) -> Record:
    """Seconds of a step while several processes shared the GPU, mean over all full runs of a method."""
    methods = {"plain": ["plain"]} | {
        method: [arm_name(method, buffer) for buffer in BUFFERS] for method in ("replay", *REGULARIZERS)
    }
    seconds = {name: float(np.mean([arms[arm]["seconds"] for arm in each])) / steps for name, each in methods.items()}
    return {name: {"seconds_per_step": each, "ratio": each / seconds["plain"]} for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, help="the folder that language.py wrote")
    parser.add_argument("--add", type=Path, help="the folder that language.py --add-to wrote")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "domains.npz", help="what domains.py wrote")
    arguments = parser.parse_args()
    if arguments.pack is not None:
        pack(arguments.pack, arguments.data)
    if arguments.add is not None:
        add(arguments.add)
    print(json.dumps(numbers(), indent=1))


if __name__ == "__main__":
    main()
