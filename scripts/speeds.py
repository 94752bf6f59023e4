"""Write src/holdfast/speeds.json anew from what `holdfast bench --json` printed: `make speeds`.

A step is taken to last a constant plus its operations at a constant rate; both are fitted so that the relative errors
are small.
"""

import json
from pathlib import Path

import numpy as np

from holdfast.config import RunConfig
from holdfast.workload import step_operations

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "src" / "holdfast" / "speeds.json"


def fitted(rates: dict[tuple[str, str], float], start: float) -> dict[str, float]:
    """Seconds of a step and of an operation, from steps per second by benchmark and method, and those of the start."""
    operations = [step_operations(RunConfig.preset(*case)) for case in rates]
    speed = np.array(list(rates.values()))
    # Both sides times the speed: each measurement then counts by its relative error.
    design = np.stack([speed, speed * operations], axis=1)
    step, operation = np.linalg.lstsq(design, np.ones_like(speed), rcond=None)[0]
    return {"start": float(f"{start:.2g}"), "step": float(f"{step:.3g}"), "operation": float(f"{operation:.3g}")}


def speeds() -> dict[str, dict[str, float]]:
    """What the file holds."""
    cpu = json.loads((ROOT / "docs" / "bench-cpu.json").read_text("utf-8"))
    gpu = json.loads((ROOT / "docs" / "bench-h200.json").read_text("utf-8"))["device_rates"]
    alone = [each for each in gpu if each["runs"] == 1]
    return {
        "cpu": fitted(
            {("rot-mnist", method): rate for method, rate in cpu["steps_per_second"].items() if method != "simclr"},
            cpu["complete_run"]["setup"],
        ),
        "cuda": fitted(
            {(each["benchmark"], each["method"]): each["steps_per_second"] for each in alone},
            max(each["ready_seconds"] for each in alone),
        ),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(speeds(), indent=1) + "\n", "utf-8")
