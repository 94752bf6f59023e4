"""Data -> tasks. One short file per scenario; each registers a function (config, data root) -> Benchmark."""

from holdfast.benchmarks import class_incremental, domain_incremental, mnist360
from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, build, load, shuffled

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Task",
    "build",
    "class_incremental",
    "domain_incremental",
    "load",
    "mnist360",
    "shuffled",
]
