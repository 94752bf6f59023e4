"""One learner on several processes: MNIST digits in pairs, one buffer over all ranks.

torchrun --nproc-per-node 2 examples/distributed.py     two processes, on GPUs where there are any
python examples/distributed.py                          one process, without torch.distributed

Every rank sees its own part of each minibatch. The buffer of 200 samples is counted once, over all ranks.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.augment import Normalize
from holdfast.data import load

BATCH = 64
"""Samples a step, on all ranks together."""


def main() -> None:
    """Learn five pairs of digits, save on the way, and print what is left of each."""
    spread = "LOCAL_RANK" in os.environ  # torchrun tells each process who it is
    device = torch.device("cpu")
    if spread:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group()
    rank, world = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)

    torch.manual_seed(0)
    inner = hf.MODELS["mlp"]((1, 28, 28), 10).to(device)
    model = DistributedDataParallel(inner) if spread else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=200, regularizer="linf", augment=Normalize())

    train, test = load("mnist")[:2]
    for pair in range(5):
        members = (train.labels // 2 == pair).nonzero().squeeze(1)[:3200]
        for minibatch in members.split(BATCH):
            own = minibatch.tensor_split(world)[rank]  # in a job of yours: a DistributedSampler, or another source
            learner.observe(train.images[own], train.labels[own])

    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder) / "learner.safetensors")  # one file for all ranks, for any number of ranks
    kept = learner.buffer.contents().y  # every rank asks, since every rank holds a part
    if rank == 0:
        evaluate(learner.model, test.images.to(device), test.labels.to(device))
        print(
            f"{len(kept)} samples in the buffer of {world} process(es), {kept.bincount(minlength=10).tolist()} a digit"
        )
    if spread:
        dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Print the accuracy on each pair of digits; the first was learned longest ago."""
    right = model(Normalize()(images)).argmax(dim=1) == labels
    for pair in range(5):
        share = right[labels // 2 == pair].float().mean()
        print(f"digits {2 * pair} and {2 * pair + 1}: {100 * share:.1f} %")
    print(f"all digits: {100 * right.float().mean():.1f} %")


if __name__ == "__main__":
    main()
