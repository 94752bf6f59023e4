"""Holdfast in the Trainer of transformers: replay and consistency for language models.

Needs the extra `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import needing

with needing("transformers", "this needs transformers"):
    from transformers import Trainer  # noqa: F401

from holdfast.integrations.transformers.arguments import ReplayArguments
from holdfast.integrations.transformers.perplexity import EarlierPerplexity
from holdfast.integrations.transformers.trainer import ReplayMixin, ReplayTrainer

if TYPE_CHECKING:
    from trl import SFTTrainer

__all__ = ["EarlierPerplexity", "ReplayArguments", "ReplayMixin", "ReplaySFTTrainer", "ReplayTrainer"]


def __getattr__(name: str) -> Any:
    """`ReplaySFTTrainer` is made when it is asked for: trl takes long to import."""
    if name != "ReplaySFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("transformers", "ReplaySFTTrainer needs trl"):
        from trl import SFTTrainer
    made = type(name, (ReplayMixin, SFTTrainer), {"__doc__": _SFT, "__module__": __name__})
    globals()[name] = made
    return made


_SFT = "The SFTTrainer of trl with replay; `replay_args` say how. See `ReplayMixin`. It logs no entropy and accuracy."

if TYPE_CHECKING:

    class ReplaySFTTrainer(ReplayMixin, SFTTrainer):
        """The SFTTrainer of trl with replay."""
