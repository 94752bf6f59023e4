"""holdfast tune: good hyper-parameters for a method, found on a validation split."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from holdfast.cli.app import (
    BufferSize,
    DataRoot,
    Device,
    Epochs,
    Jobs,
    Json,
    Plugins,
    Seed,
    Settings,
    Tasks,
    app,
    import_plugins,
)
from holdfast.cli.run import make_config
from holdfast.display import Lines, output, table, tell
from holdfast.errors import HoldfastError
from holdfast.report.draw.canvas import save_figure
from holdfast.report.draw.tuning import draw_study
from holdfast.report.text import count
from holdfast.tuning import Study, Trial, Watch, import_optuna, preset_text, search_space, tune

VALIDATION = "validation=0.1"
SHOWN = 5  # trials in the table at the end


@app.command("tune")
def tune_command(
    benchmark: Annotated[str, typer.Argument(help="A benchmark; see 'holdfast list benchmarks'.")],
    method: Annotated[str, typer.Argument(help="A method; see 'holdfast list methods'.")],
    trials: Annotated[int, typer.Option(help="Trials of the study, those of earlier calls included.", min=1)] = 30,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="Range of lr, alpha, beta or another number to tune; may be repeated. Default: lr, alpha and beta, "
            "each from a tenth to ten times the preset.",
            metavar="NAME=LOW:HIGH",
        ),
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Leave this one as it is; may be repeated.", metavar="NAME")
    ] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of each task's training samples to test on. Default: 0.1.")
    ] = None,
    buffer_size: BufferSize = None,
    seed: Seed = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    set_: Settings = None,
    jobs: Jobs = None,
    device: Device = "auto",
    data: DataRoot = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the study.", metavar="DIR")] = Path("tuning"),
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Search good values of lr, alpha and beta on a validation split.

    Writes a figure of what mattered and the best values as a preset. A study that was stopped or killed is continued
    by the same command. Needs Optuna: the extra 'tune'.
    """
    import_optuna()
    import_plugins(plugin)
    given = {"buffer_size": buffer_size, "seed": seed, "tasks": tasks, "epochs": epochs, "validation": validation}
    said = validation is not None or any(each.partition("=")[0].strip() == "validation" for each in set_ or [])
    config = make_config(benchmark, method, given, [*(set_ or []), *([] if said else [VALIDATION])])
    space = search_space(config, over or [], fix or [])
    place: dict[str, Any] = {"jobs": jobs, "device": device, "data": data, "plugins": plugin or []}
    with _screen(trials) as watch:
        study = tune(config, space, out, trials=trials, watch=watch, **place)
    _conclude(study, out, trials, as_json)


@contextmanager
def _screen(trials: int) -> Iterator[Watch]:
    """A bar for the study and one for each run on standard error; a line for each trial that ended."""
    begun, best = 0, -1.0
    with Lines() as lines:
        whole = lines.add_task("trials", total=trials)

        def watch(trial: Trial, fraction: float) -> None:
            nonlocal begun, best
            title, begun, remark = f"trial {trial.number}", max(begun, trial.number + 1), ""
            if trial.state == "running":
                lines.move(title, fraction)
            else:
                lines.end(title)
            lines.update(whole, completed=begun - (len(lines.tasks) - 1))  # without those under way
            if trial.state == "running":
                return
            if trial.state == "complete" and trial.accuracy is not None and trial.accuracy > best:
                best, remark = trial.accuracy, ", the best of this call so far"
            values = " ".join(f"{name}={value:g}" for name, value in trial.values.items())
            reason = f": {trial.error}" if trial.error else ""
            tell(f"{title}: {_outcome(trial)}{remark}; {values}{reason}")

        yield watch


def _outcome(trial: Trial) -> str:
    if trial.accuracy is None:
        return "diverged" if trial.state == "pruned" else trial.state
    stopped = "" if trial.state == "complete" else f", {trial.state} after {trial.tasks} tasks"
    return f"{trial.accuracy:.2f} %{stopped}"


def _conclude(study: Study, out: Path, wanted: int, as_json: bool) -> None:
    """Write the figure and the preset, show the best trials, and exit with the code for how the study ended."""
    counts = {state: study.count(state) for state in ("complete", "pruned", "failed", "running")}
    if study.best is not None:
        figure = save_figure(draw_study(study), out / study.name).with_suffix(".svg")
        preset = out / f"{study.name}.toml"
        preset.write_text(preset_text(study, _command(sys.argv[1:])), encoding="utf-8")
        tell(f"the best values are in {preset}, what mattered in {figure}")
        for name in study.cramped:
            tell(f"the best {name} lies near an end of its range; try a wider one: --over {name}=LOW:HIGH")
    if as_json:
        best = study.best._asdict() if study.best else None
        print(json.dumps({"study": study.name, **counts, "best": best, "importance": study.importance}))
    elif study.complete:
        output.print(_summary(study))
    further = {"failed": counts["failed"], "under way": counts["running"], "left": wanted - sum(counts.values())}
    parts = [f"{count(counts['complete'], 'trial')} complete", f"{counts['pruned']} stopped early"]
    parts += [f"{number} {what}" for what, number in further.items() if number > 0]
    tell(", ".join(parts) + ("; the same command continues" if study.interrupted else ""))
    if study.interrupted:
        raise typer.Exit(130)
    errors = [trial.error for trial in study.trials if trial.state == "failed"]
    if errors and not study.complete:
        raise HoldfastError(f"no trial is complete. The last failure: {errors[-1]}")


def _command(words: list[str]) -> str:
    """The command line that a preset cites, without options that have no say in what a study finds."""
    kept, left = ["holdfast"], iter(words)
    for word in left:
        if word in ("--trials", "--jobs"):
            next(left, None)  # its value
        elif word != "--json" and not word.startswith(("--trials=", "--jobs=")):
            kept.append(word)
    return shlex.join(kept)


def _summary(study: Study) -> Group:
    order = sorted(study.complete, key=lambda trial: -(trial.accuracy or 0.0))[:SHOWN]
    if study.preset is not None and study.preset not in order:
        order.append(study.preset)
    names = [f"trial {trial.number}" + (" (preset)" if trial == study.preset else "") for trial in order]
    values = [[f"{trial.values[each.name]:g}" for each in study.space] for trial in order]
    rows = [(name, trial.accuracy, *each) for name, trial, each in zip(names, order, values, strict=True)]
    return table(study.name, ("", "accuracy (%)", *(each.name for each in study.space)), rows)
