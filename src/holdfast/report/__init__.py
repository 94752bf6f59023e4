"""Results -> tables, figures, one self-contained HTML page. Reads results only.

results = gather([Path("runs")])
markdown_table("table1", results)          # also latex_table
write_report(results, Path("report.html"))
"""

from holdfast.report.render import (
    FORMATS,
    analyze_alike,
    gather,
    gather_analyses,
    render_report,
    write_figures,
    write_report,
    write_table_figures,
)
from holdfast.report.tables import latex_table, markdown_table

__all__ = [
    "FORMATS",
    "analyze_alike",
    "gather",
    "gather_analyses",
    "latex_table",
    "markdown_table",
    "render_report",
    "write_figures",
    "write_report",
    "write_table_figures",
]
