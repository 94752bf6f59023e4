"""The buffer of a `ReplayTrainer` as a file beside the model, and whether a trainer may continue it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.buffer.layout import check_schema, columns_of, is_answer
from holdfast.errors import UsageError
from holdfast.integrations.transformers.arguments import ReplayArguments
from holdfast.integrations.transformers.language_model import vocabulary_size

__all__ = ["FILE", "check_same", "read", "write"]

FILE = "holdfast.safetensors"
"""Its name in a checkpoint of the trainer."""
KIND = "buffer of a language model"


def write(folder: Path, state: dict[str, Any], trainer: Any) -> None:
    """Write the state of a trainer's buffer to `folder`, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write(folder / FILE, KIND, {"buffer": state}, _about(trainer))


def read(folder: Path, trainer: Any) -> dict[str, Any]:
    """The state of the buffer that was written to `folder`, if the trainer has the same vocabulary and tokenizer."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no buffer: {FILE} is missing. It was written by a trainer without replay, or with "
            "save_only_model. To begin with an empty buffer, load the model from there and leave out "
            "resume_from_checkpoint and buffer_from."
        )
    found, here = checkpoint.read(path, KIND), _about(trainer)
    for name, what in (("vocabulary", "a vocabulary of"), ("tokenizer", "the tokenizer")):
        then, now = found.about.get(name), here[name]
        if None not in (then, now) and then != now:
            raise UsageError(
                f"the buffer in {folder} was written with {what} {then}, but here it is {now}: its tokens would mean "
                "something else. Use the tokenizer and the vocabulary of then, or begin with an empty buffer."
            )
    state: dict[str, Any] = found.state["buffer"]
    return state


def check_same(state: dict[str, Any], given: ReplayArguments, sequences: bool) -> None:
    """Refuse the state of a buffer that was made with other arguments than these; names those that differ."""
    check_schema(state)
    columns = columns_of(state)
    outputs = {name: column for name, column in columns.items() if is_answer(name)}
    then: dict[str, Any] = {"buffer_size": state["capacity"], "buffer_policy": state.get("policy", "reservoir")}
    now: dict[str, Any] = {"buffer_size": given.buffer_size, "buffer_policy": given.buffer_policy}
    if sequences:
        then["fixed_length"], now["fixed_length"] = "padding" not in state, given.fixed_length
    if columns and bool(outputs) != (given.regularizer is not None):
        then["regularizer"], now["regularizer"] = "one" if outputs else None, given.regularizer
    elif outputs and sequences:
        values = outputs.get("logits['values']")
        then["top_k"], now["top_k"] = None if values is None else values.shape[-1], given.top_k
    if differing := [name for name in then if then[name] != now[name]]:
        before, here = (", ".join(f"{name}={values[name]}" for name in differing) for values in (then, now))
        raise UsageError(
            f"the buffer to continue was made with {before}; here it is {here}. Give ReplayArguments what it was made "
            "with, or begin with an empty buffer: load the model alone, and leave out resume_from_checkpoint and "
            "buffer_from."
        )


def _about(trainer: Any) -> dict[str, Any]:
    """What stored tokens mean: the size of the vocabulary, and the fingerprint of the trainer's tokenizer."""
    return {"vocabulary": vocabulary_size(trainer.model), "tokenizer": _fingerprint(trainer.processing_class)}


def _fingerprint(tokenizer: Any) -> str | None:
    """Of how text becomes tokens; padding and truncation, which change with every call, do not count."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        described = json.loads(backend.to_str())
        content = json.dumps({key: value for key, value in described.items() if key not in ("padding", "truncation")})
    return hashlib.sha256(content.encode()).hexdigest()[:16]
