"""What `ReplayTrainer` costs beside the Trainer of transformers: with nothing to replay, and with a quarter replayed.

    python benchmarks/trainer_overhead.py

Prints JSON: the median seconds of a step of each, and its ratio to the Trainer's, the median over rounds in which all
of them take turns; on a CPU, seconds that the process itself computed. "nothing" has its buffer emptied before each
step: it stores samples and their top 20 logits, and draws none. "quarter" draws a quarter of the minibatch; "fixed"
does that with samples that are declared to have one length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.transformers import ReplayArguments, ReplayTrainer

WARM = 5
"""Steps at the beginning that are not counted."""
KINDS = ("Trainer", "nothing", "quarter", "fixed")


class Clock(TrainerCallback):
    """Takes the time of every step, from the first minibatch to the end of the update."""

    def __init__(self, kind: str) -> None:
        self.kind, self.trainer, self.times = kind, None, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.kind == "nothing" and self.trainer.learner is not None:
            self.trainer.learner.forget_all()
        self.begun = self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(self.now() - self.begun)

    def now(self) -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def median_step(kind: str, arguments: argparse.Namespace, data: list[dict[str, Any]]) -> float:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments.vocabulary, n_positions=arguments.length, n_embd=arguments.width, n_head=4,
        n_layer=arguments.layers, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    clock = Clock(kind)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=WARM + arguments.steps, per_device_train_batch_size=arguments.batch, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", bf16=torch.cuda.is_available(),
        )  # fmt: skip
        given: dict[str, Any] = {"args": settings, "train_dataset": data, "callbacks": [clock]}
        if kind == "Trainer":
            trainer: Any = Trainer(GPT2LMHeadModel(config), **given)
        else:
            replay = ReplayArguments(buffer_size=arguments.buffer, beta=20.0, fixed_length=kind == "fixed")
            trainer = ReplayTrainer(GPT2LMHeadModel(config), replay_args=replay, **given)
        clock.trainer = trainer
        trainer.remove_callback(PrinterCallback)  # only the result belongs on standard output
        trainer.train()
    return statistics.median(clock.times[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rounds": 5, "steps": 30, "batch": 16, "length": 128, "width": 128, "layers": 4, "vocabulary": 4096}
    for name, value in (sizes | {"buffer": 500}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(arguments.vocabulary, (1024, arguments.length), generator=draw)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    rounds = [{kind: median_step(kind, arguments, data) for kind in KINDS} for _ in range(arguments.rounds)]
    found = {
        kind: {
            "seconds": statistics.median(each[kind] for each in rounds),
            "ratio": statistics.median(each[kind] / each["Trainer"] for each in rounds),
        }
        for kind in KINDS
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    made = {"sizes": vars(arguments), "steps": found, "torch": torch.__version__, "device": device}
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
