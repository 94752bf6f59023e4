"""Holdfast in the Trainer of transformers: replay and consistency for language models.

Needs the extra `transformers`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from holdfast import checkpoint
from holdfast.buffer.layout import check_schema, columns_of, is_answer
from holdfast.errors import UsageError, needing
from holdfast.learners import ConsistencyReplay, ExperienceReplay, Losses, ReplayLearner, TopK, next_tokens

with needing("transformers", "this needs transformers"):
    from transformers import Trainer, TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

if TYPE_CHECKING:
    from trl import SFTTrainer

__all__ = ["EarlierPerplexity", "ReplayArguments", "ReplayMixin", "ReplaySFTTrainer", "ReplayTrainer"]

FILE = "holdfast.safetensors"
"""The file of the buffer in a checkpoint of the trainer."""
KIND = "buffer of a language model"
IGNORED = -100
"""The label of positions that are not supervised."""
LABELS = ("labels", "shift_labels")
"""What a collator calls them."""
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
        _check_trainer(self)
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
                batch["shift_labels"] = _targets(self.model, batch)  # the step need not make them again
            counted = [dict.fromkeys(LABELS, batch["shift_labels"]) for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def _minibatch(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs, which are stored, and the label of every position."""
        labels = _targets(self.model, inputs)
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
        length, most = max((part.shape[1] for part in x.values() if part.dim() > 1), default=0), _longest(self.model)
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
            _check_same(self._saved, given, sequences)
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
        return None if given is None else _read(Path(given), _about(self))

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
                Path(folder).mkdir(parents=True, exist_ok=True)
                checkpoint.write(Path(folder) / FILE, KIND, {"buffer": state}, _about(self))
        self.learner.buffer.commit(state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of a checkpoint, and written before the file that marks it as one."""
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.learner is not None:
            self.save_buffer(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self._saved = _read(Path(checkpoint), _about(self))


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
            labels = _targets(model, inputs)
            logits = model(**{name: part for name, part in inputs.items() if name not in LABELS}).logits
            losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
            each = torch.stack([losses, labels.flatten() != IGNORED]).unflatten(1, (len(labels), -1)).sum(2)
            # Of several ranks, the last minibatches are filled up with samples from the beginning, which do not count.
            sums += trainer.accelerator.gather_for_metrics(each.T).sum(0)
        model.train(training)
        total, count = sums.tolist()
        return math.exp(min(total / max(count, 1), 700.0))


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


# --- what is checked -------------------------------------------------------------------------------------------------


def _check_trainer(trainer: Any) -> None:
    """Raise for what a trainer does that replay does not know of."""
    args, given = trainer.args, trainer.replay_args
    refused = {
        "a compute_loss_func: the learner computes the loss": trainer.compute_loss_func is not None,
        "label_smoothing_factor: the learner's loss is plain cross-entropy": args.label_smoothing_factor != 0,
        "DataParallel: start one process per GPU with torchrun or accelerate launch": args.n_gpu > 1,
        "DeepSpeed: use DistributedDataParallel": trainer.is_deepspeed_enabled,
        "FSDP: use DistributedDataParallel": trainer.is_fsdp_enabled,
        "padding_free batches, which join samples: set padding_free=False, and no packing": getattr(
            trainer, "padding_free", False
        ),
        'loss_type "dft": set loss_type="nll"': getattr(args, "loss_type", "nll") == "dft",
        "output_router_logits, with which the model adds a loss by itself: set it to False in the model's config, or "
        "with trl, give router_aux_loss_coef=0.0": bool(
            getattr(_text_config(trainer.model), "output_router_logits", False)
        ),
        "a model of encoder and decoder: use one that has one of them": bool(
            getattr(trainer.model.config, "is_encoder_decoder", False)
        ),
    }
    for what, found in refused.items():
        if found:
            raise UsageError(f"replay does not work with {what}.")
    _check_prompts(trainer.model)
    vocabulary = _vocabulary(trainer.model)
    if given.regularizer is not None and (given.top_k or 0) > (vocabulary or math.inf):
        raise UsageError(
            f"top_k={given.top_k} is larger than the vocabulary of {vocabulary} tokens: choose a smaller one, or None "
            "to store all logits."
        )


def _check_prompts(model: Any) -> None:
    """Refuse methods of peft that give a model more outputs than a sample has tokens."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind, task = (str(getattr(each, "value", each)) for each in (config.peft_type, config.task_type))
        if getattr(config, "is_prompt_learning", False) and kind != "PREFIX_TUNING" and task != "SEQ_CLS":
            raise UsageError(
                f"replay does not work with {kind} of peft: it puts {config.num_virtual_tokens} tokens of its own "
                "before every sample, for whose outputs there are no labels. Use LoRA, or prefix tuning "
                "(peft.PrefixTuningConfig), which leave the outputs as many as the tokens."
            )


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _longest(model: Any) -> int | None:
    """The most tokens of a sample that the model allows, if it says so."""
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def _vocabulary(model: Any) -> int | None:
    """The number of tokens."""
    size = getattr(_text_config(model), "vocab_size", None)
    return None if size is None else int(size)


def _is_causal(model: Any) -> bool:
    """Whether the model predicts the next token, so that its labels are shifted by one."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inside).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _targets(model: Any, inputs: Mapping[str, Any]) -> Any:
    """The label of every output: of causal models, outputs are for the next token. None if there are no labels."""
    labels = inputs.get("shift_labels", inputs.get("labels"))
    shifted = "shift_labels" in inputs or labels is None or labels.dim() == 1 or not _is_causal(model)
    return labels if shifted else next_tokens(labels)


# --- the file of a buffer --------------------------------------------------------------------------------------------


def _about(trainer: Any) -> dict[str, Any]:
    """What stored tokens mean: the size of the vocabulary, and the fingerprint of the trainer's tokenizer."""
    return {"vocabulary": _vocabulary(trainer.model), "tokenizer": _fingerprint(trainer.processing_class)}


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


def _check_same(state: dict[str, Any], given: ReplayArguments, sequences: bool) -> None:
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


def _read(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the buffer that was written to `folder` with the same vocabulary and tokenizer."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no buffer: {FILE} is missing. It was written by a trainer without replay, or with "
            "save_only_model. To begin with an empty buffer, load the model from there and leave out "
            "resume_from_checkpoint and buffer_from."
        )
    found = checkpoint.read(path, KIND)
    for name, what in (("vocabulary", "a vocabulary of"), ("tokenizer", "the tokenizer")):
        then, now = found.about.get(name), about[name]
        if None not in (then, now) and then != now:
            raise UsageError(
                f"the buffer in {folder} was written with {what} {then}, but here it is {now}: its tokens would mean "
                "something else. Use the tokenizer and the vocabulary of then, or begin with an empty buffer."
            )
    state: dict[str, Any] = found.state["buffer"]
    return state
