"""Data -> tasks. One short file per scenario; each registers functions (config, data root) -> Benchmark."""

from holdfast.benchmarks import class_incremental, domain_incremental, mnist360  # noqa: F401 - importing registers
from holdfast.benchmarks.base import BENCHMARKS, Benchmark, Task, make_benchmark, needs, required_data, shared_dataset

__all__ = ["BENCHMARKS", "Benchmark", "Task", "make_benchmark", "needs", "required_data", "shared_dataset"]
