"""What tests of several files share."""

import pytest
import torch.distributed as dist

from crew import Crew, join


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
