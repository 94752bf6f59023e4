"""holdfast demo: the newcomer's minute, four methods on a shortened rot-mnist."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast import results
from holdfast.analysis.comparisons import comparisons
from holdfast.cli.app import Out, app
from holdfast.config import RunConfig
from holdfast.display import output, show_runs, steps_per_second, table, tell
from holdfast.report.charts import comparison_charts, score_charts
from holdfast.report.draw.canvas import save_figure
from holdfast.training import run

METHODS = ("sgd", "er", "l2", "mse")
BUFFER = 200
ABOUT = f"""sgd: stores nothing. er: stores {BUFFER} samples and replays them.
l2, mse: as er, and keep the answers to the stored samples consistent."""


@app.command("demo")
def demo_command(
    out: Out = Path("holdfast-demo"),
    seed: Annotated[int, typer.Option(help="Decides everything random.")] = 0,
    tasks: Annotated[int, typer.Option(help="Number of tasks.", min=1)] = 10,
    train_limit: Annotated[int, typer.Option(help="Training images per task.", min=1)] = 25_600,
) -> None:
    """Compare four methods on rotated digits, in a minute."""
    results.check_writable(out)
    tell(
        f"{tasks} tasks: MNIST, rotated by another angle in each. The network sees each image once.\n"
        "new, old: loss on new images and on stored ones. drift: how far the answers to stored ones have moved."
    )
    finished = []
    with show_runs() as watch:
        for method in METHODS:
            sizes = {"buffer_size": BUFFER, "tasks": tasks, "train_limit": train_limit}
            config = RunConfig.preset("rot-mnist", method, seed=seed, **sizes)
            result = run(config, device="cpu", on_step=watch(f"{method:>4}"))
            results.save(result, out)
            finished.append(result)
    rows = [
        (r.config.method, r.accuracy, float(r.matrix[-1].min()), r.forgetting, steps_per_second(r), r.seconds)
        for r in finished
    ]
    columns = ("method", "all tasks (%)", "worst task (%)", "forgetting", "steps/s", "seconds")
    output.print(table("Accuracy after the last task", columns, rows))
    tell(ABOUT, output)
    (comparison,) = comparisons(finished)
    chart = [*comparison_charts(comparison), *score_charts(comparison)][0]  # one task has no course, only scores
    figure = chart.draw(title=f"Rotated MNIST, {BUFFER} stored samples")
    tell(f"figure: {save_figure(figure, out / 'accuracy-over-tasks')}", output)
