"""Rounds of chaos until time is up; usage: python -m chaos --minutes 60 --seed 0 --out chaos.json (in tests/)."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from random import Random, SystemRandom

import torch

from . import estimators, learners, runs, sweeps
from .program import Execution, Fault, Program
from .trouble import TROUBLES, Disk, Round

KINDS = {
    "run": [runs.program(method) for method in ("linf", "er", "clser", "lwf")],
    "folder": [learners.program("folder")],
    "memory": [learners.program("device")],
    "estimator": [estimators.PROGRAM],
    "processes": [sweeps.program("local")],
    "ray": [sweeps.program("ray")],
}


def main() -> None:
    options = _options()
    if not os.environ.get("CHAOS_MOUNTS"):  # a namespace of our own, in which a small disk can be mounted
        os.environ["CHAOS_MOUNTS"] = "1"
        if shutil.which("unshare") and not subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "chaos", *sys.argv[1:]])
    torch.set_num_threads(1)
    print(f"seed {options.seed}: chaos for {options.minutes} minutes, to be had again with --seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        sys.exit(wreak(Path(folder), options.minutes, options.seed, options.only, options.out))


def wreak(folder: Path, minutes: float, seed: int, only: list[str], out: Path | None) -> int:
    """One round of each kind after the other until time is up; returns 1 if a program did what it must not do."""
    os.environ |= {"TMPDIR": str(folder), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    tempfile.tempdir = str(folder)
    disk, deadline = Disk(folder / "disk"), time.monotonic() + 60 * minutes
    known: dict[str, tuple[dict[str, bytes], float]] = {}
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in only}
    faults: list[str] = []
    try:
        for number, kind in enumerate(cycle(only)):
            if time.monotonic() > deadline:
                break
            draw = Random(f"{seed} {number}")
            program = draw.choice(KINDS[kind])
            if program.name not in known:
                known[program.name] = undisturbed(program, disk)
            made = Round(program, *known[program.name], disk, draw)
            try:
                made.go()
            except Fault as fault:
                faults.append(f"round {number}, {program.name}: {fault}")
                print(faults[-1], flush=True)
                shutil.copytree(made.place, Path.cwd() / f"chaos-{seed}-{number}", dirs_exist_ok=True)
            counts[kind] += made.counts + Counter(rounds=1)
            print(f"round {number}, {program.name}: {dict(made.counts)}", flush=True)
            if out is not None:
                out.write_text(json.dumps(_record(minutes, seed, counts, faults, disk), indent=1) + "\n")
    finally:
        if disk.mounted:
            subprocess.run(["umount", str(disk.path)])
    return int(bool(faults))


def undisturbed(program: Program, disk: Disk) -> tuple[dict[str, bytes], float]:
    """What the program leaves if nothing happens to it, and how many seconds it takes."""
    disk.empty()
    place, begin = disk.path / "place", time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    Execution(program, place, disk.path.parent / "log").finish(0)
    return dict(program.ending(place)), time.monotonic() - begin


def _record(
    minutes: float, seed: int, counts: dict[str, Counter[str]], faults: list[str], disk: Disk
) -> dict[str, object]:
    names = ("rounds", "executions", *TROUBLES, "refused", "results_kept_elsewhere", "equal")
    total = sum(counts.values(), Counter())
    return {
        "seed": seed,
        "minutes": minutes,
        "disk": "a small disk in memory" if disk.mounted else "a limit on the size of files",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "all": {name: total[name] for name in names},
        **{kind: {name: found[name] for name in names} for kind, found in counts.items()},
        "faults": faults,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    there = [kind for kind in KINDS if kind != "ray" or find_spec("ray")]
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**6), help="decides the troubles")
    parser.add_argument("--only", nargs="+", choices=there, default=there, help="kinds of programs")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
