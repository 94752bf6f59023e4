"""What is stored of a network's outputs, and how stored ones are compared with those it has now."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.learners.losses import widen
from holdfast.learners.positions import IGNORED, Positions
from holdfast.learners.scores import LIMIT, Scores, largest, normalizer, score
from holdfast.nested import Nested
from holdfast.ranks import to_device

__all__ = ["Answers", "Looked", "TopK", "answers_of"]


class Answers:
    """A way to store outputs, and to compare them with later ones."""

    columns: ClassVar[tuple[str, ...]] = ("logits",)
    """What the buffer calls the tensors that have positions."""
    as_they_are: bool = False
    """Whether outputs are stored without any change."""

    def store(self, outputs: Tensor, positions: Positions | None, logs: Tensor | None = None) -> Nested:
        """What the buffer gets of outputs (B, ...); `logs` are their log-probabilities (B, ..., C), if known."""
        raise NotImplementedError

    def compare(
        self, now: Tensor, stored: Nested, positions: Positions | None, counted: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """The outputs of a draw as they are now, and as they were stored.

        With positions, both are (rows, classes), with a row for each position that is `counted`. `kind` is what the
        regularizer compares, see `holdfast.regularizers.compares`.
        """
        raise NotImplementedError


class Whole(Answers):
    """Outputs that are stored whole: as they are, in another type, or as a pair of functions makes them smaller."""

    def __init__(
        self, encode: Callable[[Tensor], Nested] | None = None, decode: Callable[[Nested], Tensor] | None = None
    ) -> None:
        self.encode, self.decode = encode, decode
        self.as_they_are = encode is None

    def store(self, outputs: Tensor, positions: Positions | None, logs: Tensor | None = None) -> Nested:
        """What `encode` makes of the outputs."""
        return outputs.detach() if self.encode is None else self.encode(outputs.detach())

    def compare(
        self, now: Tensor, stored: Nested, positions: Positions | None, counted: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """All outputs, those of the past as `decode` gives them back."""
        then = stored if self.decode is None else self.decode(stored)
        if not isinstance(then, Tensor):
            raise UsageError("the buffer holds other answers than this learner stores: use it as before, or another.")
        if positions is None or counted is None:
            _check_width(now, then, range(now.dim()))
            return _of_one_type(now, then)
        now, then = positions.last(now), positions.last(then)
        _check_width(now, then, (0, -1))
        now, counted = _cut(now, counted, then.shape[1:-1])
        return _of_one_type(now[counted], then[counted])


class Looked(NamedTuple):
    """What is known of drawn answers before the model has computed new ones. A row is a position of a sample."""

    classes: list[int]
    """How many classes each sample was stored with."""
    places: Tensor
    """Classes whose logits are stored, (rows, k) int64."""
    counted: Tensor
    """Which rows count, int64."""
    then: Tensor
    """The stored logits of the rows that count, (counted, k); with the rest as a last column if `with_rest`."""
    with_rest: bool


@dataclass(frozen=True)
class TopK(Answers):
    """Of each position the `k` largest logits, which classes they belong to, and the rest as one number.

    A position takes 6 bytes for each of the k, and 2 more: values and the logarithm of the sum of exp(logit) over all
    other classes are stored in half precision.
    """

    k: int

    columns: ClassVar[tuple[str, ...]] = ("logits['values']", "logits['indices']", "logits['rest']")

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"TopK needs at least 1 logit of each position, not {self.k}.")

    @torch.no_grad()
    def store(self, outputs: Tensor, positions: Positions | None, logs: Tensor | None = None) -> Nested:
        """Values and indices (B, ..., k), rest (B, ...), and the number of classes (B,)."""
        assert positions is not None
        outputs = positions.last(widen(outputs.detach()))
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

    def compare(
        self, now: Tensor, stored: Nested, positions: Positions | None, counted: Tensor | None, kind: str
    ) -> tuple[Tensor, Tensor]:
        """The stored logits and those of the same classes now, (rows, k).

        For a regularizer that compares probabilities, (rows, k + 1): the last column is the rest, so that a softmax
        gives the stored classes their probabilities, and the rest the sum of all others. There is no rest of k classes.
        """
        assert positions is not None
        assert counted is not None
        now, looked = positions.last(now), self.look(stored, counted, kind)
        self.check_width(now, looked)
        flat = now.flatten(0, -2)
        nothing = torch.full((len(flat),), IGNORED, device=flat.device)
        return self.pair(score(flat, nothing, 0, None, looked.places, looked.with_rest), looked)

    def look(self, stored: Nested, counted: Tensor, kind: str) -> Looked:
        """What `pair` needs of stored answers, at the positions that are `counted`.

        Waits for the device, once: call it before the forward pass, while the device has nothing else to do.
        """
        if not isinstance(stored, Mapping) or set(stored) != {"values", "indices", "rest", "classes"}:
            raise UsageError("the buffer holds other answers than TopK stores: use it as before, or another buffer.")
        stored_at = _fill_up(torch.ones_like(stored["rest"], dtype=torch.bool), counted.shape)
        facts = torch.cat([(counted & stored_at).flatten(), stored["classes"]]).cpu()  # bools become whole numbers
        counts, widths = torch.split(facts, [counted.numel(), len(stored["classes"])])
        rows = to_device(counts.nonzero().squeeze(1), counted.device)
        values, indices = (_fill_up(stored[name], counted.shape).flatten(0, -2) for name in ("values", "indices"))
        then, classes = values.index_select(0, rows), widths.tolist()
        # Where all classes are stored, -65504 for nothing left would be all that remains of a normalised row.
        with_rest = kind == "probabilities" and values.shape[1] < max(classes)
        if with_rest:
            rest = _fill_up(stored["rest"], counted.shape).flatten().index_select(0, rows)
            then = torch.cat([then, rest[:, None]], 1)
        return Looked(classes, indices.long(), rows, then, with_rest)

    def check_width(self, now: Tensor, looked: Looked) -> None:
        """Raise unless outputs (..., C) have as many classes as the stored ones."""
        if any(each != now.shape[-1] for each in looked.classes):
            raise _other_width(str(now.shape[-1]), str(max(looked.classes)))

    def pair(self, scores: Scores, looked: Looked) -> tuple[Tensor, Tensor]:
        """What `compare` returns, from the scores at the places that were looked up."""
        now = torch.cat([scores.chosen, scores.rest[:, None]], 1) if looked.with_rest else scores.chosen
        return now.index_select(0, looked.counted), looked.then.to(now.dtype)


def _of_one_type(now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type of the two: PyTorch 2.6 cannot differentiate a loss of two types."""
    wide = torch.promote_types(now.dtype, then.dtype)
    return now.to(wide), then.to(wide)


def answers_of(given: Any) -> Answers:
    """What somebody means by `answers`: None, a type, `TopK`, or a pair of functions."""
    if isinstance(given, Answers):
        return given
    if given is None:
        return Whole()
    if isinstance(given, torch.dtype) and given.is_floating_point:
        limit = torch.finfo(given).max
        return Whole(lambda outputs: outputs.clamp(-limit, limit).to(given), widen)
    if isinstance(given, tuple) and len(given) == 2 and all(map(callable, given)):
        return Whole(*given)
    raise UsageError(
        f"answers must be a floating-point type such as torch.bfloat16, holdfast.TopK(20), or a pair of functions "
        f"(encode, decode), not {given!r}."
    )


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
        raise _other_width(*("x".join(map(str, each.shape[1:])) for each in (now, then)))


def _other_width(now: str, then: str) -> UsageError:
    return UsageError(
        f"the model now has {now} outputs, but the buffer holds logits of {then}; start a new learner after changing "
        'the head, or let the learner change it, with head="classifier" or what its name is.'
    )
