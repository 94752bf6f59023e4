import csv
import io
import re

import pytest

from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import EXPERIMENTS, assess, load_results
from holdfast.report import latex_table, markdown_table, render_report
from holdfast.report.tables import cell_numbers

from .conftest import PAPER, paper_run, run


def test_markdown_has_ours_beside_the_published(stored):
    lines = markdown_table("table1", stored(*PAPER)).splitlines()
    assert "**buffer 200**" in lines
    assert "**buffer 500**" not in lines  # nothing there yet
    heading = lines[lines.index("**buffer 200**") + 2]
    assert heading == "|  | mnist-360 | published |"
    assert "| er | 52.00 ± 1.00 (3) ? | 51.76 ± 2.19 |" in lines
    assert "| l2 | 62.00 ± 0.10 (3) ✓ | 61.68 ± 1.17 |" in lines
    assert "| mse | 80.00 ± 1.00 (3) ✗ | 59.04 ± 1.69 |" in lines
    assert "| l1 | – | 57.28 ± 2.04 |" in lines
    assert "| sgd | 21.00 (1) ? | 21.09 ± 0.21 |" in lines


def test_a_collapsed_run_does_not_make_a_cell_agree(stored):
    runs = [paper_run("dino", value, seed) for seed, value in enumerate((5.0, 50.0, 5.0))]
    table = assess(EXPERIMENTS["table1"], stored(*runs))
    (verdict,) = [v for v in table.verdicts if v.n]
    assert verdict.interval[0] < 0 < verdict.interval[1]  # the spread of 26 alone would decide nothing
    assert verdict.status == "differs"
    assert "scatter" in verdict.reason
    assert "✗" in markdown_table("table1", stored())


def test_numbers_of_other_papers_come_with_their_source_and_a_caveat(stored):
    results = stored(*(paper_run("der", value, seed, benchmark="rot-mnist") for seed, value in enumerate((90, 91))))
    text = markdown_table("field", results)
    assert "| der | 90.50 ± 0.71 (2) ? | 90.04 ± 2.61 |" in text
    assert "| er | – | 85.01 ± 1.90 |" in text
    assert text.splitlines()[-1].startswith("Other papers ran other code")
    assert "| er |" not in markdown_table("field", results, missing=False)
    rows = csv.DictReader(io.StringIO(render_report(results, "csv", "field")))
    (row,) = [row for row in rows if row["n"] == "2"]
    assert row["source"].startswith("Buzzega et al. 2020 (DER), Table 2")
    page = render_report(results, "html")
    assert re.search(r'<td class="published" data-value="90.04" title="Buzzega et al. 2020 \(DER\), Table 2', page)
    assert "Published numbers of clser on " in page


def test_damaged_logits_end_no_table(stored, tmp_path):
    good, bad = (paper_run("er", 55.0, seed, 500, "seq-cifar10") for seed in (0, 1))
    stored(good, bad)
    (tmp_path / "results" / bad.config.fingerprint / "logits.safetensors").write_bytes(b"rubbish")
    results = load_results(tmp_path / "results")
    for write in (markdown_table, latex_table):
        write("calibration", results)
        assert "55.00" in write("task-performance", results)
    ((path, _),) = results.skipped
    assert path.name == "logits.safetensors"


def test_latex_compiles_in_principle(stored):
    text = latex_table(EXPERIMENTS["table1"], stored(*PAPER))
    assert r"l2 & 62.00 $\pm$ 0.10 (3) $\checkmark$ & 61.68 $\pm$ 1.17 \\" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert "±" not in text
    assert "✓" not in text


def test_csv_holds_every_cell(stored):
    table = assess(EXPERIMENTS["table1"], stored(*PAPER))
    rows = list(csv.DictReader(io.StringIO(cell_numbers([table]).csv())))
    assert len(rows) == len(table.verdicts)
    (er,) = [r for r in rows if (r["row"], r["column"], r["group"]) == ("er", "mnist-360", "buffer 200")]
    assert (er["mean"], er["std"], er["n"], er["published_mean"], er["status"]) == ("52", "1", "3", "51.76", "open")


def test_reports_of_several_formats(stored):
    results = stored(*PAPER)
    assert render_report(results, "markdown").startswith("## Accuracy of ER")
    assert render_report(results, "latex").startswith("% Accuracy of ER")
    assert render_report(results, "csv").startswith("experiment,group,row")
    assert "No result of alpha yet" in render_report(results, "markdown", "alpha")
    with pytest.raises(UsageError, match="unknown format 'pdf'"):
        render_report(results, "pdf")
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        render_report(results, "markdown", "tabel1")


def test_runs_outside_the_paper_are_csv_rows_and_no_tables(stored):
    results = stored(run("er", 80.0))
    (row,) = csv.DictReader(io.StringIO(render_report(results, "csv")))
    assert (row["benchmark"], row["accuracy"], row["torch"]) == ("toy", "80", "2.13.0")
    with pytest.raises(HoldfastError, match="no experiment of the paper has results here"):
        render_report(results, "markdown")
