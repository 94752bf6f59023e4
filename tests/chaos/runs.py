"""`holdfast run ... --resume`, killed and continued."""

import json
import sys
from pathlib import Path

from holdfast.cli import main

from .program import Program

SETTINGS = ("train_limit=600", "batch_size=16", "replay_size=16")
UNLIKE = ("seconds", "timing", "environment")
"""What differs from run to run."""


def program(method: str) -> Program:
    """A run of seconds with that method."""

    def act(place: Path) -> None:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        size = [] if method in ("sgd", "lwf") else ["--buffer-size", "50"]
        sys.argv = ["holdfast", "run", "rot-mnist", method, "--tasks", "3", *size, *settings]
        sys.argv += ["--device", "cpu", "--out", str(place / "out"), "--resume", "--checkpoint-every", "0.05"]
        main()

    return Program(f"run {method}", act, lambda place: result(place / "out"), checkpoints, result_files)


def result(out: Path) -> dict[str, bytes]:
    """All that the results in a folder say, without times: numbers, logits, weights."""
    found = {}
    for path in sorted(out.glob("[!.]*/*")):
        name = f"{path.parent.name}/{path.name}"
        if path.name == "result.json":
            try:
                values = json.loads(path.read_bytes())
            except ValueError:
                values = {}  # a result that was damaged is none
            found[name] = json.dumps({key: values[key] for key in values if key not in UNLIKE}).encode()
        elif path.suffix == ".safetensors":
            found[name] = path.read_bytes()
    return found if any(name.endswith(".json") for name in found) else {}


def checkpoints(place: Path) -> list[Path]:
    return list(place.glob("out/.checkpoints/*"))


def result_files(place: Path) -> list[Path]:
    return list(place.glob("out/*/result.json"))
