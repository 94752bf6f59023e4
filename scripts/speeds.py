"""Write src/holdfast/speeds.json and docs/speed.json anew from what `holdfast bench --json` printed: `make speeds`.

The first is for guessing how long a run takes: a step lasts a constant plus its operations at a constant rate; both are
fitted so that the relative errors are small. The second has the numbers that README and site tell.
"""

import json
import re
from pathlib import Path

import numpy as np

from holdfast.config import RunConfig
from holdfast.workload import step_operations

ROOT = Path(__file__).resolve().parent.parent
FILE, TOLD = ROOT / "src" / "holdfast" / "speeds.json", ROOT / "docs" / "speed.json"


def measured(name: str) -> dict:
    """A file of measurements in docs/."""
    return json.loads((ROOT / "docs" / name).read_text("utf-8"))


def fitted(rates: dict[tuple[str, str], float], start: float) -> dict[str, float]:
    """Seconds of a step and of an operation, from steps per second by benchmark and method, and those of the start."""
    operations = [step_operations(RunConfig.preset(*case)) for case in rates]
    speed = np.array(list(rates.values()))
    # Both sides times the speed: each measurement then counts by its relative error.
    design = np.stack([speed, speed * operations], axis=1)
    step, operation = np.linalg.lstsq(design, np.ones_like(speed), rcond=None)[0]
    return {"start": float(f"{start:.2g}"), "step": float(f"{step:.3g}"), "operation": float(f"{operation:.3g}")}


def speeds() -> dict[str, dict[str, float]]:
    """What the first file holds."""
    # Of two servers the slower one: a run that ends before its time disappoints nobody.
    cpu, gpu = measured("bench-cpu-slower.json"), measured("bench-h200.json")["device_rates"]
    alone = [each for each in gpu if each["runs"] == 1]
    return {
        "cpu": fitted(
            {("rot-mnist", method): rate for method, rate in cpu["steps_per_second"].items() if method != "simclr"},
            cpu["complete_run"]["setup"],
        ),
        "cuda": fitted(
            {(each["benchmark"], each["method"]): each["steps_per_second"] for each in alone},
            measured("bench-h200-start.json")["cold"]["seconds"],
        ),
    }


def told() -> dict[str, float]:
    """What the second file holds: seconds, multiples of the floor, steps per second, megabytes."""
    cpu, beside = (measured("bench-cpu.json")[part] for part in ("complete_run", "side_by_side"))
    floor = cpu["floor_seconds"]
    gpu = {
        each["runs"]: each["steps_per_second"]
        for each in measured("bench-h200.json")["device_rates"]
        if (each["benchmark"], each["method"]) == ("seq-cifar10", "mse")
    }
    log = (ROOT / "docs" / "bench-h200.txt").read_text("utf-8")
    best = max(gpu, key=gpu.__getitem__)
    return {
        "cpu_seconds": cpu["seconds"],
        "cpu_steps": cpu["steps"],
        "cpu_ratio": cpu["ratio"],
        "cpu_training": cpu["training"] / floor,
        "cpu_evaluation": cpu["evaluation"] / floor,
        "cpu_rest": (cpu["seconds"] - cpu["training"] - cpu["evaluation"]) / floor,
        "cpu_memory": cpu["peak_memory_mb"],
        "cpu_lost": 100 * (1 - beside["two_at_once"] / beside["alone"]),
        "gpu_alone": gpu[1],
        "gpu_together": gpu[best],
        "gpu_runs": best,
        "gpu_authors": measured("bench-authors.json")["steps_per_second"],
        "gpu_mnist_seconds": float(
            re.findall(r"^ONE complete rot-mnist mse run: wall ([\d.]+)", log, re.MULTILINE)[-1]
        ),
        "gpu_column_seconds": float(re.findall(r"^33 rot-mnist runs: wall ([\d.]+)", log, re.MULTILINE)[-1]),
    }


if __name__ == "__main__":
    for file, made in ((FILE, speeds()), (TOLD, told())):
        file.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
