"""How long BatchNorm's kernels take if a group may be cut into more pieces, on the first layers of a ResNet-18.

    python benchmarks/batchnorm_pieces.py

Needs a CUDA device. Prints JSON: a row per layer, with the microseconds of a forward and a backward pass for each
largest number of pieces, every one measured twice in turn.
"""

import json

import torch

from holdfast.models.batchnorm import kernels

LAYERS = (((64, 64, 32, 32), 1), ((96, 64, 32, 32), 3), ((64, 64, 64, 64), 1))
"""Shape and groups: er's on S-CIFAR-10, those of the consistency methods, er's on S-TinyImageNet."""
LIMITS = {"64": (16, 64, 64), "128": (16, 64, 128)}
REPEATS = 20


def microseconds(shape: tuple[int, int, int, int], groups: int, shortcut: bool) -> float:
    """Of a forward and a backward pass, as a captured graph of many."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(shape[1], device="cuda"), torch.zeros(shape[1], device="cuda")

    def both_ways() -> None:
        y, statistics = kernels.forward(x, weight, bias, x if shortcut else None, groups, 1e-5, True)
        kernels.backward(x, x, y if shortcut else None, weight, bias, statistics, 1e-5, True)

    with torch.cuda.stream(torch.cuda.Stream()):
        both_ways()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            both_ways()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / REPEATS**2


def main() -> None:
    rows = []
    for shape, groups in LAYERS:
        for shortcut in (False, True):
            row = {"shape": shape, "groups": groups, "shortcut": shortcut, "microseconds": {}}
            for turn in ("", " again"):
                for name, kernels.LIMITS in LIMITS.items():
                    row["microseconds"][name + turn] = round(microseconds(shape, groups, shortcut), 2)
            rows.append(row)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
