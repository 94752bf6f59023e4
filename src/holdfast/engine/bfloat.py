"""bfloat16 on a GPU without conversions in every pass: a twin of the network that stays in bfloat16."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast.errors import UsageError
from holdfast.learners import PlainSgd
from holdfast.learners.optimizers import decayed
from holdfast.pure import pure

__all__ = ["BfloatTwin"]


class BfloatTwin(PlainSgd):
    """Plain SGD on float32 weights, with a twin of the network whose matrices are in bfloat16.

    Autocast converts every weight to bfloat16 in each forward pass and every gradient back, one kernel each. The twin
    has bfloat16 weights of its own and converts all of them at once after each step, which gives the same numbers.
    Frozen weights are converted once. `network` is the twin; the model itself has the float32 weights.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0) -> None:
        matrices = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        # All but the matrices is shared. BatchNorms are shared as modules: they know which row is in which group.
        shared = [*model.parameters(), *model.buffers(), *(m for m in model.modules() if isinstance(m, _BatchNorm))]
        memo: dict[int, Any] = {id(thing): thing for thing in shared}
        self.network: nn.Module = deepcopy(model, memo)
        for module in matrices:
            if isinstance(module, nn.Conv2d) and _PaddedConv2d.helps(module):
                memo[id(module)].__class__ = _PaddedConv2d
        self.masters: list[Tensor] = []
        self.twins: list[Tensor] = []
        for module in matrices:
            for name, parameter in module.named_parameters(recurse=False):
                twin = nn.Parameter(parameter.detach().bfloat16(), requires_grad=parameter.requires_grad)
                setattr(memo[id(module)], name, twin)
                self.masters.append(parameter)
                self.twins.append(twin)
        converted = {id(master) for master in self.masters}
        super().__init__((p for p in model.parameters() if id(p) not in converted), lr, weight_decay)
        # Not a bound method: a copy of the model, such as a teacher, would copy the twin with it.
        model.register_load_state_dict_post_hook(lambda *_: self.refresh())  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        for twin in self.twins:
            twin.grad = None

    def trained(self) -> list[Tensor]:
        """The tensors whose gradients `step` applies, matrices in bfloat16."""
        return [*super().trained(), *self.twins]

    @torch.no_grad()
    def step(self) -> None:
        """Move the float32 weights against the gradients, and the twin with them."""
        super().step()
        pairs = zip(self.masters, self.twins, strict=True)
        moved = [(master, twin, twin.grad) for master, twin in pairs if twin.grad is not None]
        if not moved and any(twin.requires_grad for twin in self.twins):
            raise UsageError(
                "no gradient reached the network that is trained. A learner must compute its losses with self.network, "
                "or say uses_parameters = True; self.model has the same weights, but its gradients are not applied."
            )
        if moved:
            masters, twins, gradients = (list(each) for each in zip(*moved, strict=True))
            _update(masters, twins, gradients, self.lr, self.weight_decay)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the float32 weights to the twin; needed after anything other than `step` changed them."""
        torch._foreach_copy_(self.twins, self.masters)


@pure
def _update(masters: list[Tensor], twins: list[Tensor], gradients: list[Tensor], lr: Any, weight_decay: float) -> None:
    """Compiled, it reads and writes each weight once."""
    if weight_decay:
        gradients = decayed([each.float() for each in gradients], masters, weight_decay)
    torch._foreach_add_(masters, gradients, alpha=-lr)
    torch._foreach_copy_(twins, masters)


class _PaddedConv2d(nn.Conv2d):
    """A convolution of a few input channels, computed as one of eight with zeros in the others.

    Tensor cores take channels by eights; for an image's three, cuDNN has only kernels several times as slow.
    """

    CHANNELS = 8

    @classmethod
    def helps(cls, conv: nn.Conv2d) -> bool:
        """Whether `conv` is an ordinary convolution of fewer channels."""
        return type(conv) is nn.Conv2d and conv.groups == 1 and conv.in_channels < cls.CHANNELS

    def forward(self, input: Tensor) -> Tensor:
        """What the convolution without the zeros gives."""
        zeros = (0, 0, 0, 0, 0, self.CHANNELS - self.in_channels)
        out: Tensor = self._conv_forward(F.pad(input, zeros), F.pad(self.weight, zeros), self.bias)
        return out
