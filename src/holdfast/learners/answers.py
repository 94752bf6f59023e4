"""What is stored of a network's outputs, and how stored ones are compared with those it has now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.buffer import Draw
from holdfast.errors import UsageError
from holdfast.learners.losses import widen
from holdfast.learners.positions import IGNORED, Positions
from holdfast.learners.scores import LIMIT, Past, Reading, largest, normalizer, other_width
from holdfast.nested import Nested
from holdfast.ranks import to_device

__all__ = ["Answers", "Largest", "TopK", "answers_of"]


class Answers:
    """A way to store outputs, and to compare them with later ones."""

    name: str
    """The option `answers` in words; a checkpoint is loaded only where these are the same."""
    columns: ClassVar[tuple[str, ...]] = ("logits",)
    """What the buffer calls the tensors that have positions."""

    def store(self, outputs: Tensor, logs: Tensor | None = None) -> Nested:
        """What the buffer gets of outputs (B, ...); `logs` are their log-probabilities (B, ..., C), if known."""
        raise NotImplementedError

    def compare(self, now: Tensor, drawn: Draw, kind: str) -> tuple[Tensor, Tensor]:
        """The outputs of a draw as they are now, and as they were stored.

        With positions, both are (rows, classes), with a row for each position that counts. `kind` is what the
        regularizer compares, see `holdfast.regularizers.compares`.
        """
        raise NotImplementedError


class Whole(Answers):
    """Outputs that are stored whole: as they are, in another type, or as a pair of functions makes them smaller."""

    def __init__(
        self,
        positions: Positions | None,
        name: str,
        encode: Callable[[Tensor], Nested] | None = None,
        decode: Callable[[Nested], Tensor] | None = None,
    ) -> None:
        self.positions, self.name, self.encode, self.decode = positions, name, encode, decode

    def store(self, outputs: Tensor, logs: Tensor | None = None) -> Nested:
        """What `encode` makes of the outputs."""
        return outputs.detach() if self.encode is None else self.encode(outputs.detach())

    def compare(self, now: Tensor, drawn: Draw, kind: str) -> tuple[Tensor, Tensor]:
        """All outputs, those of the past as `decode` gives them back."""
        stored = _logits(drawn)
        then = stored if self.decode is None else self.decode(stored)
        if not isinstance(then, Tensor):
            raise UsageError("the buffer holds other answers than this learner stores: use it as before, or another.")
        if self.positions is None:
            _check_width(now, then, range(now.dim()))
            return _of_one_type(now, then)
        now, then = self.positions.last(now), self.positions.last(then)
        _check_width(now, then, (0, -1))
        now, counted = _cut(now, self.positions.counted(drawn.x, drawn.y), then.shape[1:-1])
        return _of_one_type(now[counted], then[counted])


@dataclass(frozen=True)
class TopK:
    """Of each position the `k` largest logits, which classes they belong to, and the rest as one number.

    A position takes 6 bytes for each of the k, and 2 more: values and the logarithm of the sum of exp(logit) over all
    other classes are stored in half precision.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"TopK needs at least 1 logit of each position, not {self.k}.")


