"""holdfast demo: the newcomer's minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast import demo, results
from holdfast.cli.app import Out, Seed, app
from holdfast.display import output, show_runs, table, tell
from holdfast.training import run

ABOUT = """sgd: stores nothing. er: stores 200 samples and replays them.
l2, mse: as er, and keep the answers to the stored samples consistent."""


@app.command("demo")
def demo_command(
    out: Out = Path("holdfast-demo"),
    seed: Seed = 0,
    tasks: Annotated[int, typer.Option(help="Number of tasks.", min=1)] = 10,
    train_limit: Annotated[int, typer.Option(help="Training images per task.", min=1)] = 25_600,
) -> None:
    """Compare four methods on rotated digits, in a minute."""
    results.check_writable(out)
    tell(f"{tasks} tasks: MNIST, rotated by another angle in each. The network sees each image once.")
    finished = []
    with show_runs() as watch:
        for config in demo.configs(tasks=tasks, train_limit=train_limit, seed=seed):
            result = run(config, device="cpu", on_step=watch(f"{config.method:>4}"))
            results.save(result, out)
            finished.append(result)
    rows = [
        (r.config.method, r.accuracy, float(r.matrix[-1].min()), r.forgetting, r.timing["steps_per_second"], r.seconds)
        for r in finished
    ]
    columns = ("method", "all tasks (%)", "worst task (%)", "forgetting", "steps/s", "seconds")
    output.print(table("Accuracy after the last task", columns, rows))
    tell(ABOUT, output)
    tell(f"figure: {demo.draw(finished, out)}", output)
