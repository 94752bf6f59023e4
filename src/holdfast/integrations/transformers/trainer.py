"""Replay in the loop of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from holdfast.errors import UsageError
from holdfast.integrations.transformers import buffer_file
from holdfast.integrations.transformers.arguments import BETAS, ReplayArguments
from holdfast.integrations.transformers.checks import check_trainer
from holdfast.integrations.transformers.language_model import IGNORED, LABELS, longest, targets
from holdfast.integrations.transformers.perplexity import EarlierPerplexity
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Losses, ReplayLearner, TopK

__all__ = ["ReplayMixin", "ReplayTrainer"]


class ReplayMixin:
    """Replay for any Trainer: `class ReplayTrainer(ReplayMixin, Trainer)`. Evaluation is the Trainer's own.

    Give `replay_args`. `learner` is made at the first step, when the optimiser exists. The buffer takes a step's
    samples after the optimiser has made it, with accumulation those of all its micro-steps. It is a part of every
    checkpoint, as holdfast.safetensors, and `resume_from_checkpoint` continues it. That file holds training samples: do
    not publish it with the model if they are private. Logs show the terms as loss_current, loss_replay and
    loss_consistency. With several processes, all ranks share one buffer.
    """

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    processing_class: Any
    callback_handler: Any
    model_init: Any
    current_gradient_accumulation_steps: int

    def __init__(self, *args: Any, replay_args: ReplayArguments | None = None, **kwargs: Any) -> None:
        if replay_args is None:
            raise UsageError(
                f"{type(self).__name__} needs replay_args, for instance replay_args=ReplayArguments(buffer_size=500)."
            )
        super().__init__(*args, **kwargs)
        self.replay_args = replay_args
        self.learner: ReplayLearner | None = None
        """The learner, once the first step has begun."""
        self._stepping = False
        self._pending: list[Losses] = []
        """The losses of micro-steps whose samples are not yet offered to the buffer."""
        self._sums: dict[str, Tensor] = {}
        """The terms since the last log, summed over micro-steps."""
        self._steps = 0
        check_trainer(self)
        self._saved = self._given()
        """The state of a buffer that the learner to be made continues."""
        self.add_callback(_Commit(self))

    def add_callback(self, callback: Any) -> None:
        """As the Trainer's; a callback of Holdfast learns which trainer it belongs to."""
        super().add_callback(callback)  # type: ignore[misc]
        for each in self.callback_handler.callbacks:
            if isinstance(each, EarlierPerplexity) and each.trainer is None:
                each.trainer = self

    # --- a step ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, with the learner's loss."""
        self._stepping = True
        try:
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._stepping = False
        if self.learner is not None and self.learner.ranks is None:  # now the backward pass keeps the device busy
            self.learner.reserve(self._pending[-1])
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In a training step, the learner's loss; elsewhere that of the Trainer.

        `num_items_in_batch` is the number of supervised tokens of all micro-steps and ranks that make one step: the
        loss of a micro-step counts by its share of them.
        """
        if not self._stepping:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        x, y = self._minibatch(inputs)
        if self.learner is None:
            self.learner = self._make_learner(model, x, y)
        # A group of micro-steps that the end of the data cut short is continued by the next epoch, so it is not alone.
        # Several ranks learn before the backward pass, which waits for all of them, that one of them has no room.
        alone, reserve = self.args.gradient_accumulation_steps == 1, self.learner.ranks is not None
        losses = self.learner.losses(x, y, alone=alone, reserve=reserve)
        if num_items_in_batch is None:  # the Trainer divides by the number of micro-steps
            share, counted = torch.ones((), device=losses.total.device), 1 / self.current_gradient_accumulation_steps
        else:
            share = (y != IGNORED).sum() / num_items_in_batch
            share = share * self.accelerator.num_processes if self.args.average_tokens_across_devices else share
            counted = 1.0
        loss = losses.total * share
        self._remember(losses, share * counted)
        return (loss, {"loss": loss}) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The number of supervised positions. The Trainer counts the first token of GPT-2's samples, which is none."""
        counted = batch_samples
        if batch_samples and isinstance(batch_samples[0].get("labels"), Tensor):
            for batch in batch_samples:
                batch["shift_labels"] = targets(self.model, batch)  # the step need not make them again
            counted = [dict.fromkeys(LABELS, batch["shift_labels"]) for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def _minibatch(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs, which are stored, and the label of every position."""
        labels = targets(self.model, inputs)
        if labels is None:
            raise UsageError(
                "the minibatch has no labels: use a collator that makes them, such as "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )
        x = {name: part for name, part in inputs.items() if name not in LABELS}
        for name, part in x.items():
            if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != len(labels):
                raise UsageError(
                    f"{name} cannot be stored with a sample: replay needs tensors with one row for each of the "
                    f"{len(labels)} samples of the minibatch. Leave it out in the collator."
                )
        length, most = max((part.shape[1] for part in x.values() if part.dim() > 1), default=0), longest(self.model)
        if most is not None and length > most:
            raise UsageError(
                f"a sample of {length} tokens is longer than the model allows, which is {most}: cut samples to that "
                "length when you tokenize them, or give the model more positions."
            )
        return x, labels

    def _make_learner(self, model: Any, x: Mapping[str, Tensor], y: Tensor) -> ReplayLearner:
        """The learner of a model that the Trainer has prepared, with the buffer of a checkpoint if one was loaded."""
        given, sequences = self.replay_args, y.dim() > 1
        options: dict[str, Any] = {
            "buffer_size": given.buffer_size,
            "replay": given.replay,
            "storage": given.storage if given.storage in ("device", "host") else Path(given.storage),
            "buffer_policy": given.buffer_policy,
            "seed": self.args.seed if given.seed is None else given.seed,
        }
        inside = getattr(model, "_orig_mod", model)
        if inside is not model and isinstance(inside, DistributedDataParallel):
            model, options["network"] = inside, model
        if sequences:
            options["class_dim"] = -1
            if not given.fixed_length:
                options["padding"] = {name: self._pad_value(name) for name, part in x.items() if part.dim() > 1} | {
                    "y": IGNORED
                }
        if given.regularizer is None:
            learner: ReplayLearner = ExperienceReplay(
                model, self.optimizer, alpha=given.alpha / given.replay, **options
            )
        else:
            found = 1.0
            if sequences and given.top_k is not None:
                options["answers"] = TopK(given.top_k)
                found = BETAS.get(given.regularizer, found)
            beta = found if given.beta is None else given.beta
            learner = ConsistencyReplay(
                model, self.optimizer, regularizer=given.regularizer, alpha=given.alpha, beta=beta, **options
            )
        if self._saved is not None:
            buffer_file.check_same(self._saved, given, sequences)
            learner.buffer.load_state_dict(self._saved)
            learner.buffer.commit()
            self._saved = None
        return learner

    def _pad_value(self, name: str) -> int:
        """What short samples are filled up with: the padding token where there are tokens, else 0."""
        if not name.endswith("input_ids"):
            return 0
        own = getattr(self.processing_class, "pad_token_id", None)
        own = getattr(self.model.config, "pad_token_id", None) if own is None else own
        return 0 if own is None else int(own)

    def _remember(self, losses: Losses, share: Tensor) -> None:
        """Note the losses for the commit, without their graph, and the terms for the log."""
        terms = losses.detach().terms
        self._pending.append(Losses(losses.total.detach(), offer=losses.offer, **terms))
        for name, term in terms.items():
            self._sums[name] = self._sums.get(name, 0) + term * share

    def _commit(self) -> None:
        """The optimiser has made its step: offer the samples of all micro-steps to the buffer."""
        assert self.learner is not None
        for losses in self._pending:
            self.learner.commit(losses)
        self._pending.clear()

    def _begin(self) -> None:
        """Training begins: a learner of an earlier `train` has another optimiser, and only its buffer is continued.

        With `model_init`, nothing is: the Trainer has made a new model, whose outputs are not those that were stored.
        """
        self._pending.clear()
        self._sums.clear()
        self._steps = 0
        if self.learner is not None:
            buffer, self.learner = self.learner.buffer, None
            if self._saved is None and self.model_init is not None:
                self._saved = self._given()
            elif self._saved is None:
                self._saved = buffer.state_dict()
                buffer.commit(self._saved)
            buffer.close()

    def _given(self) -> dict[str, Any] | None:
        """The state of the buffer that `buffer_from` names."""
        given = self.replay_args.buffer_from
        return None if given is None else buffer_file.read(Path(given), self)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the mean of each term since the last log."""
        if "loss" in logs and self._steps:
            for name, total in self._sums.items():
                mean = self.accelerator.reduce(total / self._steps, reduction="mean")
                logs[f"loss_{name}"] = mean.item()
            self._sums, self._steps = {}, 0
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_buffer(self, folder: Path | str) -> None:
        """Write the buffer to holdfast.safetensors in `folder`, for `buffer_from`; every rank calls it."""
        if self.learner is None:
            raise UsageError("there is no buffer to save before the first training step.")
        state = self.learner.buffer.state_dict()
        with self.learner.together("save the buffer"):
            if self.args.should_save:
                buffer_file.write(Path(folder), state, self)
        self.learner.buffer.commit(state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of a checkpoint, and written before the file that marks it as one."""
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.learner is not None:
            self.save_buffer(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self._saved = buffer_file.read(Path(checkpoint), self)


class ReplayTrainer(ReplayMixin, Trainer):
    """The Trainer of transformers with replay; `replay_args` say how. See `ReplayMixin`."""


class _Commit(TrainerCallback):
    """Tells a ReplayMixin when training begins and when the optimiser has made a step."""

    def __init__(self, trainer: ReplayMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._steps += 1  # the Trainer's own loss counts those as well that are skipped
        if self.trainer.accelerator.optimizer_step_was_skipped:  # the scaler of float16 found a gradient too large
            self.trainer._pending.clear()
        else:
            self.trainer._commit()
