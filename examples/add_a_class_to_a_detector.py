"""A detector learns one more class, from images that show nothing else. A few seconds.

The images are made up: squares and rings, later only crosses. A target is a dict of padded tensors, boxes and labels,
with a mask that says which rows are objects; images with few and with many objects then fit into one minibatch and into
one buffer. Without a buffer the detector no longer finds squares and rings. With 200 stored images it does.
"""

import torch
from torch import nn
from torch.nn import functional as F

import holdfast as hf

torch.set_num_threads(1)  # products this small are not worth sharing

NAMES = ("square", "ring", "cross")
SIZE, CELLS, MOST = 32, 8, 3  # pixels and cells a side, objects an image


def images(classes, count, seed):
    """Images (count, 1, SIZE, SIZE) of objects that do not overlap, each in a quarter of its own; and their targets."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.arange(count)[:, None]
    labels = torch.tensor(classes)[torch.randint(len(classes), (count, MOST), generator=draw)]
    mask = torch.arange(MOST) < torch.randint(1, MOST + 1, (count, 1), generator=draw)
    quarter = torch.rand(count, 4, generator=draw).argsort(dim=1)[:, :MOST]
    radius = 3 + 2 * torch.rand(count, MOST, generator=draw)
    centre = torch.stack([quarter % 2, quarter // 2], dim=-1) * SIZE / 2 + radius[..., None]
    centre += (SIZE / 2 - 2 * radius[..., None]) * torch.rand(count, MOST, 2, generator=draw)
    x, y = torch.arange(SIZE) + 0.5, torch.arange(SIZE)[:, None] + 0.5
    picture = 0.1 * torch.randn(count, SIZE, SIZE, generator=draw)
    for each in range(MOST):
        r = radius[:, each, None, None]
        across, down = ((axis - c[:, None, None]).abs() for axis, c in zip((x, y), centre[:, each].T, strict=True))
        inside = (across < r) & (down < r)
        away = across**2 + down**2
        shapes = torch.stack([inside, (away < r**2) & (away > r**2 / 3), inside & ((across < 1) | (down < 1))])
        picture += shapes[labels[:, each], rows[:, 0]] * mask[:, each, None, None]
    boxes = torch.cat([centre, 2 * radius[..., None].expand_as(centre)], dim=-1) / SIZE
    return picture[:, None], {"boxes": boxes, "labels": labels, "mask": mask}


class Detector(nn.Module):
    """For each cell: nothing or one of the classes, with room for the one to come; and a box (x, y, width, height)."""

    def __init__(self):
        super().__init__()
        first = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)]
        self.layers = nn.Sequential(*first, nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.last = nn.Conv2d(32, 1 + len(NAMES) + 4, 1)
        middle = (torch.arange(CELLS) + 0.5) / CELLS
        start = torch.zeros(1 + len(NAMES) + 4, CELLS, CELLS)
        start[-4], start[-3], start[-2:] = middle, middle[:, None], 8 / SIZE  # a box begins in the middle of its cell
        self.register_buffer("start", start)

    def forward(self, x):
        """Images -> (images, 1 + classes + 4, CELLS, CELLS)."""
        return self.last(self.layers(x)) + self.start


def loss(outputs, targets):
    """Each object belongs to the cell of its centre: cross-entropy in all cells, distance of boxes in those."""
    outputs = outputs.flatten(2).transpose(1, 2)  # (B, cells, ...)
    column, row = (targets["boxes"][..., :2] * CELLS).long().unbind(-1)
    cell = torch.where(targets["mask"], row * CELLS + column, CELLS**2)  # padding goes to a cell too many
    known = torch.zeros(len(cell), CELLS**2 + 1, dtype=torch.long).scatter_(1, cell, targets["labels"] + 1)[:, :-1]
    weights = torch.tensor([0.2] + [1.0] * len(NAMES))  # most cells show nothing
    found = outputs[..., -4:].gather(1, cell.clamp(max=CELLS**2 - 1)[..., None].expand(-1, -1, 4))
    apart = (found - targets["boxes"]).abs().sum(dim=-1)[targets["mask"]].mean()
    return F.cross_entropy(outputs[..., :-4].transpose(1, 2), known, weights) + 2 * apart


@torch.no_grad()
def found(model, classes, count=300):
    """The share of objects, in percent, that a box of the right class covers well (intersection over union > 0.5)."""
    pictures, targets = images(classes, count, seed=10**6)
    outputs = model(pictures).flatten(2).transpose(1, 2)
    centre, size = outputs[..., -4:-2], outputs[..., -2:].clamp(min=0)
    right = outputs[..., :-4].argmax(dim=-1)[:, None] == targets["labels"][..., None] + 1
    own, extent = (part[:, :, None] for part in targets["boxes"].split(2, dim=-1))
    low = torch.maximum(own - extent / 2, (centre - size / 2)[:, None])
    high = torch.minimum(own + extent / 2, (centre + size / 2)[:, None])
    shared = (high - low).clamp(min=0).prod(dim=-1)
    union = extent.prod(dim=-1) + size.prod(dim=-1)[:, None] - shared
    covered = (right & (shared / union > 0.5)).any(dim=-1)
    return 100 * covered[targets["mask"]].float().mean().item()


def learn(name, make, **options):
    torch.manual_seed(0)
    model = Detector()
    learner = make(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss=loss, **options)
    for first, classes in ((0, [0, 1]), (180, [2])):  # squares and rings, then only crosses
        for step in range(first, first + 180):
            learner.observe(*images(classes, 16, seed=step))
        shares = "  ".join(f"{NAMES[each]} {found(model, [each]):4.1f} %" for each in range(len(NAMES)))
        print(f"{name}, {'then crosses' if first else 'squares and rings'}: {shares}", flush=True)


if __name__ == "__main__":
    learn("no buffer        ", hf.LEARNERS["sgd"])
    learn("200 stored images", hf.ConsistencyReplay, buffer_size=200, regularizer="mse", beta=0.1)
