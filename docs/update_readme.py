"""Write the results tables of the README anew from results/, and its speeds from speed.json: `make readme`."""

import json
from pathlib import Path
from textwrap import fill

from holdfast.analysis.comparisons import REPLAY
from holdfast.experiments import EXPERIMENTS, Results
from holdfast.report import gather, markdown_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"
SPEED = """On one core of a server, a complete R-MNIST run (mse, 20 tasks, {cpu_steps:,} steps, all evaluations) takes
{cpu_seconds:.0f} s: {cpu_ratio:.2f} times the bare matrix products of its steps. Two runs at once on two cores lose
{cpu_lost:.0f} % each. Peak memory is {cpu_memory:.0f} MB. On an H200 the same run takes {gpu_mnist_seconds:.1f} s, and
all eleven methods with three seeds take {gpu_column_seconds:.0f} s; an S-CIFAR-10 run makes {gpu_alone:.0f} steps per
second, {gpu_runs:.0f} runs together {gpu_together:.0f}, where the authors' code makes {gpu_authors:.0f}.
"""
FIELD = """### The field
The methods of other papers in the same laboratory; mse is DER++. [What each stores and costs](docs/concepts/field.md).
ballast is [our own](docs/concepts/beyond.md): it needs no task boundaries and one draw a step.
"""


def with_results(readme: str, folder: Path = ROOT / "results") -> str:
    """The README's text with the tables between its marks replaced by those of the results in `folder`."""
    results = gather([folder])
    return between(readme, BEGIN, END, f"{markdown_table('table1', results)}\n{field(results)}")


def with_speeds(readme: str) -> str:
    """The README's text with the speeds between its marks replaced by those of speed.json."""
    told = json.loads((ROOT / "docs" / "speed.json").read_text("utf-8"))
    return between(
        readme, BEGIN.replace("results", "speed"), END.replace("results", "speed"), fill(SPEED.format(**told), 118)
    )


def between(text: str, begin: str, end: str, made: str) -> str:
    """The text with `made` between two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{made.strip()}\n\n{end}{after}"


def field(results: Results) -> str:
    """The accuracies of the field that have results; empty while those are of the paper's own methods only."""
    experiment = EXPERIMENTS["field"].select(["metric=accuracy"])
    if not any(results.seeds_of(cell.config) for cell in experiment.cells if cell.config.method not in REPLAY):
        return ""
    return f"{FIELD}\n{markdown_table(experiment, results, missing=False)}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_speeds(with_results(path.read_text("utf-8"))), "utf-8")
