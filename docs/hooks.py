"""What mkdocs asks for while it builds the site: what comes from the program and from files, and links that leave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import typer.main
from mkdocs.structure.files import File

from holdfast.analysis import Estimate
from holdfast.analysis.findings import Summary, read_findings
from holdfast.cli import app
from holdfast.experiments import EXPERIMENTS, Results, Verdict, assess
from holdfast.report import gather, markdown_table

DOCS = Path(__file__).resolve().parent
BEYOND = DOCS.parent / "results" / "beyond"
TABLE = re.compile(r"<!-- (\w+) -->")
CANDIDATES = re.compile(r"<!-- candidates: (\w+ \d+) -->")
LANGUAGE = re.compile(r"<!-- language: (\w+) -->")
FINDINGS = re.compile(r"<!-- findings: (\S+) -->")
OUTSIDE = re.compile(r"(\[[^\]]*\]\()((?:\.\./)+results/[^)]+\.svg)\)")
SPACE = "\u00a0"  # a space at which no line ends
NUMBER = re.compile(r"\{\{([\w.-]+)(?::([\w.,+%]+))?\}\}")


GROWTH = {
    "average for evaluation, adjusted once": "-weight_decay0.0-strength1.0-hold_features0.0-teacher0.9995-turn0.0",
    "adjusted thrice, with features held and weight decay": "-turn0.0",
    "with turned images as well": "",
}
"""Sets of settings of `ballast`, as the names of result files have them."""


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, and the figures that were drawn of results: called by mkdocs once."""
    for figure in sorted((DOCS.parent / "results").rglob("*.svg")):
        files.append(File.generated(config, str(figure.relative_to(DOCS.parent)), abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page as it is built: called by mkdocs for every page."""
    markdown = TABLE.sub(lambda match: TABLES[match[1]]() if match[1] in TABLES else match[0], markdown)
    markdown = CANDIDATES.sub(lambda match: candidates(match[1]), markdown)
    markdown = LANGUAGE.sub(lambda match: language(match[1]), markdown)
    markdown = FINDINGS.sub(lambda match: findings(DOCS.parent / match[1]), markdown)
    # Of a figure beside the results, the path is one folder shorter in the site than in the repository.
    markdown = OUTSIDE.sub(lambda match: f"{match[1]}{match[2].removeprefix('../')})", markdown)
    markdown = NUMBER.sub(lambda match: number(match[1], match[2] or ".1f"), markdown)
    return without_links_outside(markdown, DOCS / page.file.src_uri)


def number(name: str, form: str = ".1f") -> str:
    """A number in that form: `trust.er.ece` is in trust.json, which is beside its picture or in this folder."""
    file, *keys = name.split(".")
    path = DOCS / "pictures" / f"{file}.json"
    value = json.loads((path if path.exists() else DOCS / path.name).read_text("utf-8"))
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return f"{value:{form}}".replace("-", "−")


def field() -> str:
    """The accuracies of the field that results/ has, with the published ones beside them."""
    return markdown_table("field", gather([DOCS.parent / "results"]), missing=False)


def sources() -> str:
    """Which paper printed which number of the field, a line per source."""
    return "\n".join([*(f"- {source}" for source in assess(EXPERIMENTS["field"], Results()).sources), ""])


def chaos() -> str:
    """What `make chaos` did last, and how often a program ended as if nothing had happened, a row per program."""
    programs = {
        "run": "`holdfast run --resume`",
        "processes": "`holdfast reproduce`, processes",
        "ray": "`holdfast reproduce`, Ray",
        "folder": "a learner with its buffer in a folder",
        "memory": "a learner with its buffer in memory",
        "estimator": "an estimator with its buffer in a folder",
    }
    found = json.loads((DOCS / "chaos.json").read_text("utf-8"))
    names = ("rounds", "kills", "stops", "full_disks", "removed_folders", "damaged_files", "refused", "equal")
    lines = [f"| | {' | '.join(name.replace('_', ' ') for name in names)} |", f"|---|{len(names) * '---:|'}"]
    for kind, title in programs.items():
        if kind in found:
            lines += [f"| {title} | {' | '.join(str(found[kind][name]) for name in names)} |"]
    return "\n".join([*lines, ""])


def parallel() -> str:
    """What benchmarks/data_parallel.py found: accuracy by network and method, as on one GPU and on several."""
    lines = ["| | 1 GPU | 2 GPUs | 4 GPUs |", "|---|---:|---:|---:|"]
    for (network, epochs, method), cells in parallel_runs().items():
        title = (
            f"{'whole' if network == 'resnet18' else 'narrow'} network, {epochs} epoch{'s' * (epochs > 1)}, {method}"
        )
        lines += [f"| {title} | {' | '.join(_spread(cells[gpus]) if gpus in cells else '' for gpus in (1, 2, 4))} |"]
    return "\n".join([*lines, ""])


def parallel_runs() -> dict[tuple[str, int, str], dict[int, list[float]]]:
    """The accuracies by network, epochs and method, then by number of GPUs."""
    found: dict[tuple[str, int, str], dict[int, list[float]]] = {}
    path = DOCS.parent / "results" / "second-opinion" / "data-parallel.jsonl"
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        network, gpus = re.fullmatch(r"(.*?)(?:-(\d)-gpus)?", row["model"]).groups()  # type: ignore[union-attr]
        found.setdefault((network, row["epochs"], row["method"]), {})[int(gpus or 1)] = row["accuracies"]
    return found


def candidates(which: str) -> str:
    """What benchmarks/beyond.py found with a network and so many epochs a task: a row per candidate, the best first."""
    network, epochs = which.split()
    rows = _lines("candidates.jsonl")
    return _candidates(row for row in rows if (row["network"], row["epochs"]) == (network, int(epochs)))


def few() -> str:
    """The same for a narrow network and a tenth of the images."""
    return _candidates(_lines("few.jsonl"))


def _candidates(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| candidate | runs | accuracy (%) | on the first four tasks | on the last |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        values, tasks = row["accuracies"], row["last"]
        cells = ["the loss became infinite", "", ""]
        if values:
            old, new = fmean(value for each in tasks for value in each[:-1]), fmean(each[-1] for each in tasks)
            cells = [_spread(values), f"{old:.1f}", f"{new:.1f}"]
        lines += [f"| {row['candidate']} | {len(values)} | {' | '.join(cells)} |"]
    return "\n".join([*lines, ""])


def full() -> str:
    """The accuracies on S-CIFAR-10 at full length of `ballast` and of the methods that it builds on."""
    chosen = ["benchmark=seq-cifar10", "metric=accuracy", *(f"buffer_size={size}" for size in (200, 500))]
    chosen += [f"method={method}" for method in ("er", "er-ace", "mse", "clser", "ballast")]
    experiment = replace(EXPERIMENTS["field"].select(chosen), caveat="")
    return markdown_table(experiment, gather([DOCS.parent / "results"]))


def growth() -> str:
    """The accuracies of `ballast` on S-CIFAR-10 at full length with each of the sets of settings it has had."""
    lines = ["| | buffer 200 | buffer 500 |", "|---|---:|---:|"]
    for title, runs in GROWTH.items():
        cells = ([fmean(row) for row in last_rows("ballast", size, runs)] for size in (200, 500))
        lines += [f"| {title} | {' | '.join(f'{_spread(values)} ({len(values)})' for values in cells)} |"]
    return "\n".join([*lines, ""])


def witnesses() -> str:
    """What other papers published for S-CIFAR-10 beside ours, a row per method and buffer that was run."""
    verdicts = witness_verdicts()
    lines = ["| | buffer | seeds | Class-IL | published | difference | Task-IL | published | difference |"]
    lines += [f"|---|{8 * '---:|'}"]
    for (method, size, metric), verdict in verdicts.items():
        if metric == "accuracy":
            both = (verdict, verdicts.get((method, size, "task_il_accuracy")))
            cells = " | ".join(_beside(each) for each in both)
            lines += [f"| {method} | {size or 'none'} | {verdict.n} | {cells} |"]
    return "\n".join([*lines, ""])


def witness_verdicts() -> dict[tuple[str, int | None, str], Verdict]:
    """The cells of S-CIFAR-10 that were run and that another paper published, by method, buffer and metric."""
    experiment = EXPERIMENTS["field"].select(["benchmark=seq-cifar10"])
    return {
        (each.cell.row, each.cell.config.buffer_size, each.cell.metric): each
        for each in assess(experiment, gather([DOCS.parent / "results"])).verdicts
        if each.n and each.published is not None and each.published.source
    }


def _beside(verdict: Verdict | None) -> str:
    """Three cells: ours, published, and the difference; empty where there is no such number."""
    if verdict is None or verdict.published is None:
        return " |  | "
    published, difference = verdict.published, round(verdict.difference, 1) + 0.0  # no -0.0
    return f"{verdict.mean:.1f} | {published.mean:.1f} ± {published.std:.1f} | {difference:+.1f}".replace("-", "−")


def turning() -> str:
    """Accuracy of `ballast` on MNIST-360 with different settings, a row each, a column per buffer."""
    rows = _lines("mnist-360.jsonl")
    lines = ["| | buffer 200 | buffer 500 |", "|---|---:|---:|"]
    for idea in dict.fromkeys(row["idea"] for row in rows):
        cells = (_spread(row["accuracies"]) for row in rows if row["idea"] == idea)
        lines += [f"| {idea} | {' | '.join(cells)} |"]
    return "\n".join([*lines, ""])


def regularizers() -> str:
    """Accuracy on seq-mnist with the average as target: a row per regularizer, a column per weight, the best first.

    All weights with the first seed; the last column has the best of them with all seeds.
    """
    rows: dict[str, dict[float, list[float]]] = {}
    for row in _lines("regularizers.jsonl"):
        settings = row["settings"]
        rows.setdefault(settings.get("regularizer", "mse"), {})[settings["beta"]] = row["accuracies"]
    betas = sorted(next(iter(rows.values())))
    lines = [f"| | {' | '.join(f'{beta:g}' for beta in betas)} | best, three seeds |", f"|---|{6 * '---:|'}"]
    chosen = {name: max(cells.values(), key=len) for name, cells in rows.items()}
    for name in sorted(chosen, key=lambda name: -fmean(chosen[name])):
        cells = " | ".join(f"{rows[name][beta][0]:.1f}" for beta in betas)
        lines += [f"| {name} | {cells} | {_spread(chosen[name])} |"]
    return "\n".join([*lines, ""])


def tasks() -> str:
    """Accuracy on each task at the end, of mse and `ballast` on S-CIFAR-10 at full length."""
    lines = ["| | buffer | seeds | task 1 | task 2 | task 3 | task 4 | task 5 |", f"|---|{7 * '---:|'}"]
    for size in (200, 500):
        for method in ("mse", "ballast"):
            rows = last_rows(method, size)
            means = " | ".join(f"{fmean(column):.1f}" for column in zip(*rows, strict=True))
            lines += [f"| {method} | {size} | {len(rows)} | {means} |"]
    return "\n".join([*lines, ""])


def last_rows(method: str, size: int, settings: str = "") -> list[list[float]]:
    """The accuracy on each task at the end of every S-CIFAR-10 run of a method; files are named for other settings."""
    files = sorted((DOCS.parent / "results" / "seq-cifar10").glob(f"{method}-{size}-seed?{settings}.json"))
    return [json.loads(path.read_text("utf-8"))["accuracy_matrix"][-1] for path in files]


def lag() -> str:
    """Accuracy on seq-mnist over how much of a task the average remembers, a row per share, a column per idea."""
    rows, ideas = _lines("lag.jsonl"), {"": "neither", "adjusted=True": "adjusted", "asymmetric=True": "asymmetric"}
    lines = [f"| share of a task | {' | '.join(ideas.values())} |", f"|---|{len(ideas) * '---:|'}"]
    for share in sorted({row["share"] for row in rows}):
        cells = []
        for idea in ideas:
            runs = [row for row in rows if (row["share"], row["idea"]) == (share, idea)]
            last = fmean(row["last"][-1] for row in runs)
            cells += [f"{_spread([row['accuracy'] for row in runs])}; {last:.0f}"]
        lines += [f"| {share} | {' | '.join(cells)} |"]
    return "\n".join([*lines, ""])


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BEYOND / name).read_text("utf-8").splitlines()]


def _spread(values: list[float]) -> str:
    """Mean and standard deviation, if there are several."""
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def agreement() -> str:
    """How closely two programs for S-CIFAR-10 agree, a row per measure, as benchmarks/second_opinion.py found."""
    found = json.loads((DOCS / "pictures" / "how-sure.json").read_text("utf-8"))["measures"]
    titles = {
        "tail": "accuracy, mean of the last 10 steps",
        "last": "accuracy at the last step",
        "before": "accuracy one step before",
        "task_tail": "Task-IL, mean of the last 10 steps",
        "task_last": "Task-IL at the last step",
    }
    lines = ["| | Holdfast | second opinion | difference, 90 % interval | p (Welch; ranks) | within 1 | within 2 |"]
    lines += ["|---|---:|---:|---:|---:|---|---|"]
    for name, title in titles.items():
        each = found[name]
        ours, theirs = (f"{each[code]['mean']:.2f} ± {each[code]['sd']:.2f}" for code in ("holdfast", "second"))
        low, high = each["interval90"]
        apart = f"{each['difference']:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")
        chance = f"{each['welch_p']:.3f}; {each['mann_whitney_p']:.3f}"
        sure = " | ".join("yes" if inside else "open" for inside in each["equivalent"].values())
        lines += [f"| {title} | {ours} | {theirs} | {apart} | {chance} | {sure} |"]
    return "\n".join([*lines, ""])


def beside() -> str:
    """What benchmarks/authors_code.py found, a row per method."""
    found = json.loads((DOCS / "pictures" / "how-sure.json").read_text("utf-8"))["beside"]["methods"]
    columns = ["images a task", "epochs", "steps", "equal steps", "usual error (millionths)", "largest"]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{len(columns) * '---:|'}"]
    for method, each in found.items():
        cells = [each[name] for name in ("images", "epochs", "steps", "equal_steps", "median_error", "largest_error")]
        lines += [f"| {method} | {' | '.join(f'{cell:,.0f}' for cell in cells)} |"]
    return "\n".join([*lines, ""])


def language(kind: str) -> str:
    """A table of what benchmarks/language_numbers.py found: perplexity, lora, pairs, texts or cost."""
    found = json.loads((DOCS / "pictures" / "language-models.json").read_text("utf-8"))
    made = {
        "perplexity": lambda: _perplexities(found, [name for name in found["arms"] if not name.startswith("lora-")]),
        "lora": lambda: _perplexities(found, [name for name in found["arms"] if name.startswith("lora-")]),
        "pairs": lambda: _pairs(found),
        "texts": lambda: _both_texts(found),
        "cost": lambda: _cost(found),
    }
    return "\n".join([*made[kind](), ""])


def _perplexities(found: dict[str, Any], names: list[str]) -> list[str]:
    """A row per method and buffer: the perplexity of each domain that was learned, after each stage."""
    domains = found["settings"]["domains"]
    shown = [(stage, domain) for number, stage in enumerate(domains) for domain in domains[: number + 1]]
    lines = [f"| | {' | '.join(f'{domain} after {stage}' for stage, domain in shown)} |"]
    lines += [f"|---|{len(shown) * '---:|'}"]
    for name in sorted(names, key=_arm_order):
        arm = found["arms"][name]
        cells = [f"{arm[stage][domain]['mean']:,.0f} ± {arm[stage][domain]['sd']:,.0f}" for stage, domain in shown]
        lines += [f"| {_arm_title(name)} | {' | '.join(cells)} |"]
    return lines


def _arm_order(name: str) -> tuple[float, int]:
    method, _, size = name.removeprefix("lora-").partition("-")
    return float(size.replace("_", ".") or 0), ("plain", "joint", "replay", "kl", "mse", "linf").index(method)


def _arm_title(name: str) -> str:
    method, _, size = name.removeprefix("lora-").partition("-")
    title = "replay alone" if method == "replay" else method
    return f"{title}, {size.replace('_', '.')}{SPACE}%" if size else title


def _pairs(found: dict[str, Any]) -> list[str]:
    """A row per regularizer and buffer: its perplexity at the end by that of replay alone, of the same seeds."""
    columns = [*found["settings"]["domains"], "all"]
    lines = [f"| | {' | '.join([*columns[:-1], 'all three'])} |", f"|---|{len(columns) * '---:|'}"]
    for name in sorted(found["pairs"], key=lambda name: (name.startswith("lora-"), *_arm_order(name))):
        title = _arm_title(name) + (", LoRA" if name.startswith("lora-") else "")
        for other, pair in found["pairs"][name].items():
            if "replay-" in other:
                lines += [f"| {title} | {' | '.join(_ratio(pair[column]) for column in columns)} |"]
    return lines


def _both_texts(found: dict[str, Any]) -> list[str]:
    """The same ratios without LoRA, and beside each that of the earlier runs with other texts."""
    domains = found["settings"]["domains"]
    lines = [f"| | {' | '.join(f'{name} | other texts' for name in domains)} |", f"|---|{2 * len(domains) * '---:|'}"]
    named = [name for name in found["pairs"] if not name.startswith(("lora-", "replay-"))]
    for name in sorted(named, key=_arm_order):
        for other, pair in found["pairs"][name].items():
            cells = [
                _ratio(each[domain]) for domain in domains for each in (pair, found["earlier"]["pairs"][name][other])
            ]
            lines += [f"| {_arm_title(name)} | {' | '.join(cells)} |"]
    return lines


def _ratio(pair: dict[str, Any]) -> str:
    """A ratio and its interval; in bold if the whole interval lies on one side of 1."""
    low, high = pair["interval"]
    ratio = f"{pair['ratio']:.2f}" if pair["clear"] == "open" else f"**{pair['ratio']:.2f}**"
    return f"{ratio} ({low:.2f} to {high:.2f})"


def _cost(found: dict[str, Any]) -> list[str]:
    """A row per method: the time of a step alone and under load, memory, and bytes of a stored sample."""
    many = f"{found['settings']['workers']} at once"
    columns = ["a step alone", "beside plain", many, "beside plain", "peak memory", "beside plain", "a stored sample"]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{len(columns) * '---:|'}"]
    for name, each in found["speed"].items():
        load, arm = found["load"][name], found["arms"].get(f"{name}-2")
        stored = f"{arm['buffer_bytes'] / arm['buffer_size'] / 1000:.1f}{SPACE}KB" if arm else ""
        cells = [f"{1000 * each['seconds_per_step']:.1f}{SPACE}ms", f"{each['seconds_per_step_ratio']:.2f}"]
        cells += [f"{1000 * load['seconds_per_step']:.0f}{SPACE}ms", f"{load['ratio']:.2f}"]
        cells += [f"{each['peak_memory_bytes'] / 1e9:.2f}{SPACE}GB", f"{each['peak_memory_bytes_ratio']:.2f}", stored]
        lines += [f"| {_arm_title(name)} | {' | '.join(cells)} |"]
    return lines


def trainer() -> str:
    """What benchmarks/trainer_overhead.py found on a GPU: the time of a step, and that time by the Trainer's."""
    titles = {
        "Trainer": "`Trainer`",
        "nothing": "`ReplayTrainer`, samples stored and none drawn",
        "quarter": "`ReplayTrainer`, a quarter drawn",
    }
    lines = ["| | a step | beside `Trainer` | shortest steps |", "|---|---:|---:|---:|"]
    steps = json.loads((DOCS / "trainer-h200.json").read_text("utf-8"))["steps"]
    for kind, title in titles.items():
        each = steps[kind]
        ratios = f"{each['ratio']:.2f} | {each['least_ratio']:.2f}"
        lines += [f"| {title} | {1000 * each['seconds']:.1f}{SPACE}ms | {ratios} |"]
    return "\n".join([*lines, ""])


def findings(path: Path) -> str:
    """What `holdfast analyze` found, as tables: a row per method, then the paper's claims."""
    lines = []
    for found in read_findings(path):
        corrupted = any(one.mra for one in found.summaries)
        columns = ["seeds", "accuracy (%)", "calibration error (%)", "recency gap"]
        columns += ["accuracy on corrupted (%)"] * corrupted
        lines += [f"| method | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        lines += [*(_method(one, corrupted) for one in found.summaries), ""]
        if found.claims:
            lines += ["| claim | | |", "|---|---|---|"]
            lines += [f"| {claim.statement} | {claim.outcome} | {claim.detail} |" for claim in found.claims]
    return "\n".join([*lines, ""])


def _method(summary: Summary, corrupted: bool) -> str:
    numbers = [_mean(summary.accuracy, 1), _mean(summary.ece, 1), _mean(summary.recency_gap, 2)]
    numbers += [_mean(summary.mra, 1)] * corrupted
    return f"| {summary.label} | {len(summary.seeds)} | {' | '.join(numbers)} |"


def _mean(estimate: Estimate | None, digits: int) -> str:
    return "" if estimate is None else f"{estimate.mean:.{digits}f}"


def overhead() -> str:
    """What benchmarks/observe_overhead.py printed, as a table."""
    _, *lines = (DOCS / "bench-observe.txt").read_text("utf-8").splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines]
    table = ["| network | method | `observe` | by hand | ratio |", "|---|---|---:|---:|---:|"]
    return "\n".join([*table, *(f"| {' | '.join(row)} |" for row in rows), ""])


def rates() -> str:
    """A complete `holdfast bench --device cuda`, a row per benchmark and method: all runs together, alone to eight."""
    lines = ["| | alone | 2 runs | 4 runs | 8 runs | TFLOP/s | of the peak |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, found in _rates("bench-h200.json").items():
        together = " | ".join(f"{each['steps_per_second']:,.0f}" for each in found)
        best = max(found, key=lambda each: each["tflops"])
        lines += [f"| {name} | {together} | {best['tflops']:.0f} | {100 * best['peak_share']:.1f} % |"]
    return "\n".join([*lines, ""])


def gains() -> str:
    """Two complete measurements of one machine, the first version and this one: rates, their ratios, and the starts."""
    before, after = _rates("bench-h200-before.json"), _rates("bench-h200.json")
    lines = ["| | alone | 2 runs | 4 runs | 8 runs | first start |", "|---|---:|---:|---:|---:|---:|"]
    for name, found in after.items():
        pairs = [
            (old["steps_per_second"], new["steps_per_second"]) for old, new in zip(before[name], found, strict=True)
        ]
        cells = [f"{old:,.0f} to {new:,.0f}, {new / old:.2f}" for old, new in pairs]
        ready = [each[name][0]["ready_seconds"] for each in (before, after)]
        lines += [f"| {name} | {' | '.join(cells)} | {ready[0]:.1f} to {ready[1]:.1f}{SPACE}s |"]
    return "\n".join([*lines, ""])


def starts() -> str:
    """The stages of seq-cifar10 runs until their steps have their full speed, with and without compiled code."""
    found = json.loads((DOCS / "bench-h200-start.json").read_text("utf-8"))
    kinds = [found[kind] for kind in ("cold", "warm", "other")]
    titles = {
        "import torch": "PyTorch is imported",
        "import holdfast": "Holdfast is imported",
        "step 1": "the untrained network was tested; first step",
        "step 2": "first step with stored samples",
        "step 8": "first step with a full buffer, which is compiled",
    }
    rest = [sum(time for name, time in each["stages"].items() if name not in titles) for each in kinds]
    rows = [(title, [each["stages"][name] for each in kinds]) for name, title in titles.items()]
    rows += [("all else", rest), ("**together**", [each["seconds"] for each in kinds])]
    rows += [("without imports", [each["without_imports"] for each in kinds])]
    lines = ["| | `mse`, nothing compiled | `mse`, next process | `er`, then |", "|---|---:|---:|---:|"]
    lines += [f"| {title} | {' | '.join(f'{time:.1f} s' for time in times)} |" for title, times in rows]
    return "\n".join([*lines, ""])


def turns() -> str:
    """Three versions that took turns on one GPU: a row per version, both readings of each rate, and until the start."""
    lines = (DOCS / "bench-h200-turns.jsonl").read_text("utf-8").splitlines()
    readings = [each for each in map(json.loads, lines) if each["benchmark"] == "seq-cifar10"]
    table = ["| version | mse alone | mse, 4 runs | er alone | er, 4 runs | start: mse | then er |"]
    table += [f"|---|{6 * '---:|'}"]
    for version in ("cbcf1e6", "f9a4136", "27b4ce9"):
        own = [each for each in readings if each["version"] == version]
        cells = []
        for method, runs in (("mse", 1), ("mse", 4), ("er", 1), ("er", 4)):
            found = [
                each for each in own if each["what"] == "turns" and (each["method"], each["runs"]) == (method, runs)
            ]
            cells += [", ".join(f"{each['steps_per_second']:.0f}" for each in found)]
        cells += [f"{each['ready_seconds']['1']:.0f}{SPACE}s" for each in own if each["what"].startswith("cold")]
        table += [f"| {version} | {' | '.join(cells)} |"]
    return "\n".join([*table, ""])


def _rates(file: str) -> dict[str, list[dict[str, Any]]]:
    """What `holdfast bench --json` printed, by benchmark and method, from one run to eight."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads((DOCS / file).read_text("utf-8"))["device_rates"]:
        found.setdefault(f"{each['benchmark']} {each['method']}", []).append(each)
    return found


def without_links_outside(markdown: str, path: Path) -> str:
    """Links to files of the repository that are no part of the site, such as results, become plain text."""

    def keep(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        return match[0] if target.is_relative_to(DOCS) else match[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", keep, markdown)


def commands() -> str:
    """The command line in Markdown, from the program itself."""
    found = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group's
    return "\n".join(_command(name, command) for name, command in sorted(found.items()))


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"holdfast {name}")
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    lines = [f"## holdfast {name}", "", *_paragraphs(command.help), "```text", usage, "```", ""]
    arguments, options = ([p for p in command.params if p.param_type_name == kind] for kind in ("argument", "option"))
    if arguments:
        lines += ["| argument | |", "|---|---|"]
        lines += [f"| `{p.metavar or p.name.upper()}` | {_text(p.help)} |" for p in arguments]
        lines.append("")
    lines += ["| option | | default |", "|---|---|---|"]
    lines += [f"| {_names(p)} | {_text(p.help)} | {_default(p)} |" for p in options]
    return "\n".join([*lines, ""])


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    shown = option.default is not None and not (option.is_flag or option.multiple or callable(option.default))
    return f"`{option.default}`" if shown else ""


def _paragraphs(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (_text(part), "")]


def _text(text: str | None) -> str:
    """One line, with what Markdown would take for markup left as it is."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


TABLES = {
    "agreement": agreement,
    "beside": beside,
    "chaos": chaos,
    "commands": commands,
    "few": few,
    "field": field,
    "full": full,
    "growth": growth,
    "gains": gains,
    "lag": lag,
    "overhead": overhead,
    "parallel": parallel,
    "rates": rates,
    "regularizers": regularizers,
    "sources": sources,
    "starts": starts,
    "tasks": tasks,
    "trainer": trainer,
    "turning": turning,
    "turns": turns,
    "witnesses": witnesses,
}
"""What makes the tables that pages ask for by name."""
