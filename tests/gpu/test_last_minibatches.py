"""benchmarks/last_minibatches.py computes which samples a GPU puts last."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 3])
def test_permutations_are_those_of_the_gpu(seed, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("last_minibatches")
    generator = torch.Generator("cuda").manual_seed(seed)
    for number in range(5):
        theirs = torch.randperm(script.SAMPLES, generator=generator, device="cuda").cpu().numpy()
        ours = script.permutation(script.SAMPLES, seed, number * script.DRAWS)
        assert np.mean(ours == theirs) > 0.999  # equal keys, a few at most, are in another order
