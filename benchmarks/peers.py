"""The same experiment in Holdfast, Mammoth and Avalanche, timed in turns on one CPU core of one machine.

    git clone https://github.com/aimagelab/mammoth
    pip install avalanche-lib torchvision
    python benchmarks/peers.py --mammoth mammoth --avalanche --out docs/bench-peers.json

R-MNIST with DER++ (`mse` here, `derpp` in Mammoth, `DER` with a beta in Avalanche): one epoch a task, minibatches and
replay of 128, a buffer of 200, a network of 784-100-100-10, plain SGD, and a test of all tasks seen after each. Each
program has its own data pipeline, buffer, loop and tests, as its users get them. Avalanche's DER differs in one way:
it draws one minibatch from its buffer where the others draw two, and stores samples and logits at the end of a task.

A run is a process of its own, from its start to its end: CPU seconds are user and system time of the process and of
its data loader's workers. A turn is Holdfast and Mammoth, then Holdfast and Avalanche; a ratio is a program's seconds
over Holdfast's in the same turn. Other programs on the machine disturb CPU seconds far less than wall seconds.

Linux only. With --python, the other programs run in another environment than Holdfast; it needs the same PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import importlib.metadata
import io
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ABOUT = (
    "Each reading is one process from its start to its end, on one core and one thread. Trust CPU seconds (user and "
    "system, with data loader workers): other programs on the machine, of which its load tells, lengthen wall seconds. "
    "A ratio is a program's seconds over the mean of Holdfast's in the same turn; low and high are the extremes over "
    "the turns. after_imports leaves out the CPU seconds of importing libraries."
)
LEFT_OUT = (
    "Mammoth: progress bars, checkpoints and Weights & Biases off; its log of results stays on, as it does not run "
    "without; two threads made one; a stand-in for open_clip, whose model it would load at each start for other data "
    "sets. Avalanche: loggers off, tests of the tasks seen only, in minibatches of 128 for 1, images not normalised."
)
AVALANCHE_LR = 0.03
"""With 0.1, the learning rate of the others, one run of three ended at 11 %. It does not change the time of a step."""
MARK = "reading: "
"""What a child's last line begins with; the programs print lines of their own."""
TOLD = re.compile(r"Accuracy for (\d+) task\(s\):\s*\[Domain-IL\]: ([\d.]+) %")
"""How Mammoth tells the mean accuracy over the tasks seen."""
CLOCKS = ("cpu", "wall", "after_imports")
Reading = dict[str, Any]
Settings = dict[str, Any]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def holdfast(settings: Settings) -> Reading:
    """One run of Holdfast, in this process."""
    import torch

    import holdfast as hf

    torch.set_num_threads(1)
    imports, seed = cpu_seconds(), settings["seed"]
    config = hf.RunConfig.preset("rot-mnist", "mse", buffer_size=settings["buffer_size"], seed=seed)
    result = hf.run(config.change(tasks=settings["tasks"]), threads=1, device="cpu")
    steps = round(result.timing["steps_per_second"] * result.timing["training"])
    versions = {key: result.environment[key] for key in ("holdfast", "commit", "torch", "numpy")}
    return {"imports": imports, "steps": steps, "accuracy": result.accuracy, "versions": versions}


def mammoth(settings: Settings) -> Reading:
    """One run of the Mammoth that is in the folder settings["mammoth"]."""
    # Some of its data sets load a CLIP model of 600 MB when they are imported, and all are.
    clip = types.ModuleType("open_clip")
    clip.create_model_and_transforms = lambda *_, **__: (None,) * 3  # type: ignore[attr-defined]
    sys.modules["open_clip"] = clip
    clone = Path(settings["mammoth"])
    sys.path.insert(0, str(clone))
    program = importlib.import_module("main")
    importlib.import_module("utils.training")
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)  # importing it set two
    imports = cpu_seconds()
    steps: list[None] = []
    register_optimizer_step_post_hook(lambda *_: steps.append(None))
    sys.argv = ["main.py", *mammoth_arguments(settings)]
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(io.StringIO()):
        program.main()
    versions = {"commit": commit(clone), **installed("torch", "torchvision")}
    accuracy = heard_accuracy(heard.getvalue(), settings["tasks"])
    return {"imports": imports, "steps": len(steps), "accuracy": accuracy, "versions": versions}


