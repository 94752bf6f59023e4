"""Refuses trainers and models with which replay would learn something else than it says."""

import math
from typing import Any

from holdfast.errors import UsageError
from holdfast.integrations.transformers.language_model import text_config, vocabulary_size

__all__ = ["check_trainer"]


def check_trainer(trainer: Any) -> None:
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
            getattr(text_config(trainer.model), "output_router_logits", False)
        ),
        "a model of encoder and decoder: use one that has one of them": bool(
            getattr(trainer.model.config, "is_encoder_decoder", False)
        ),
    }
    for what, found in refused.items():
        if found:
            raise UsageError(f"replay does not work with {what}.")
    _check_prompts(trainer.model)
    vocabulary = vocabulary_size(trainer.model)
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
