"""Results -> tables, figures, one self-contained HTML page. Reads results only.

results = gather([Path("runs")])
markdown_table("table1", results)          # also latex_table
write_report(results, Path("report.html"))
"""

from holdfast.report.gather import gather, gather_analyses
from holdfast.report.tables import latex_table, markdown_table
from holdfast.report.writing import FORMATS, render_report, runs_with_logits, write_figures, write_report

__all__ = [
    "FORMATS",
    "gather",
    "gather_analyses",
    "latex_table",
    "markdown_table",
    "render_report",
    "runs_with_logits",
    "write_figures",
    "write_report",
]
