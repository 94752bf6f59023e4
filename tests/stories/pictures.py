"""A program of a user whose samples do not fit into memory; test_memory_mapped.py starts it.

Usage: pictures.py FOLDER CAPACITY OBSERVED. It learns from OBSERVED pictures of 224 x 224 in colour, made of MNIST's
digits, keeps CAPACITY of them in FOLDER and prints what it measured as JSON.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch

import holdfast as hf
from holdfast.data import load

BATCH = 100


def pictures(count):
    """Minibatches of digits enlarged to (3, 224, 224) uint8; after 60,000 they return with light and dark swapped."""
    digits = load("mnist").train
    for start in range(0, count, BATCH):
        ids = torch.arange(start, min(start + BATCH, count))
        small, swapped = digits.images[ids % 60_000], (ids >= 60_000).view(-1, 1, 1, 1)
        yield enlarge(torch.where(swapped, 255 - small, small)), digits.labels[ids % 60_000]


def enlarge(images):
    return images.repeat_interleave(8, 2).repeat_interleave(8, 3).expand(-1, 3, -1, -1).contiguous()


def small(images):
    """What the network sees."""
    return images[:, 0, ::8, ::8].flatten(1).float() / 255


def build(storage, capacity):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    descent = torch.optim.SGD(model.parameters(), lr=0.05)
    return hf.ConsistencyReplay(
        model, descent, buffer_size=capacity, consistency_size=32, replay_size=32, augment=small, storage=storage
    )


def peak_memory():
    """The most this process has held, mapped files included, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def whole(draw, observed):
    """Whether every drawn picture is one of the stream's, with its label."""
    offered = {(bytes_of(image), int(label)) for x, y in pictures(observed) for image, label in zip(x, y, strict=True)}
    return all((bytes_of(image), int(label)) in offered for image, label in zip(draw.x, draw.y, strict=True)) and (
        torch.equal(draw.x, enlarge(draw.x[:, :1, ::8, ::8]))
    )


def bytes_of(image):
    return image[0, ::8, ::8].contiguous().numpy().tobytes()


def main():
    folder, capacity, observed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    tiny = build("device", 64)
    for x, y in pictures(1000):  # all that learning needs, but for the buffer
        tiny.observe(x, y)
    without = peak_memory()
    began = time.perf_counter()
    learner = build(folder / "buffer", capacity)
    for x, y in pictures(observed):
        learner.observe(x, y)
    learned = time.perf_counter()
    learner.save(folder / "learner.safetensors")
    saved = time.perf_counter()
    beyond = peak_memory() - without
    test = load("mnist").test
    right = learner.model(small(enlarge(test.images[:1000]))).argmax(1) == test.labels[:1000]
    measured = {
        "stored": learner.buffer.stored,
        "stored_mb": sum(file.stat().st_blocks * 512 for file in (folder / "buffer").iterdir()) / 1e6,
        "checkpoint_mb": (folder / "learner.safetensors").stat().st_size / 1e6,
        "memory_without_mb": without,
        "memory_beyond_mb": beyond,
        "seconds": learned - began,
        "save_seconds": saved - learned,
        "accuracy": 100 * right.float().mean().item(),
        "whole": whole(learner.buffer.sample(300), observed),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