def mammoth_arguments(settings: Settings) -> list[str]:
    """What its command line is told. Its alpha is the weight of the old logits, its beta that of the labels."""
    told = {"dataset": "rot-mnist", "model": "derpp", "seed": settings["seed"], "stop_after": settings["tasks"]}
    told |= {"lr": settings["lr"], "alpha": settings["beta"], "beta": settings["alpha"]}
    told |= {"buffer_size": settings["buffer_size"], "batch_size": settings["batch_size"]}
    told |= {"minibatch_size": settings["replay_size"], "n_epochs": 1, "non_verbose": 1}
    told |= {"base_path": f"{settings['home']}/"}
    return [word for name, value in told.items() for word in (f"--{name}", str(value))]


def heard_accuracy(text: str, tasks: int) -> float:
    """The mean accuracy in percent that Mammoth told after so many tasks."""
    found = {int(seen): float(accuracy) for seen, accuracy in TOLD.findall(text)}
    if tasks not in found:
        raise ValueError(f"Mammoth told no accuracy after {tasks} tasks, only {found}:\n{text[-2000:]}")
    return found[tasks]


def avalanche(settings: Settings) -> Reading:
    """One run of Avalanche, put together from its own benchmark, strategy and metrics."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    classic = importlib.import_module("avalanche.benchmarks.classic")
    metrics = importlib.import_module("avalanche.evaluation.metrics")
    plugins = importlib.import_module("avalanche.training.plugins")
    supervised = importlib.import_module("avalanche.training.supervised")
    imports = cpu_seconds()
    torch.manual_seed(settings["seed"])
    draw = random.Random(settings["seed"])
    angles = [draw.uniform(0, 180) for _ in range(settings["tasks"])]
    plain = {"train_transform": None, "eval_transform": None}
    benchmark = classic.RotatedMNIST(
        len(angles), rotations_list=angles, dataset_root=f"{settings['home']}/MNIST", **plain
    )
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    strategy = supervised.DER(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=settings["avalanche_lr"]),
        mem_size=settings["buffer_size"],
        batch_size_mem=settings["replay_size"],
        alpha=settings["beta"],  # the weight of the old logits, as in Mammoth
        beta=settings["alpha"],
        train_mb_size=settings["batch_size"],
        eval_mb_size=settings["batch_size"],
        evaluator=plugins.EvaluationPlugin(metrics.accuracy_metrics(stream=True), loggers=[]),
    )
    for task, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        told = strategy.eval(benchmark.test_stream[: task + 1])
    accuracy = 100 * next(value for name, value in told.items() if "Acc_Stream" in name)
    versions = installed("avalanche-lib", "torch", "torchvision")
    return {"imports": imports, "steps": strategy.clock.train_iterations, "accuracy": accuracy, "versions": versions}


PROGRAMS: dict[str, Callable[[Settings], Reading]] = {made.__name__: made for made in (holdfast, mammoth, avalanche)}


def installed(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}


def commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def lay_out(files: Path, home: Path) -> None:
    """MNIST where torchvision looks for it below `home`/MNIST, for its own class and for Mammoth's."""
    raw = home / "MNIST" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in sorted(files.glob("*.gz")):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    (home / "MNIST" / "MyMNIST").symlink_to(raw.parent, target_is_directory=True)


