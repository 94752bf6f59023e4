"""The paper's tables and figures, each a grid of runs and how to read it.

    results = load_results(Path("runs"), Path("results"))     # by fingerprint; .skipped names what is no result
    table = assess(find_experiment("table2"), results)        # or seeds=range(3) for exactly those
    for group in table.groups:                                # 'no buffer', 'buffer 200', 'buffer 500'
        for row in table.rows(group):                         # methods
            for column in table.columns:                      # benchmarks
                verdict = table.at(group, row, column)        # None where the table has no cell
                verdict.mean, verdict.std, verdict.n          # ours; NaN where unknown
                verdict.published                             # Published(mean, std, source) or None
                verdict.difference, verdict.interval        # ours minus published
                verdict.status, verdict.reason              # agrees, differs, open, and why
                verdict.stored                                # the runs: .result (RunResult), .config, .path
    table.ranks                                               # Rank(group, column, tau, n)
    table.leans                                               # Lean(column, above, n, mean, low, high; .reason)
    table.sources                                             # which paper printed what, where it is another one
    table.derived                                             # column -> row -> number (overview's gains), or {}
    claims(table.verdicts)                                    # Claim(name, statement, checks, published; .outcome)
    trust([table])                                            # calibration and recency of the same runs, a Table

The accuracy matrices of a cell are `[stored.result.matrix for stored in verdict.stored]`. Measures (MEASURES) give a
label with the unit and the number of decimals.

An experiment of one's own: `register(Experiment(name, title, source, shows, cells))`.
"""

from holdfast.experiments import field, paper  # noqa: F401 - importing them registers their experiments
from holdfast.experiments.base import EXPERIMENTS, SEEDS, Cell, Experiment, find_experiment, register
from holdfast.experiments.measures import MEASURES, ROBUSTNESS, add_robustness, condensed, measure_robustness
from holdfast.experiments.published import Published, published
from holdfast.experiments.statistics import kendall_tau
from holdfast.experiments.stored import Results, Skipped, Stored, load_results
from holdfast.experiments.trust import trust
from holdfast.experiments.verdicts import JUDGED, Table, Verdict, assess, claims

__all__ = ["EXPERIMENTS", "JUDGED", "MEASURES", "ROBUSTNESS", "SEEDS", "Cell", "Experiment"]
__all__ += ["Published", "Results", "Skipped", "Stored", "Table", "Verdict", "add_robustness", "assess"]
__all__ += ["claims", "condensed", "find_experiment", "kendall_tau", "load_results", "measure_robustness"]
__all__ += ["published", "register", "trust"]
