"""Write the results tables of the README anew from the files under results/: `make readme`."""

from pathlib import Path

from holdfast.experiments import EXPERIMENTS, Results
from holdfast.experiments.tables import REPLAY
from holdfast.report import gather, markdown_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"
FIELD = """### The field
The methods of other papers in the same laboratory; mse is DER++. [What each stores and costs](docs/concepts/field.md).
"""


def with_results(readme: str, folder: Path = ROOT / "results") -> str:
    """The README's text with the tables between its marks replaced by those of the results in `folder`."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    results = gather([folder])
    tables = f"{markdown_table('table1', results)}\n{field(results)}"
    return f"{before}{BEGIN}\n{tables.strip()}\n\n{END}{after}"


def field(results: Results) -> str:
    """The accuracies of the field that have results; empty while those are of the paper's own methods only."""
    experiment = EXPERIMENTS["field"].select(["metric=accuracy"])
    if not any(results.seeds_of(cell.config) for cell in experiment.cells if cell.config.method not in REPLAY):
        return ""
    return f"{FIELD}\n{markdown_table(experiment, results, missing=False)}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_results(path.read_text("utf-8")), "utf-8")
