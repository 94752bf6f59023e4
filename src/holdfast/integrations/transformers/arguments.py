"""What a `ReplayTrainer` can be told."""

from dataclasses import dataclass, field

from holdfast.errors import UsageError

__all__ = ["BETAS", "ReplayArguments"]

BETAS = {"kl": 50.0, "mse": 0.2, "linf": 0.2}
"""The weight of a regularizer on the 20 largest logits of a token that was the best of those tried: tuning.jsonl in
results/language. kl is divided by the number of classes, which are these 20 and the rest, so that its weight is
large."""


def _help(text: str) -> dict[str, str]:
    """What `HfArgumentParser` shows for a field."""
    return {"help": text}


@dataclass
class ReplayArguments:
    """What a `ReplayTrainer` stores and replays. `HfArgumentParser` makes command-line options of it.

    loss = CE(minibatch) + alpha * CE(draw) + beta * regularizer(outputs now, outputs then; draw)

    With `beta=None`, the weight is the best that was found with the 20 largest logits of each token: 50 for "kl", 0.2
    for "mse" and "linf". It is 1 for other regularizers, and where whole outputs are stored.

    CE is the mean over supervised tokens. Without a regularizer, the loss is (B CE(minibatch) + B alpha CE(draw)) /
    (B + R), with B samples observed and R drawn: the same gradient up to a constant factor.
    """

    buffer_size: int = field(metadata=_help("how many samples are stored"))
    replay: float = field(default=0.25, metadata=_help("samples drawn per step, as a share of the minibatch"))
    regularizer: str | None = field(
        default="kl", metadata=_help("holds the outputs for stored samples where they were; None for replay alone")
    )
    alpha: float = field(default=1.0, metadata=_help("weight of the loss on the draw"))
    beta: float | None = field(
        default=None, metadata=_help("weight of the regularizer; None for the best one that was found for it")
    )
    top_k: int | None = field(
        default=20, metadata=_help("logits stored per token, the largest ones; None for all of them")
    )
    storage: str = field(
        default="device", metadata=_help('where samples are stored: "device", "host", or the path of a folder')
    )
    buffer_policy: str = field(default="reservoir", metadata=_help('"reservoir", "window" or "decay"'))
    buffer_from: str | None = field(
        default=None, metadata=_help("folder of an earlier run, or of its checkpoint, whose buffer is continued")
    )
    fixed_length: bool = field(
        default=False, metadata=_help("all samples are as long as the first: stored with their padding, drawn faster")
    )
    seed: int | None = field(default=None, metadata=_help("decides what is stored and drawn; None for the trainer's"))

    def __post_init__(self) -> None:
        if not 0 < self.replay <= 1:
            raise UsageError(f"replay is a share of the minibatch, above 0 and at most 1, not {self.replay}.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, or None to store all logits, not {self.top_k}.")
