"""A trained model as a file that runs without Holdfast: torch.export or ONNX. The file is read back and compared."""

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

from holdfast.errors import HoldfastError, UsageError, needing
from holdfast.files import replacing, telling
from holdfast.registry import unknown_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["FORMATS", "Exported", "export", "format_of"]

FORMATS = {"torch": ".pt2", "onnx": ".onnx"}
"""Formats and the endings of their files' names."""

Answer = Callable[[Any], Sequence[Tensor]]
"""A batch of inputs -> the tensors of the output, in order."""

Exercise = tuple[Any, Sequence[Tensor]]
"""A batch of inputs, and the tensors of the model's output."""

KEY = "holdfast"  # the entry of a file that says how the model came about


@dataclass(frozen=True)
class Exported:
    """A file whose outputs were compared with those of its model."""

    path: Path
    format: str
    size: int
    """Bytes."""
    difference: float | None
    """The largest difference between an output of the file and of the model; None if it could not be run here."""


class _Served(nn.Module):
    """A model that first applies a view to its inputs."""

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

    `example` is a batch of inputs as the file will get them: a tensor, or dicts and tuples of tensors. `view`, for
    instance a normalisation, is applied to them first and becomes part of the file. `format` is "torch" (read with
    torch.export.load) or "onnx" (extra `onnx`); by default the file's name decides: .pt2 or .onnx. `about` is stored in
    the file as JSON.

    The file gets the name `path` only after it gave the model's outputs for several batch sizes.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"only a torch module can be exported, not a {type(model).__name__}. Of a learner, export "
            "learner.evaluated(). An estimator exports itself: estimator.export(path)."
        )
    path = Path(path)
    kind = format_of(path, format)
    model = getattr(model, "_orig_mod", model)  # a compiled model cannot be exported, the model inside it can
    served = deepcopy(model if view is None else _Served(model, view)).cpu().eval()
    x = _batch(example)
    with torch.no_grad(), _quiet():
        try:
            # Before tracing: a view may create constants at its first use, and must not do so while it is traced.
            exercises = _exercises(served, x)
            rows = {0: torch.export.Dim("batch")}
            any_size = (nesting.tree_map(lambda _: rows, x),)
            # Not strict, as PyTorch 2.6 would be: that refuses Python's own means, such as a hook that looks into a
            # layer. What it would have found out, the comparison of the file with the model does.
            program = torch.export.export(served, (x,), dynamic_shapes=any_size, strict=False)
            content = (_torch_file if kind == "torch" else _onnx_file)(program, x, json.dumps(dict(about or {})))
            return _write(content, path, kind, exercises)
        except HoldfastError:
            raise
        except Exception as error:  # tracers and runtimes raise errors of many types
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            raise HoldfastError(
                f"the model cannot be exported to {kind}: {type(error).__name__}: {reason}. "
                "The forward pass must not depend on the values of tensors, and must take batches of any size."
            ) from error


def format_of(path: Path, format: str | None = None) -> str:
    """The given format, or else that of the file's name."""
    if format is not None:
        if format not in FORMATS:
            raise unknown_name("format", format, list(FORMATS))
        return format
    for name, suffix in FORMATS.items():
        if path.suffix == suffix:
            return name
    raise UsageError(f"the name '{path.name}' has no known format: end it with .pt2 or .onnx, or name a format.")


def _batch(example: Any) -> Any:
    """The example on the CPU with at least two rows: tracing would treat a single row as a fixed size."""
    leaves = nesting.tree_leaves(example)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise UsageError(
            "the example must be a batch of inputs: a tensor with one row per sample, or dicts and tuples of them."
        )
    if len({len(leaf) for leaf in leaves}) > 1 or not len(leaves[0]):
        raise UsageError("all tensors of the example must have the same number of rows, at least one.")
    rows = torch.arange(max(2, len(leaves[0]))) % len(leaves[0])
    return nesting.tree_map(lambda leaf: leaf.detach().cpu()[rows], example)


def _exercises(model: nn.Module, x: Any) -> list[Exercise]:
    """Batches of several sizes made of the example's rows, with the model's outputs."""
    count = len(nesting.tree_leaves(x)[0])
    made: list[Exercise] = []
    for size in (count, 1, count + 1):
        rows = torch.arange(size) % count
        part = nesting.tree_map(lambda leaf, rows=rows: leaf[rows], x)
        outputs = model(nesting.tree_map(torch.clone, part))  # a copy: view and model may work in place
        made.append((part, nesting.tree_leaves(outputs)))
    return made


def _torch_file(program: ExportedProgram, x: Any, about: str) -> bytes:
    content = BytesIO()
    torch.export.save(program, content, extra_files={KEY: about})
    return content.getvalue()


def _onnx_file(program: ExportedProgram, x: Any, about: str) -> bytes:
    with needing("onnx", "ONNX needs packages"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
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


def _write(content: bytes, path: Path, kind: str, exercises: Sequence[Exercise]) -> Exported:
    """Write the file under another name, compare its outputs with the model's, and only then give it its own name."""
    what, advice = f"the model could not be written to {path}", "Choose another place."
    with telling(HoldfastError, what, advice), replacing(path) as scratch:
        scratch.write_bytes(content)
        answer = _torch_answers(scratch) if kind == "torch" else _onnx_answers(scratch)
        difference = None if answer is None else _difference(answer, kind, exercises)
    return Exported(path, kind, len(content), difference)


def _difference(answer: Answer, kind: str, exercises: Sequence[Exercise]) -> float:
    """The largest difference between outputs of the file and of the model; raises if it is more than rounding."""
    largest = 0.0
    for part, expected in exercises:
        for own, theirs in zip(expected, answer(part), strict=True):
            difference = _distance(own.double(), theirs.double())
            allowed = max(1e-4, 8 * torch.finfo(own.dtype).eps) if own.is_floating_point() else 0.0
            size = own.double().nan_to_num(0.0, 0.0, 0.0).abs().max()  # of the finite values
            if not difference <= allowed * max(1.0, float(size)):
                raise HoldfastError(
                    f"the {kind} file does not answer as the model does: it differs by {difference:.3g} in a batch of "
                    f"{len(own)}. It was removed."
                )
            largest = max(largest, difference)
    return largest


def _distance(own: Tensor, theirs: Tensor) -> float:
    """The largest difference; equal infinities do not differ: a model that rules out classes answers -inf."""
    if own.shape != theirs.shape:
        return math.inf
    apart = torch.where(own == theirs, 0.0, (own - theirs).abs())
    return float(apart.nan_to_num(math.inf, math.inf).max())


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
    """Silence what PyTorch's exporters say about themselves and about packages that are not needed."""
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
