"""What a model still knows of earlier data, in the logs of its Trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import TrainerCallback

from holdfast.errors import UsageError
from holdfast.integrations.transformers.language_model import IGNORED, LABELS, targets

__all__ = ["EarlierPerplexity"]


class EarlierPerplexity(TrainerCallback):
    """Logs the perplexity of held-out samples of earlier data, as perplexity_code for a slice named "code".

        ReplayTrainer(..., callbacks=[EarlierPerplexity({"code": code, "prose": prose})])

    Slices are data sets as the trainer evaluates them. They are measured when training begins, whenever the trainer
    evaluates, and after each epoch. With a Trainer without `ReplayMixin`, give it as well:
    `trainer.add_callback(EarlierPerplexity(slices, trainer))`. `history` holds (step, perplexity of each slice).
    """

    def __init__(self, slices: Mapping[str, Any], trainer: Any = None) -> None:
        self.slices, self.trainer = dict(slices), trainer
        self.history: list[tuple[int, dict[str, float]]] = []
        self._measured = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where the model begins."""
        self._measured = -1
        self._report(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure beside the trainer's own evaluation, and after each epoch."""
        self._report(state.global_step)

    on_epoch_end = on_evaluate

    def measure(self) -> dict[str, float]:
        """The perplexity of each slice with the model as it is now."""
        if self.trainer is None:
            raise UsageError(
                "EarlierPerplexity belongs to no trainer: give it one, EarlierPerplexity(slices, trainer)."
            )
        return {name: self._perplexity(each) for name, each in self.slices.items()}

    def _report(self, step: int) -> None:
        if step == self._measured:
            return
        self._measured = step
        found = self.measure()
        self.history.append((step, found))
        self.trainer.log({f"perplexity_{name}": value for name, value in found.items()})

    @torch.no_grad()
    def _perplexity(self, samples: Any) -> float:
        """exp of the mean cross-entropy over supervised tokens."""
        trainer, model = self.trainer, self.trainer.model
        training, sums = model.training, torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        model.eval()
        for batch in trainer.get_eval_dataloader(samples):
            inputs = trainer._prepare_inputs(batch)
            labels = targets(model, inputs)
            logits = model(**{name: part for name, part in inputs.items() if name not in LABELS}).logits
            losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
            each = torch.stack([losses, labels.flatten() != IGNORED]).unflatten(1, (len(labels), -1)).sum(2)
            # Of several ranks, the last minibatches are filled up with samples from the beginning, which do not count.
            sums += trainer.accelerator.gather_for_metrics(each.T).sum(0)
        model.train(training)
        total, count = sums.tolist()
        return math.exp(min(total / max(count, 1), 700.0))