def measure(command: list[str], cores: set[int] | None) -> Reading:
    """What a child's last line tells, with the seconds of its process and of all processes that it started."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pinned = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with tempfile.TemporaryFile("w+") as out:
        wall = time.perf_counter()
        child = subprocess.Popen(command, env=env, stdout=out, preexec_fn=pinned)
        _, status, used = os.wait4(child.pid, 0)  # unlike wait(), it tells what this child alone has used
        wall = time.perf_counter() - wall
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = [line for line in out if line.startswith(MARK)]
    if child.returncode or not lines:
        raise SystemExit(f"{' '.join(command[:4])} ended with {child.returncode}; what it wrote is above.")
    reading: Reading = json.loads(lines[-1].removeprefix(MARK))
    cpu = used.ru_utime + used.ru_stime
    return {**reading, "cpu": cpu, "wall": wall, "after_imports": cpu - reading["imports"], "load": os.getloadavg()[0]}


def one_turn(names: list[str], run: Callable[[str], Reading]) -> dict[str, list[Reading]]:
    """Each of the other programs once, and Holdfast before each."""
    turn: dict[str, list[Reading]] = {name: [] for name in ("holdfast", *names)}
    for name in names:
        for each in ("holdfast", name):
            turn[each].append(run(each))
            told = turn[each][-1]
            print(
                f"{each:10} {told['cpu']:7.1f} s CPU {told['wall']:7.1f} s, {told['accuracy']:.1f} %", file=sys.stderr
            )
    return turn


def ratios(turns: list[dict[str, list[Reading]]], name: str) -> dict[str, dict[str, float]]:
    """By each clock: the program's seconds over Holdfast's in the same turn, the median and extremes over turns."""
    found = {}
    for clock in CLOCKS:
        each = [mean(turn[name], clock) / mean(turn["holdfast"], clock) for turn in turns]
        found[clock] = {"median": statistics.median(each), "low": min(each), "high": max(each)}
    return found


def mean(readings: list[Reading], key: str) -> float:
    return statistics.fmean(each[key] for each in readings)


def summary(turns: list[dict[str, list[Reading]]]) -> dict[str, Any]:
    """What the turns tell of each program; its versions and steps must be the same in all of them."""
    programs: dict[str, Any] = {}
    for name in turns[0]:
        readings = [each for turn in turns for each in turn[name]]
        first = readings[0]
        if any((each["steps"], each["versions"]) != (first["steps"], first["versions"]) for each in readings):
            raise SystemExit(f"{name} changed between turns: {readings}")
        medians = {key: statistics.median(each[key] for each in readings) for key in (*CLOCKS, "imports")}
        spread = {
            f"{key}_{end}": made(each[key] for each in readings)
            for key in ("cpu", "wall", "accuracy")
            for end, made in (("low", min), ("high", max))
        }
        programs[name] = {"runs": len(readings), **medians, "accuracy": mean(readings, "accuracy"), **spread}
        programs[name] |= {"steps": first["steps"], "versions": first["versions"]}
    others = [name for name in programs if name != "holdfast"]
    return {"programs": programs, "ratios": {name: ratios(turns, name) for name in others}}


def machine(cores: int) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"processor": model, "cores": os.cpu_count(), "used_cores": cores, "python": platform.python_version()}


def run_settings(tasks: int) -> Settings:
    """The settings of the experiment: Holdfast's preset, which is the published one."""
    import holdfast as hf

    config = hf.RunConfig.preset("rot-mnist", "mse", buffer_size=200)
    names = ("buffer_size", "batch_size", "replay_size", "lr", "alpha", "beta")
    return {"tasks": tasks, **{name: getattr(config, name) for name in names}, "avalanche_lr": AVALANCHE_LR}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mammoth", type=Path, help="a clone of its repository")
    parser.add_argument("--avalanche", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="the Python of the other programs")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1, help="cores that a program and its workers may use")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.child or options.mammoth or options.avalanche):
        parser.error("name a program to compare with: --mammoth FOLDER, --avalanche, or both.")
    return options


def compare(options: argparse.Namespace, home: Path) -> None:
    """All turns; what is known so far is written after each."""
    settings = {**run_settings(options.tasks), "home": str(home)}
    names = ["mammoth"] if options.mammoth else []
    settings |= {"mammoth": str(options.mammoth.resolve())} if options.mammoth else {}
    names += ["avalanche"] if options.avalanche else []
    cores = set(sorted(os.sched_getaffinity(0))[-options.cores :])
    turns: list[dict[str, list[Reading]]] = []
    for number in range(options.turns):

        def run(name: str, seed: int = number) -> Reading:
            python = sys.executable if name == "holdfast" else options.python
            return measure([python, __file__, "--child", name, json.dumps({**settings, "seed": seed})], cores)

        turns.append(one_turn(names, run))
        report = {"about": ABOUT, "left_out": LEFT_OUT, "machine": machine(len(cores)), "turns": len(turns)}
        report |= {"settings": {key: settings[key] for key in settings if key not in ("home", "mammoth")}}
        # Mammoth has as many workers as the process may use cores, up to 8; Avalanche has none unless it is told.
        report |= {"workers": {"holdfast": 0, "mammoth": min(8, len(cores)), "avalanche": 0}}
        load = [each["load"] for turn in turns for readings in turn.values() for each in readings]
        report |= {"load": {"median": statistics.median(load), "max": max(load)}}
        report |= {**summary(turns), "readings": turns}
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if not options.out:
        print(json.dumps(report, indent=1))


def main() -> None:
    options = arguments()
    if options.child:
        warnings.simplefilter("ignore")
        name, settings = options.child
        print(MARK + json.dumps(PROGRAMS[name](json.loads(settings))), flush=True)
        return
    from holdfast import data

    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(data.__file__).parent / "files" / "mnist", Path(folder))
        compare(options, Path(folder))


if __name__ == "__main__":
    main()
