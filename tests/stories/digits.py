"""The digits of MNIST as a stream that shows two classes at a time, for the stories of users."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from holdfast.data import Dataset, load


@cache
def digits() -> Dataset:
    return load("mnist")


def pairs(count: int, seed: int, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of `count` images of digits 0 and 1, then as many of 2 and 3, and so on; uint8 (B, 1, 28, 28)."""
    train, order = digits().train, torch.Generator().manual_seed(seed)
    for first in range(0, 10, 2):
        (own,) = torch.where(train.labels // 2 == first // 2)
        for chosen in own[torch.randperm(len(own), generator=order)[:count]].split(size):
            yield train.images[chosen], train.labels[chosen]


def scaled(images: Tensor) -> Tensor:
    return images.float() / 255


@torch.no_grad()
def accuracy(model: nn.Module, view=scaled, count: int = 5000) -> float:
    """On the first test images of all ten digits, in percent."""
    test = digits().test
    return 100 * float((model(view(test.images[:count])).argmax(1) == test.labels[:count]).float().mean())
