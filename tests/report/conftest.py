import pytest
import torch

from holdfast.config import RunConfig
from holdfast.report import gather
from holdfast.results import RunResult, save

ENVIRONMENT = {
    "holdfast": "0.1.0",
    "commit": "0123456789abcdef",
    "python": "3.11.7",
    "torch": "2.13.0",
    "device": "x86_64",
    "device_type": "cpu",
    "threads": 1,
}


def square(final, tasks=3):
    """An accuracy matrix whose last row has the mean `final`: each task at `final` + 4 when learned, then `final`."""
    matrix = torch.full((tasks, tasks), float("nan"), dtype=torch.float64)
    for stage in range(tasks):
        matrix[stage, : stage + 1] = final
        matrix[stage, stage] = final if stage == tasks - 1 else final + 4
    return matrix


def make(config, matrix, seconds=10.0):
    tasks = matrix.shape[1]
    untrained = torch.full((tasks,), 10.0, dtype=torch.float64)
    return RunResult(config, matrix, matrix, untrained, seconds, {"steps_per_second": 100.0}, ENVIRONMENT)


def run(method="er", final=80.0, seed=0, buffer_size=200, benchmark="toy", tasks=3, **settings):
    """A finished run with chosen numbers."""
    if method in ("sgd", "joint"):
        buffer_size = None
    config = RunConfig(benchmark=benchmark, method=method, buffer_size=buffer_size, seed=seed, tasks=tasks, **settings)
    matrix = torch.full((1, tasks), final, dtype=torch.float64) if method == "joint" else square(final, tasks)
    return make(config, matrix)


def paper_run(method, final, seed=0, buffer_size=200, benchmark="mnist-360"):
    """A finished run of table 1."""
    config = RunConfig.preset(benchmark, method, buffer_size=buffer_size, seed=seed)
    return make(config, torch.full((1, 1), final, dtype=torch.float64))


PAPER = [
    *(paper_run("er", value, seed) for seed, value in enumerate((51.0, 52.0, 53.0))),
    *(paper_run("l2", value, seed) for seed, value in enumerate((61.9, 62.0, 62.1))),
    *(paper_run("mse", value, seed) for seed, value in enumerate((79.0, 80.0, 81.0))),
    paper_run("sgd", 21.0),
]
"""Published: er 51.76 +- 2.19, l2 61.68 +- 1.17, mse 59.04 +- 1.69, sgd 21.09 +- 0.21."""


@pytest.fixture
def stored(tmp_path):
    """Write results to a folder and read them as a report does."""

    def write(*results):
        folder = tmp_path / "results"
        for result in results:
            save(result, folder)
        return gather([folder])

    return write
