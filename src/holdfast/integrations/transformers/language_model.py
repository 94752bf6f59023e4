"""What replay must know of a language model: the label of each of its outputs, and its limits."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from holdfast.learners import next_tokens

__all__ = ["IGNORED", "LABELS", "longest", "targets", "text_config", "vocabulary_size"]

IGNORED = -100
"""The label of positions that are not supervised."""
LABELS = ("labels", "shift_labels")
"""What a collator calls them."""


def text_config(model: Any) -> Any:
    """The part of a model's config that is about text: models of several kinds of input have one for each."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def longest(model: Any) -> int | None:
    """The most tokens of a sample that the model allows, if it says so."""
    most = getattr(text_config(model), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def vocabulary_size(model: Any) -> int | None:
    """The number of tokens."""
    size = getattr(text_config(model), "vocab_size", None)
    return None if size is None else int(size)


def _is_causal(model: Any) -> bool:
    """Whether the model predicts the next token, so that its labels are shifted by one."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inside).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def targets(model: Any, inputs: Mapping[str, Any]) -> Any:
    """The label of every output: of causal models, outputs are for the next token. None if there are no labels."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    shifted = "shift_labels" in inputs or labels is None or labels.dim() == 1 or not _is_causal(model)
    return labels if shifted else next_tokens(labels)
