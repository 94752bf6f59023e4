"""`holdfast reproduce`, in processes of this machine or on a Ray cluster of it."""

import os
import sys
from pathlib import Path

from .program import Program
from .runs import checkpoints, result, result_files


def program(engine: str) -> Program:
    """Four runs, two at a time."""

    def act(place: Path) -> None:
        command = ["holdfast", "reproduce", "chaos", "--plugin", "grid", "--seeds", "1", "--jobs", "2"]
        command += ["--engine", engine, "--device", "cpu", "--out", str(place / "out")]
        os.chdir(Path(__file__).parent)
        os.execv(sys.executable, [sys.executable, "-P", "-m", *command])

    return Program(f"reproduce {engine}", act, ending, guarded, result_files)


def ending(place: Path) -> dict[str, bytes]:
    """The results, once all four are there."""
    found = result(place / "out")
    return found if sum(name.endswith(".json") for name in found) == 4 else {}


def guarded(place: Path) -> list[Path]:
    return [*checkpoints(place), *place.glob("out/.leases/*"), *place.glob("out/failed/*")]