class Largest(Answers):
    """What `TopK` describes, of outputs with these positions."""

    columns = ("logits['values']", "logits['indices']", "logits['rest']")

    def __init__(self, given: TopK, positions: Positions) -> None:
        self.name, self.k, self.positions = repr(given), given.k, positions

    @torch.no_grad()
    def store(self, outputs: Tensor, logs: Tensor | None = None) -> Nested:
        """Values and indices (B, ..., k), rest (B, ...), and the number of classes (B,)."""
        outputs = self.positions.last(widen(outputs.detach()))
        classes = outputs.shape[-1]
        if self.k > classes:
            raise UsageError(
                f"TopK({self.k}) asks for more logits than the {classes} classes have: choose a smaller k."
            )
        values, indices = largest(outputs, self.k)
        # From a log-probability the normaliser is known at once; without one, it takes several more readings.
        whole = outputs.logsumexp(-1) if logs is None else normalizer(values, logs.gather(-1, indices))
        rest = _mass_left(whole, values.logsumexp(-1))
        if self.k == classes:
            rest.fill_(-LIMIT)
        width = torch.full((len(outputs),), classes, dtype=torch.int32, device=outputs.device)
        return {"values": _half(values), "indices": indices.int(), "rest": _half(rest), "classes": width}

    def compare(self, now: Tensor, drawn: Draw, kind: str) -> tuple[Tensor, Tensor]:
        """The stored logits and those of the same classes now, (rows, k).

        For a regularizer that compares probabilities, (rows, k + 1): the last column is the rest, so that a softmax
        gives the stored classes their probabilities, and the rest the sum of all others. Of k classes, no rest is left.
        """
        past = self.look(drawn, kind)
        nothing = torch.full(self.positions.last(now).shape[:-1], IGNORED, device=now.device)
        return Reading(self.positions, now, nothing, 0, past=past).pair(past)

    def look(self, drawn: Draw, kind: str) -> Past:
        """What can be known of a draw before the model has computed its outputs.

        Waits for the device, once: call it before the forward pass, while the device has nothing else to do.
        """
        stored, counted = _logits(drawn), self.positions.counted(drawn.x, drawn.y)
        if not isinstance(stored, Mapping) or set(stored) != {"values", "indices", "rest", "classes"}:
            raise UsageError("the buffer holds other answers than TopK stores: use it as before, or another buffer.")
        stored_at = _fill_up(torch.ones_like(stored["rest"], dtype=torch.bool), counted.shape)
        facts = torch.cat([(counted & stored_at).flatten(), stored["classes"]]).cpu()  # bools become whole numbers
        counts, widths = torch.split(facts, [counted.numel(), len(stored["classes"])])
        rows = to_device(counts.nonzero().squeeze(1), counted.device)
        values, indices = (_fill_up(stored[name], counted.shape).flatten(0, -2) for name in ("values", "indices"))
        then, classes = values.index_select(0, rows), widths.tolist()
        # Where all classes are stored, the rest is -65504: in a row that is normalised, it would hide the others.
        with_rest = kind == "probabilities" and values.shape[1] < max(classes)
        if with_rest:
            rest = _fill_up(stored["rest"], counted.shape).flatten().index_select(0, rows)
            then = torch.cat([then, rest[:, None]], 1)
        return Past(classes, indices.long(), rows, then, with_rest)


def _of_one_type(now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type of the two: PyTorch 2.6 cannot differentiate a loss of two types.

    Outputs in 16 bits stay so here: they are widened together with the loss, which a compiler makes one kernel.
    """
    wide = torch.promote_types(now.dtype, then.dtype)
    return now if torch.finfo(now.dtype).bits < 32 else now.to(wide), then.to(wide)


def answers_of(given: Any, positions: Positions | None) -> Answers:
    """What somebody means by `answers`: None, a type, `TopK`, or a pair of functions."""
    if given is None:
        return Whole(positions, "outputs as they are")
    if isinstance(given, TopK):
        if positions is None:
            raise UsageError("TopK stores logits of every position: give class_dim, which says where the classes are.")
        return Largest(given, positions)
    if isinstance(given, torch.dtype) and given.is_floating_point:
        limit = torch.finfo(given).max
        return Whole(positions, f"outputs in {given}", lambda outputs: outputs.clamp(-limit, limit).to(given), widen)
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return Whole(positions, "what a function makes of outputs", *given)
    raise UsageError(
        f"answers must be a floating-point type such as torch.bfloat16, holdfast.TopK(20), or a pair of functions "
        f"(encode, decode), not {given!r}."
    )


def _logits(drawn: Draw) -> Nested:
    """What is stored of a draw's outputs."""
    if drawn.logits is None:
        raise UsageError(
            "the buffer holds samples without logits, as ExperienceReplay stores them; continue with that, or "
            "give this learner a buffer of its own."
        )
    return drawn.logits


def _cut(now: Tensor, counted: Tensor, lengths: torch.Size) -> tuple[Tensor, Tensor]:
    """Outputs and what counts of them at the positions that are stored: a draw may have been filled up since."""
    within = tuple(slice(length) for length in lengths)
    return now[:, *within], counted[:, *within]


def _fill_up(part: Tensor, shape: torch.Size) -> Tensor:
    """What is stored, with 0 at positions that a draw was filled up with since; itself if there are none."""
    if part.shape[: len(shape)] == shape:
        return part
    whole = part.new_zeros((*shape, *part.shape[len(shape) :]))
    whole[:, *(slice(length) for length in part.shape[1 : len(shape)])] = part
    return whole


def _mass_left(whole: Tensor, part: Tensor) -> Tensor:
    """log(exp(whole) - exp(part)).

    A rest below the precision of the numbers counts as that precision: no probability notices it.
    """
    share = (part - whole).exp().clamp(max=1 - torch.finfo(whole.dtype).eps)
    return whole + torch.log1p(-share)


def _half(values: Tensor) -> Tensor:
    """In half precision; numbers beyond it become its largest."""
    return values.clamp(-LIMIT, LIMIT).half()


def _check_width(now: Tensor, then: Tensor, dims: Any) -> None:
    """Raise unless outputs still have the shape in these dimensions that they had when they were stored."""
    if now.dim() != then.dim() or any(now.shape[dim] != then.shape[dim] for dim in dims):
        raise other_width(*("x".join(map(str, each.shape[1:])) for each in (now, then)))
