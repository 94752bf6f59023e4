"""holdfast run: one run, and its result."""

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group

from holdfast import checkpoint, results
from holdfast import data as datasets
from holdfast.benchmarks import BENCHMARKS, Benchmark, make_benchmark
from holdfast.cli.app import (
    BufferSize,
    DataRoot,
    Device,
    Epochs,
    Json,
    Out,
    Plugins,
    Seed,
    Settings,
    Tasks,
    app,
    import_plugins,
)
from holdfast.config import RunConfig
from holdfast.devices import choose_device, lacks_bfloat16
from holdfast.display import data_progress, output, show_runs, steps_per_second, table, tell
from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import MEASURES
from holdfast.learners import method_names, settings_for
from holdfast.loggers import check_targets, open_logger, watch
from holdfast.methods import canonical
from holdfast.registry import unknown_name
from holdfast.report.text import duration
from holdfast.results import FROM_MATRICES
from holdfast.sweep.runner import checkpoint_path
from holdfast.training import Progress, run
from holdfast.workload import expected_seconds

__all__ = ["make_config"]

MOST_THREADS = 1024  # PyTorch crashes where the system has no room for so many
LONG = 300
"""Seconds; a run that may take longer is announced."""


@app.command("run")
def run_command(
    benchmark: Annotated[str, typer.Argument(help="A benchmark; see 'holdfast list benchmarks'.")],
    method: Annotated[str, typer.Argument(help="A method; see 'holdfast list methods'.")],
    buffer_size: BufferSize = None,
    seed: Seed = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    set_: Settings = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(help="CPU threads. Default: as many as the network prefers.", min=1, max=MOST_THREADS)
    ] = None,
    data: DataRoot = None,
    out: Out = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Run even if the result is there already.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Save the state now and then, and continue from it.")
    ] = False,
    checkpoint_every: Annotated[
        float, typer.Option(help="Seconds between checkpoints.", min=0, metavar="SECONDS")
    ] = 60.0,
    log: Annotated[
        list[str] | None,
        typer.Option("--log", help="tensorboard:DIR, wandb:PROJECT or mlflow:DIR; may be repeated.", metavar="WHERE"),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Train one method on one benchmark and save the result."""
    import_plugins(plugin)
    check_targets(log or [])
    given = {"buffer_size": buffer_size, "seed": seed, "tasks": tasks, "epochs": epochs, "precision": precision}
    config = make_config(benchmark, method, given, set_ or [])
    target, state = choose_device(device), checkpoint_path(out, config)
    found = None if force else results.find(out, config)
    if found is not None:
        safe = True
        tell(f"already in {out / config.fingerprint}; --force runs it again")
    else:
        results.check_writable(out)
        _announce(config, target, state, resume)
        with data_progress():
            stream = make_benchmark(config, datasets.data_root(data), target)
        how: dict[str, Any] = {"device": device, "threads": threads, "every": checkpoint_every}
        found = _carry_out(config, stream, log or [], state if resume else None, how)
        safe = _save(found, out)
    if safe:
        checkpoint.discard(state)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        output.print(_summary(found))
    if not safe:
        raise typer.Exit(1)


def _announce(config: RunConfig, target: torch.device, state: Path, resume: bool) -> None:
    """Say what to know before training begins."""
    if state.exists():
        tell(f"continuing from {state}" if resume else f"{state} has the state of this run: --resume continues it")
    if (expected := expected_seconds(config, target.type) or 0) > LONG:
        where = "one core of a server" if target.type == "cpu" else "a large GPU"
        tell(f"this run takes about {duration(expected)} on {where}" + ("" if resume else "; see --resume"))
    if config.precision == "bfloat16" and lacks_bfloat16(target):
        tell(
            "this processor has no instructions for bfloat16: a step of a ResNet may take ten times as long as "
            "with --precision float32, which is another run with numbers of its own"
        )


def make_config(benchmark: str, method: str, given: dict[str, Any], settings: list[str]) -> RunConfig:
    """The preset, changed by the options that are not None and by --set; a setting that is named twice is refused."""
    BENCHMARKS[benchmark]  # an unknown name raises an error
    if canonical(method) not in method_names():
        raise unknown_name("method", method, method_names())
    given = {name: value for name, value in given.items() if value is not None}
    named: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        first = f"--{key.replace('_', '-')}" if key in given else named.get(key)
        if first is not None:
            raise UsageError(f"{first} and --set {setting} say the same setting: give one of them.")
        named[key] = f"--set {setting}"
    preset = RunConfig.preset(benchmark, method, **{"buffer_size": 200, "seed": 0, **given})
    config = preset.parse(settings, settings_for(preset))
    if "buffer_size" in given and config.buffer_size is None:
        raise UsageError(f"method '{method}' stores no samples: leave out --buffer-size.")
    return config


def _carry_out(
    config: RunConfig, stream: Benchmark, log: list[str], state: Path | None, how: dict[str, Any]
) -> results.RunResult:
    """The run, shown and logged; Ctrl-C ends the command and says how to continue the run, which writes its `state`."""
    try:
        with _watching(config, log) as on_step:
            return run(config, stream, on_step=on_step, checkpoint=state, **how)
    except KeyboardInterrupt as stop:
        again = f"holdfast {shlex.join(sys.argv[1:])}"
        tell(str(stop) or f"stopped. Nothing of this run is saved. One that can be continued: {again} --resume")
        if state is not None and state.exists():
            tell(f"To continue: {again}")
        raise typer.Exit(130) from None


def _save(result: results.RunResult, out: Path) -> bool:
    """Save the result in `out`, or else where there is room, and say where; False if it is not in `out`."""
    try:
        tell(f"saved to {results.save(result, out)}")
        return True
    except HoldfastError as error:
        tell(f"error: {error}")
    for place in (tempfile.gettempdir, Path.home):
        with suppress(HoldfastError, OSError, RuntimeError):  # not every user has a home
            folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=place()))
            try:
                tell(f"saved to {results.save(result, folder)} instead; move it to {out}")
                return False
            finally:
                with suppress(OSError):
                    folder.rmdir()  # only if nothing could be saved there
    tell("the result could not be saved anywhere; these are its numbers:")
    return False


@contextmanager
def _watching(config: RunConfig, targets: list[str]) -> Iterator[Callable[[Progress], object]]:
    """A callback that shows a run and logs it; raises before training if a target of --log cannot be written to."""
    name = f"{config.benchmark}-{config.method}-{config.fingerprint}"
    with ExitStack() as opened, show_runs() as line:
        made = [opened.enter_context(open_logger(each, name=name, config=config.to_dict())) for each in targets]
        watchers: list[Callable[[Progress], object]] = [line(config.title), *map(watch, made)]
        yield lambda progress: [each(progress) for each in watchers]


def _summary(result: results.RunResult) -> Group:
    # Where tasks share their classes, Task-IL is the same number as the accuracy; elsewhere, forward transfer means
    # nothing.
    left_out = "task_il_accuracy" if result.shares_classes else "forward_transfer"
    rows = [(MEASURES[name].label, getattr(result, name)) for name in FROM_MATRICES if name != left_out]
    rows += [("steps/s", steps_per_second(result)), ("seconds", result.seconds)]
    return table(result.config.title, ("", ""), rows)
