"""A trained model as a file that runs without Holdfast: torch.export, or ONNX. Written, read back, compared."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as nesting

from holdfast.errors import HoldfastError, UsageError
from holdfast.files import replacing
from holdfast.registry import unknown_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["FORMATS", "Exported", "export", "format_of"]

FORMATS = {"torch": ".pt2", "onnx": ".onnx"}
"""Formats, and how their files' names end."""

Answer = Callable[[Any], Sequence[Tensor]]
"""A batch of inputs -> the tensors of the output, in order."""

Exercise = tuple[Any, Sequence[Tensor]]
"""A batch of inputs, and the tensors of the model's output."""

KEY = "holdfast"  # under which a file says how the model came about


@dataclass(frozen=True)
class Exported:
    """A file that was written and compared with its model."""

    path: Path
    format: str
    size: int
    """Bytes."""
    difference: float | None
    """The largest difference between an answer of the file and the model's; None if it could not be run here."""


class _Served(nn.Module):
    """A model behind the view it wants its inputs in."""

    def __init__(self, model: nn.Module, view: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.view = model, view

    def forward(self, x: Any) -> Any:
        return self.model(self.view(x))


def export(
    model: nn.Module,
    example: Any,
    path: Path | str,
    *,
    format: str | None = None,
    view: Callable[[Any], Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Exported:
    """Write `model` to the file `path`, in evaluation mode, for batches of any size; returns what was written.

    `example` is a batch of inputs as the file will get them, a tensor or dicts and tuples of tensors; `view` turns
    them into what the network sees and becomes part of the file. `format` is "torch" (read with torch.export.load) or
    "onnx" (extra `onnx`); by default the file's name decides: .pt2 or .onnx. `about` is kept in the file as JSON.

    Nothing but a file that gave the model's answers, for several batch sizes, gets the name `path`.
    """
    path = Path(path)
    kind = format_of(path, format)
    model = getattr(model, "_orig_mod", model)  # of torch.compile, which is not for files
    served = deepcopy(model if view is None else _Served(model, view)).cpu().eval()
    x = _batch(example)
    with torch.no_grad(), _quiet():
        try:
            # First of all: views may make their constants when first used, which must not be while they are traced.
            exercises = _exercises(served, x)
            program = torch.export.export(served, (x,), dynamic_shapes=_any_size(x))
            content = (_torch_file if kind == "torch" else _onnx_file)(program, x, json.dumps(dict(about or {})))
            return _keep(content, path, kind, exercises)
        except HoldfastError:
            raise
        except Exception as error:  # what tracers and runtimes raise has no base in common
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise HoldfastError(
                f"the model cannot be exported to {kind}: {type(error).__name__}: {reason}. "
                "The forward pass must not depend on the values of tensors, and must take batches of any size."
            ) from error


def format_of(path: Path, format: str | None = None) -> str:
    """The format that was named, or else that of the file's name."""
    if format is not None:
        if format not in FORMATS:
            raise unknown_name("format", format, list(FORMATS))
        return format
    for name, suffix in FORMATS.items():
        if path.suffix == suffix:
            return name
    raise UsageError(f"'{path.name}' does not say which format is wanted: end it with .pt2 or .onnx, or name a format.")


def _batch(example: Any) -> Any:
    """The example on the CPU with two rows or more: a batch of one would be taken for a batch of always one."""
    leaves = nesting.tree_leaves(example)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise UsageError("the example must be a batch of inputs: a tensor with a row per sample, or made of such.")
    if len({len(leaf) for leaf in leaves}) > 1 or not len(leaves[0]):
        raise UsageError("the example must have as many rows, one or more, in each of its tensors.")
    rows = torch.arange(max(2, len(leaves[0]))) % len(leaves[0])
    return nesting.tree_map(lambda leaf: leaf.detach().cpu()[rows], example)


def _any_size(x: Any) -> tuple[Any]:
    """What of the inputs may vary: the number of rows."""
    batch = torch.export.Dim("batch")
    return (nesting.tree_map(lambda _: {0: batch}, x),)


def _exercises(model: nn.Module, x: Any) -> list[Exercise]:
    """Batches of several sizes made of the example's rows, with the model's answers to them."""
    count = len(nesting.tree_leaves(x)[0])
    made: list[Exercise] = []
    for size in (count, 1, count + 1):
        rows = torch.arange(size) % count
        part = nesting.tree_map(lambda leaf, rows=rows: leaf[rows], x)
        made.append((part, nesting.tree_leaves(model(part))))
    return made


def _torch_file(program: ExportedProgram, x: Any, about: str) -> bytes:
    content = BytesIO()
    torch.export.save(program, content, extra_files={KEY: about})
    return content.getvalue()


def _onnx_file(program: ExportedProgram, x: Any, about: str) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HoldfastError("ONNX needs packages: install the extra 'onnx' (pip install 'holdfast[onnx]').") from error
    made = torch.onnx.export(
        program,
        input_names=["input"] if isinstance(x, Tensor) else None,
        output_names=["logits"] if len(program.graph_signature.user_outputs) == 1 else None,
        dynamo=True,
        verbose=False,
    )
    assert made is not None
    made.model.metadata_props[KEY] = about
    content: bytes = made.model_proto.SerializeToString()
    return content


def _keep(content: bytes, path: Path, kind: str, exercises: Sequence[Exercise]) -> Exported:
    """Write the file under another name, compare its answers with the model's, and only then give it its own."""
    try:
        with replacing(path) as scratch:
            scratch.write_bytes(content)
            answer = _torch_answers(scratch) if kind == "torch" else _onnx_answers(scratch)
            difference = None if answer is None else _difference(answer, kind, exercises)
    except OSError as error:
        raise HoldfastError(
            f"the model could not be written to {path}: {error.strerror or error}. Choose another place."
        ) from error
    return Exported(path, kind, len(content), difference)


def _difference(answer: Answer, kind: str, exercises: Sequence[Exercise]) -> float:
    """The largest difference between the file's answers and the model's; raises if they are not the same."""
    largest = 0.0
    for part, expected in exercises:
        for own, theirs in zip(expected, answer(part), strict=True):
            difference, size = _distance(own.double(), theirs.double())
            allowed = max(1e-4, 8 * torch.finfo(own.dtype).eps) if own.is_floating_point() else 0.0
            if not difference <= allowed * max(1.0, size):
                raise HoldfastError(
                    f"the {kind} file does not answer as the model does: it differs by {difference:.3g} in a batch of "
                    f"{len(own)}. It was not kept."
                )
            largest = max(largest, difference)
    return largest


def _distance(own: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of finite values and the largest of these; infinite if others are not the same.

    Infinity is the answer of models that rule classes out, and its difference from itself is not a number.
    """
    if own.shape != theirs.shape:
        return math.inf, 0.0
    finite = own.isfinite() & theirs.isfinite()
    if not torch.equal(own[~finite], theirs[~finite]):
        return math.inf, 0.0
    if not finite.any():
        return 0.0, 0.0
    return float((own - theirs)[finite].abs().max()), float(own[finite].abs().max())


def _torch_answers(file: Path) -> Answer:
    program = torch.export.load(BytesIO(file.read_bytes())).module()
    return lambda x: nesting.tree_leaves(program(x))


def _onnx_answers(file: Path) -> Answer | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def answer(x: Any) -> list[Tensor]:
        arrays = [leaf.numpy() for leaf in nesting.tree_leaves(x)]
        return [torch.from_numpy(each) for each in session.run(None, dict(zip(names, arrays, strict=True)))]

    return answer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporters say about their own insides, and about packages nobody needs."""
    chatty = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        chatty.setLevel(level)
