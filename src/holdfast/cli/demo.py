"""holdfast demo: the newcomer's minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast import demo, results
from holdfast.cli.app import Out, Seed, app
from holdfast.display import RunDisplay, errors, output, table
from holdfast.training import run

__all__: list[str] = []


@app.command("demo")
def demo_command(
    out: Out = Path("holdfast-demo"),
    seed: Seed = 0,
    tasks: Annotated[int, typer.Option(help="Number of tasks.", min=1)] = 10,
    train_limit: Annotated[int, typer.Option(help="Training images per task.", min=1)] = 25_600,
) -> None:
    """Compare four methods on a short stream of turning digits, in about a minute."""
    results.check_writable(out)
    errors.print(f"{tasks} tasks, each MNIST turned by another angle; the network sees each once.", highlight=False)
    finished = []
    with RunDisplay() as display:
        for config in demo.configs(tasks=tasks, train_limit=train_limit, seed=seed):
            result = run(config, device="cpu", on_step=display.watch(f"{config.method:>4}"))
            results.save(result, out)
            finished.append(result)
    rows = [
        (r.config.method, r.accuracy, float(r.matrix[-1].min()), r.forgetting, r.timing["steps_per_second"], r.seconds)
        for r in finished
    ]
    columns = ("method", "all tasks (%)", "worst task (%)", "forgetting", "steps/s", "seconds")
    output.print(table("Accuracy after the last task", columns, rows))
    output.print("sgd stores no samples; er replays 200; l2 and mse also keep its answers on them consistent.")
    output.print(f"picture: {demo.draw(finished, out)}", highlight=False)
