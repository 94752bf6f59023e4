"""What `ReplayTrainer` costs beside the Trainer of transformers: with nothing to replay, and with a quarter replayed.

    python benchmarks/trainer_overhead.py
    python benchmarks/trainer_overhead.py --count

Prints JSON: the median and the smallest seconds of a step of each, and their ratios to the Trainer's; the ratio of
medians is the median over rounds in which all of them take turns. On a CPU, these are seconds that the process itself
computed. "nothing" has its buffer emptied before each step: it stores samples and their top 20 logits, and draws none.
"quarter" draws a quarter of the minibatch; "fixed" does that with samples that are declared to have one length. Both
store every sample, as at the beginning of a stream. "later" is "quarter" after so many samples that few are stored.

With --count, no time is taken. It prints what one step does:

- `passes`: operations, by name, on tensors at least an eighth as large as the logits of the minibatch, the matrix
  products of the model's head not counted;
- `traffic`: the bytes that these read and write, by the bytes of the minibatch's logits in float32. top-k counts as one
  reading, although it takes many on a GPU;
- `flops`: those of matrix products;
- `calls`: all operations, views not counted, each of which is a kernel on a GPU;
- `waits`: how often the program would wait for a GPU to learn a value, and `waits_inside` how often between the
  forward and the backward pass, when the GPU has much to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.transformers import ReplayArguments, ReplayTrainer

WARM = 5
"""Steps at the beginning that are not counted."""
KINDS = ("Trainer", "nothing", "quarter", "fixed", "later")
LONG = 10**6
"""Samples that "later" has seen before."""
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
"""Operations whose result the host must know; and `Tensor.tolist`, which calls none."""
FREE = ("aten.empty", "aten.lift_fresh", "aten._local_scalar_dense", "aten._unsafe_view")
"""Operations whose names begin so move no bytes of their own; neither do views."""
HIDDEN = {"aten.logsumexp": 5}
"""How often more than it shows an operation reads or writes its argument: the largest, minus it, exp, and the sum."""


class Clock(TrainerCallback):
    """Takes the time of every step, from the first minibatch to the end of the update."""

    def __init__(self, kind: str) -> None:
        self.kind, self.trainer, self.times = kind, None, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        prepare(self.kind, self.trainer)
        self.begun = self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(self.now() - self.begun)

    def now(self) -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


class Count(TorchDispatchMode):
    """Counts what the operations of a step do; see the top of this file."""

    def __init__(self, logits: int) -> None:
        super().__init__()
        self.logits, self.inside = logits, False
        self.passes: Counter[str] = Counter()
        self.traffic = 0.0
        self.calls = self.waits = self.waits_inside = 0
        self._flops = FlopCounterMode(display=False)
        self._host: dict[int, Tensor] = {}
        """Tensors that would be on the host also beside a GPU, by the address of their numbers."""
        self._patches = [
            patch.object(Tensor, "tolist", self._listed(Tensor.tolist)),
            patch.object(Tensor, "cpu", lambda tensor: self._fetched(tensor)),
        ]

    def __enter__(self) -> Self:
        for each in self._patches:
            each.start()
        self._flops.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._flops.__exit__(*error)
        for each in self._patches:
            each.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.name().replace("::", ".").removesuffix(".Tensor")
        indices = args[1] if name.startswith("aten.index") else ()
        by_mask = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(indices))
        given, written = (
            [each for each in tree_leaves(value) if isinstance(each, Tensor)] for value in ((args, kwargs), made)
        )
        if given and all(map(self._on_host, given)):
            self._host |= {each.data_ptr(): each for each in written}
            return made
        if by_mask or name in WAITING:
            self.wait()
        if func.is_view or name.startswith(FREE):
            return made
        self.calls += 1
        given = [] if name.startswith("aten.new_") else given
        largest = max((each.numel() for each in given + written), default=0)
        if 8 * largest >= self.logits and not name.endswith("mm"):
            self.passes[name.removeprefix("aten.")] += 1
            self.traffic += _moved(name, given, written) / (4 * self.logits)
        return made

    def wait(self) -> None:
        self.waits += 1
        self.waits_inside += self.inside

    def _on_host(self, tensor: Tensor) -> bool:
        state = tensor.shape == torch.default_generator.get_state().shape  # of a generator, which the host holds
        return tensor.data_ptr() in self._host or (state and tensor.dtype == torch.uint8)

    def _listed(self, tolist: Any) -> Any:
        def listed(tensor: Tensor) -> Any:
            if not self._on_host(tensor):
                self.wait()
            return tolist(tensor)

        return listed

    def _fetched(self, tensor: Tensor) -> Tensor:
        self.wait()
        copy = tensor.clone()
        self._host[copy.data_ptr()] = copy
        return copy

    def found(self) -> dict[str, Any]:
        numbers = {"calls": self.calls, "waits": self.waits, "waits_inside": self.waits_inside}
        flops = self._flops.get_total_flops()
        return {"passes": dict(sorted(self.passes.items())), "traffic": self.traffic, "flops": flops, **numbers}


def _moved(name: str, given: list[Tensor], written: list[Tensor]) -> int:
    """The bytes that an operation reads and writes; of those that work at single places, what is there."""
    # An expanded tensor has fewer numbers in memory than elements.
    sizes = [min(each.nbytes, each.untyped_storage().nbytes()) for each in given + written]
    if name.startswith(("aten.gather", "aten.index_select", "aten.nll_loss_forward", "aten.embedding")):
        return 2 * sum(sizes[len(given) :])
    if name.startswith(("aten.scatter_.", "aten.scatter_add_", "aten.index_add_")):
        return 2 * min(sizes)
    if name.startswith("aten.nll_loss_backward"):  # it fills the gradient with 0
        return sizes[-1]
    if name.startswith(("aten.zero_", "aten.fill_", "aten.zeros", "aten.full", "aten.new_zeros", "aten.ones")):
        return sizes[-1]
    return sum(sizes) + HIDDEN.get(name, 0) * sizes[0]


class Counting(TrainerCallback):
    """Counts what the last step does."""

    def __init__(self, kind: str, steps: int, logits: int) -> None:
        self.kind, self.steps, self.count, self.trainer = kind, steps, Count(logits), None

    def on_step_begin(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        prepare(self.kind, self.trainer)
        if state.global_step == self.steps - 1:
            forward, backward = self.trainer.model.register_forward_hook, self.trainer.accelerator.backward
            self.hook = forward(lambda *_: setattr(self.count, "inside", True))

            def begin(*args: Any, **kwargs: Any) -> None:
                self.count.inside = False
                backward(*args, **kwargs)

            self.trainer.accelerator.backward = begin
            self.count.__enter__()

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step == self.steps:
            self.count.__exit__(None, None, None)
            self.hook.remove()


def prepare(kind: str, trainer: Any) -> None:
    """What the kind asks for before a step."""
    if trainer.__class__ is Trainer or trainer.learner is None:
        return
    buffer = trainer.learner.buffer
    if kind == "nothing":
        buffer.forget_all()
    elif kind == "later" and buffer.offered < LONG and buffer.stored == buffer.capacity:
        buffer.load_state_dict(buffer.state_dict() | {"offered": LONG, "seen": torch.tensor(LONG)})


def train(kind: str, arguments: argparse.Namespace, data: list[dict[str, Any]], steps: int, callback: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments.vocabulary, n_positions=arguments.length, n_embd=arguments.width, n_head=4,
        n_layer=arguments.layers, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=arguments.batch, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", bf16=torch.cuda.is_available(),
        )  # fmt: skip
        given: dict[str, Any] = {"args": settings, "train_dataset": data, "callbacks": [callback]}
        if kind == "Trainer":
            trainer: Any = Trainer(GPT2LMHeadModel(config), **given)
        else:
            # "later" needs a full buffer: one minibatch fills it.
            size = arguments.batch if kind == "later" else arguments.buffer
            replay = ReplayArguments(buffer_size=size, beta=20.0, fixed_length=kind == "fixed")
            trainer = ReplayTrainer(GPT2LMHeadModel(config), replay_args=replay, **given)
        callback.trainer = trainer
        trainer.remove_callback(PrinterCallback)  # only the result belongs on standard output
        trainer.train()


def counted(kind: str, arguments: argparse.Namespace, data: list[dict[str, Any]]) -> dict[str, Any]:
    """What the third step does: optimiser and buffer exist by then."""
    callback = Counting(kind, 3, arguments.batch * arguments.length * arguments.vocabulary)
    train(kind, arguments, data, 3, callback)
    return callback.count.found()


def timed(kind: str, arguments: argparse.Namespace, data: list[dict[str, Any]]) -> list[float]:
    """The seconds of each step."""
    clock = Clock(kind)
    train(kind, arguments, data, WARM + arguments.steps, clock)
    return clock.times[WARM:]


def compared(rounds: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The seconds of a step of each kind, and their ratio to the Trainer's."""
    kinds = list(rounds[0])
    medians = [{kind: statistics.median(each[kind]) for kind in kinds} for each in rounds]
    least = {kind: min(min(each[kind]) for each in rounds) for kind in kinds}
    return {
        kind: {
            "seconds": statistics.median(each[kind] for each in medians),
            "ratio": statistics.median(each[kind] / each["Trainer"] for each in medians),
            "least_seconds": least[kind],
            "least_ratio": least[kind] / least["Trainer"],
        }
        for kind in kinds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rounds": 5, "steps": 30, "batch": 16, "length": 128, "width": 128, "layers": 4, "vocabulary": 4096}
    for name, value in (sizes | {"buffer": 500}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="Trainer must be one of them")
    parser.add_argument("--count", action="store_true", help="count what a step does, and take no time")
    arguments = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(arguments.vocabulary, (1024, arguments.length), generator=draw)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    made: dict[str, Any] = {"sizes": vars(arguments), "torch": torch.__version__, "device": device}
    if arguments.count:
        made["counts"] = {kind: counted(kind, arguments, data) for kind in arguments.kinds}
    else:
        rounds = [{kind: timed(kind, arguments, data) for kind in arguments.kinds} for _ in range(arguments.rounds)]
        made["steps"] = compared(rounds)
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
