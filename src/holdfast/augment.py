"""Batched views, on the device: uint8 images -> float images."""

import random
from collections.abc import Callable, Sequence
from inspect import getclosurevars, isfunction, signature
from typing import Any

import numpy
import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.nested import Nested, concat, leaves, rows, split, transform
from holdfast.pure import pure
from holdfast.rng import global_generators

__all__ = ["CropFlip", "Normalize", "View", "draws_once", "per_sample", "takes_targets"]

View = Callable[..., Any]
"""Stored minibatch -> the network's input; for images, (B, C, H, W) uint8 -> float. See `takes_targets`."""


def takes_targets(view: View) -> bool:
    """Whether a view has two parameters without defaults, (inputs, targets), and so gets and returns both."""
    try:
        parameters = signature(getattr(view, "forward", view)).parameters.values()
    except (TypeError, ValueError):  # some functions in C do not tell
        return False
    return sum(each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD for each in parameters) == 2


class Normalize:
    """Scales pixels to [0, 1], then (x - mean) / std per channel; without mean and std, scales only."""

    def __init__(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        if (mean is None) != (std is None):
            raise UsageError("give both mean and std, or neither.")
        self.mean, self.std = mean, std
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32."""
        if self.mean is None or self.std is None:
            # Converting bytes first and dividing in place takes half the time of dividing them directly.
            return images.float().div_(255) if images.dtype == torch.uint8 else images / 255
        scale, shift = self._on(images.device)
        return torch.addcmul(shift, images.float(), scale)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Cached, because making a tensor from Python numbers waits for the GPU, which a step must not do.
        if device not in self._constants:
            mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (self.mean, self.std))
            self._constants[device] = (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
        return self._constants[device]


class CropFlip:
    """Pads with zeros, crops and flips each image at random, then applies `normalize`.

    Padding comes before normalisation: padded pixels are black, not the mean.
    """

    def __init__(self, normalize: View, generator: torch.Generator, padding: int = 4) -> None:
        self.normalize, self.generator, self.padding = normalize, generator, padding

    def __call__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float32."""
        uniforms = torch.rand(3, len(images), 1, generator=self.generator, device=images.device)
        return self.render(images, uniforms)

    @pure
    def render(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """The view for random numbers `uniforms` (3, B, 1) in [0, 1): shift down, shift right, flip."""
        view: Tensor = self.normalize(self.crop_flip(images, uniforms))
        return view

    def crop_flip(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """The uint8 images, cropped and flipped; one gather instead of padding, cropping and flipping."""
        count, channels, height, width = images.shape
        shift = (uniforms[:2] * (2 * self.padding + 1)).long() - self.padding
        rows = torch.arange(height, device=images.device) + shift[0]
        columns = torch.arange(width, device=images.device)
        columns = torch.where(uniforms[2] < 0.5, width - 1 - columns, columns) + shift[1]
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
        source = source.view(count, 1, -1).expand(-1, channels, -1)
        return images.flatten(2).gather(2, source).view_as(images) * inside[:, None]


# --- views that draw for each sample ---------------------------------------------------------------------------------


def per_sample(view: View) -> View:
    """A view of minibatches that applies `view` to each sample on its own, without the dimension of the batch.

    For random transforms that draw once per call, such as those of torchvision: given a minibatch, they would treat all
    of its samples alike. torch.vmap computes all samples at once if it can. It cannot if Python code depends on a drawn
    number, as in torchvision, or if the view draws from Python's or NumPy's generator. Then the samples are computed
    one by one. The first call finds out.
    """
    if takes_targets(view):
        raise UsageError(
            "per_sample takes a function of one sample's inputs, and this one wants its targets as well: give it to "
            "augment as it is, and let it work on a whole minibatch."
        )
    return _PerSample(view)


class _PerSample:
    def __init__(self, view: View) -> None:
        self.view, self.generator = view, getattr(view, "generator", None)
        self._at_once: bool | None = None

    def __call__(self, x: Nested) -> Nested:
        if self._at_once is None:
            before = _Generators(self, x)
            try:
                made = torch.vmap(self.view, randomness="different")(transform(torch.clone, x))  # may work in place
                self._at_once = not before.moved_beside_torch()
            except Exception:  # an error of the view itself is raised again below
                self._at_once = False
            if self._at_once:
                return made
            before.restore()
        if self._at_once:
            return torch.vmap(self.view, randomness="different")(x)
        one_by_one = (transform(lambda part: part.squeeze(0), each) for each in split(x, [1] * rows(x)))
        return concat([transform(lambda part: part[None], self.view(each)) for each in one_by_one])


def draws_once(view: View, *samples: Nested) -> bool:
    """Whether a view is random, but the same for all rows of a minibatch. `samples` are its arguments, for instance x.

    The view is called a few times with copies of the first row. Generators are put back, see `_Generators`. A view that
    fails is left to fail in the step.
    """
    before, made = _Generators(view, samples[0]), []
    try:
        for _ in range(4):
            copies = [transform(lambda part: part[:1].repeat(8, *[1] * (part.dim() - 1)), each) for each in samples]
            made.append(leaves(view(*copies), "view"))
        alike = all(torch.equal(part, part[:1].expand_as(part)) for each in made for part in each.values())
        same = all(torch.equal(part, made[0][name]) for each in made for name, part in each.items())
    except Exception:
        return False
    finally:
        before.restore()
    return alike and not same


class _Generators:
    """The states of the generators that a view of `samples` may draw from, to put them back.

    These are PyTorch's, Python's and NumPy's global generators, and those of PyTorch and NumPy that are attributes of
    the view, or variables that it reads if it is a function.
    """

    def __init__(self, view: View, samples: Nested) -> None:
        own = list(getattr(view, "__dict__", {}).values())
        if isfunction(view):
            read = getclosurevars(view)
            own += [*read.nonlocals.values(), *read.globals.values()]
        device = next(iter(leaves(samples, "x").values())).device
        generators = [*global_generators(device).values(), *(each for each in own if isinstance(each, torch.Generator))]
        self._torch = [(each, each.get_state()) for each in generators]
        self._own = [(each, each.bit_generator.state) for each in own if isinstance(each, numpy.random.Generator)]
        self._python, self._numpy = random.getstate(), numpy.random.get_state()

    def moved_beside_torch(self) -> bool:
        """Whether Python's generator or NumPy's has been drawn from since."""
        _, numbers, *place = self._numpy
        _, numbers_now, *place_now = numpy.random.get_state()
        moved = place != place_now or not numpy.array_equal(numbers, numbers_now)
        return moved or random.getstate() != self._python

    def restore(self) -> None:
        """Put all of them back."""
        for generator, state in self._torch:
            generator.set_state(state)
        for other, place in self._own:
            other.bit_generator.state = place
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
