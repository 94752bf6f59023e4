"""The sharded reservoir over NCCL: the same samples as on the CPU, without waiting for the device."""

import pytest
import torch
import torch.distributed as dist

from buffer.test_reservoir import numbered
from holdfast.buffer import Reservoir, ShardedReservoir
from holdfast.rng import generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's compiler and its watch over synchronisation warn about themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture
def _nccl(tmp_path):
    store = dist.FileStore(str(tmp_path / "job"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_nccl")
def test_one_rank_on_a_gpu_keeps_and_draws_what_a_reservoir_on_the_cpu_does():
    there = ShardedReservoir(20, generator=generator(0, "buffer"), device="cuda")
    here = Reservoir(20, generator=generator(0, "buffer"))
    for step, ids in enumerate(torch.arange(120).split(8)):
        batch = [part.cuda() for part in numbered(ids)]
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step makes room and connections
        try:
            there.add(*batch)
            drawn = there.sample(5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        here.add(*numbered(ids))
        for mine, theirs in zip(drawn, here.sample(5), strict=True):
            assert mine.device.type == "cuda"
            assert torch.equal(mine.cpu(), theirs)
    for mine, theirs in zip(there.contents(), here.contents(), strict=True):
        assert torch.equal(mine, theirs)
