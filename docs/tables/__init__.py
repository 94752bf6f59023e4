"""The tables of README and pages, each made from result files, measurements or the program itself.

A page asks for one by the name it has here: `make numbers` writes it between `<!-- lag:begin -->` and
`<!-- lag:end -->`. Words behind the name are arguments: `<!-- candidates narrow 1:begin -->`.
"""

from collections.abc import Callable

from tables.agreement import agreement, beside, parallel, seeds, teachers
from tables.beyond import candidates, few, full, growth, lag, many, regularizers, tasks, turning
from tables.commands import commands
from tables.language import language, trainer
from tables.papers import field, results, sources, witnesses
from tables.speed import gains, overhead, peers, rates, speed, starts, turns
from tables.trust import chaos, findings

TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (
        *(results, field, sources, witnesses),
        *(agreement, beside, parallel, seeds, teachers),
        *(candidates, few, full, growth, lag, many, regularizers, tasks, turning),
        *(language, trainer),
        *(speed, gains, overhead, peers, rates, starts, turns),
        *(chaos, findings, commands),
    )
}
