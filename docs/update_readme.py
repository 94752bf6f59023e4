"""Write the results table of the README anew from the files under results/: `make readme`."""

from pathlib import Path

from holdfast.report import gather, markdown_table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"


def with_results(readme: str) -> str:
    """The README's text with the table between its marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = markdown_table("table1", gather([ROOT / "results"]))
    return f"{before}{BEGIN}\n{tables.strip()}\n\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_results(path.read_text("utf-8")), "utf-8")
