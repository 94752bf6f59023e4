"""One rank over NCCL: its reservoir keeps what one on the CPU does, its learner learns what one without ranks does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from buffer.test_reservoir import numbered
from holdfast.buffer import Reservoir, ShardedReservoir
from holdfast.learners import ReplayLearner
from holdfast.rng import generator, seeded_globally

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


def taught(kind: str, device: str, wrap=lambda model: model) -> ReplayLearner:
    """A learner after 20 steps in float64; `wrap` is put around its model, which has BatchNorm in groups."""
    with seeded_globally(0, "init"):
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)]
    model = wrap(hf.group_batchnorm(nn.Sequential(*layers)).double().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "er":
        learner = hf.ExperienceReplay(model, optimizer, buffer_size=24, alpha=0.5, seed=3)
    else:
        learner = hf.ConsistencyReplay(model, optimizer, regularizer=kind, buffer_size=24, alpha=0.5, beta=0.3, seed=3)
    if learner.ranks is None:  # ranks draw on the host: the same draws, wherever the samples are
        learner.buffer = ShardedReservoir(24, generator=generator(3, "buffer"), device=device)
    draw = generator(0, "stream")
    for _ in range(20):
        x = torch.randn(8, 1, 6, 6, dtype=torch.float64, generator=draw)
        y = torch.randint(0, 5, (8,), generator=draw)
        learner.observe(x.to(device), y.to(device))
    return learner


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("kind", ["er", "linf"])
def test_one_rank_learns_what_a_learner_without_ranks_does(kind):
    alone, ranked = taught(kind, "cuda"), taught(kind, "cuda", DistributedDataParallel)
    assert alone.ranks is None
    assert ranked.ranks.size == 1
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(ranked.model.state_dict()[name], value, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(ranked.buffer.contents(), alone.buffer.contents(), strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
