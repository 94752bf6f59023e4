"""What tests of several files share."""

import os

import pytest
import torch
import torch.distributed as dist

from crew import Crew, join
from forked import from_server
from killed import few_digits as few

if not torch.cuda.is_available():
    # Triton looks at it when it is imported, which parts of PyTorch do; its kernels are then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def crew():
    """Four processes that can be the ranks of a job; for one module, as other tests count this process's children."""
    with Crew(4) as crew:
        yield crew


@pytest.fixture
def quick_workers(monkeypatch):
    """Workers of sweeps have PyTorch imported when they start. Other tests start them as a user's sweep does."""
    monkeypatch.setattr("holdfast.sweep.processes.get_context", lambda method: from_server())


@pytest.fixture(scope="session")
def digits():
    """The first digits of MNIST."""
    return few()


@pytest.fixture
def few_digits(digits, monkeypatch):
    """The first digits of MNIST in place of all of them, in this process."""
    for file in ("class_incremental", "domain_incremental", "mnist360"):
        monkeypatch.setattr(f"holdfast.benchmarks.{file}.shared_dataset", lambda name, root: digits)


@pytest.fixture
def alone(tmp_path):
    """This process as the one rank of a job."""
    join(str(tmp_path / "job"), 0, 1)
    yield
    dist.destroy_process_group()
