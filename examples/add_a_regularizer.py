"""A regularizer of your own, checked, registered, and compared with two that ship. About fifteen seconds.

Here: only the gaps between the logits must stay, not the logits themselves, since adding a constant to all of them
changes no probability.
"""

import torch

import holdfast as hf
from holdfast.testing import check_regularizer


@hf.REGULARIZERS.register("centred", "mean squared difference of the logits around their mean")
def centred(current, stored, *, scale=1.0):
    difference = current - stored
    return scale * (difference - difference.mean(dim=1, keepdim=True)).square().mean()


if __name__ == "__main__":
    check_regularizer(centred)
    shifted = torch.randn(4, 10)
    print(f"a constant costs nothing: {centred(shifted + 3, shifted):.6f}")
    for method in ("er", "mse", "centred"):
        config = hf.RunConfig.preset("seq-mnist", method, buffer_size=200, train_limit=3000)
        result = hf.run(config, device="cpu")
        print(f"{method:>8}: {result.accuracy:5.1f} % in the end, {result.forgetting:5.1f} points forgotten")
