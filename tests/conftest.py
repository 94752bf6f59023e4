"""What tests of several files share."""

import os

import pytest
import torch
import torch.distributed as dist

from crew import Crew, join

if not torch.cuda.is_available():
    # Triton looks at it when it is imported, which parts of PyTorch do; its kernels are then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def crew():
    """Four processes that can be the ranks of a job; for one module, as other tests count this process's children."""
    with Crew(4) as crew:
        yield crew


@pytest.fixture
def alone(tmp_path):
    """This process as the one rank of a job."""
    join(str(tmp_path / "job"), 0, 1)
    yield
    dist.destroy_process_group()
