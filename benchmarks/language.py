"""Language models that learn three domains one after the other: perplexity of every domain after every stage.

    python benchmarks/domains.py build/domains.npz                    # once: the domains of this machine
    python benchmarks/language.py --small                             # minutes on a CPU
    python benchmarks/language.py --out build/language --seconds 380  # the whole grid on one GPU
    python benchmarks/language.py --add-to results/language           # only the runs that are missing there

A GPT-2 of 12 million parameters begins with nothing and learns code, then prose, then numbers, each sample once: by
plain fine-tuning, with replay, and with replay and a regularizer on the top 20 stored logits. "joint" sees all three
domains mixed. With LoRA, the first stage trains all weights, the others an adapter. Every run writes one JSON file: its
settings, the versions, perplexity[stage][domain] on held-out files, seconds, and memory.

Several processes share one GPU. First, one of them alone measures the time of a step (speed.json). Then short runs with
another seed choose the weights of the regularizers (tuning.json); how long they take under full load decides how many
steps a stage can have, so that the grid ends within --seconds. It is worked off in order of importance, and a run that
would not end in time is not begun.

With --add-to, the weights and the number of steps are those of the results that are there, and the domains must be the
same. Nothing is measured alone, nothing is chosen.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build" / "domains.npz"
DOMAINS = ("code", "prose", "numbers")
BETAS = {"kl": (5.0, 50.0, 150.0, 500.0), "mse": (0.02, 0.2, 2.0), "linf": (0.02, 0.2, 2.0)}
"""Weights of the regularizers that are tried. kl divides by the number of classes, here 21: 21 would be 1 a token."""
TUNING_SEED, TUNING_STEPS, VALIDATION = 100, 100, 32
"""Weights are chosen by runs with this seed, so many steps a stage, on so many held-out samples of each domain; later
runs are tested on the others."""
BUFFERS = (2.0, 0.5, 5.0)
REPLAY = 0.25
ALONE = 60
"""Steps of the measurements by one process alone."""


@dataclass(frozen=True)
class Run:
    """One model, trained on all domains."""

    method: str
    """plain, joint, replay, or the name of a regularizer."""
    buffer: float = 0.0
    """Size of the buffer, in percent of the samples of all three stages."""
    seed: int = 0
    lora: bool = False
    steps: int = 400
    """Of each stage."""
    batch: int = 32
    length: int = 256
    width: int = 384
    layers: int = 6
    heads: int = 6
    lr: float = 1e-3
    warmup: int = 40
    clip: float = 1.0
    alpha: float = 1.0
    beta: float = 0.0
    top_k: int = 20

    @property
    def name(self) -> str:
        buffer = f"-{self.buffer:g}" if self.buffer else ""
        return f"{'lora-' if self.lora else ''}{self.method}{buffer}-seed{self.seed}"

    @property
    def buffer_size(self) -> int:
        return max(1, round(self.buffer / 100 * 3 * self.steps * self.batch))


def trials() -> list[Run]:
    """The runs that decide the weights of the regularizers."""
    return [Run(name, BUFFERS[0], TUNING_SEED, beta=beta) for name, betas in BETAS.items() for beta in betas]


def chosen(results: list[dict[str, Any]]) -> dict[str, float]:
    """The weight of each regularizer that gave the lowest perplexity in the end, geometric mean over the domains."""
    best: dict[str, tuple[float, float]] = {}
    for each in results:
        name, beta = each["run"]["method"], each["run"]["beta"]
        score = sum(map(math.log, each["validation"]))
        best[name] = min(best.get(name, (math.inf, 0.0)), (score, beta))
    return {name: beta for name, (_, beta) in best.items()}


def grid(seeds: int, lora: bool, betas: dict[str, float], buffers: tuple[float, ...] = BUFFERS) -> list[Run]:
    """All runs, the most important ones first: every method with a buffer of 2 %, then the other sizes, then LoRA."""
    runs = []
    for buffer in buffers:
        for seed in range(seeds):
            if buffer == BUFFERS[0]:
                runs += [Run("plain", seed=seed), Run("joint", seed=seed)]
            runs += _methods(buffer, seed, betas)
    return runs + [replace(run, lora=True) for run in runs if lora and run.method != "joint"]


def _methods(buffer: float, seed: int, betas: dict[str, float]) -> list[Run]:
    return [Run("replay", buffer, seed)] + [Run(name, buffer, seed, beta=beta) for name, beta in betas.items()]


# --- one run ---------------------------------------------------------------------------------------------------------


class Corpus:
    """The samples of all domains on the device, (count, length) int64."""

    def __init__(self, path: Path, device: torch.device) -> None:
        with np.load(path) as file:
            self.about: dict[str, Any] = json.loads(str(file["about"]))
            self.train, held_out = (
                {name: torch.from_numpy(file[f"{name}_{part}"].astype(np.int64)).to(device) for name in DOMAINS}
                for part in ("train", "test")
            )
        self.validation = {name: rows[:VALIDATION] for name, rows in held_out.items()}
        self.test = {name: rows[VALIDATION:] for name, rows in held_out.items()}

    def stages(self, run: Run) -> list[Tensor]:
        """The samples of each stage, (steps * batch, length), in an order that the seed decides."""
        draw, count, parts = torch.Generator().manual_seed(1000 + run.seed), run.steps * run.batch, []
        for name in DOMAINS:
            rows = self.train[name]
            if count > len(rows):
                raise SystemExit(f"{run.steps} steps need {count} samples of {name}; there are {len(rows)}.")
            order = torch.randperm(len(rows), generator=draw)[:count].to(rows.device)
            parts.append(rows[order, : run.length])
        if run.method == "joint":
            mixed = torch.cat(parts)
            mixed = mixed[torch.randperm(len(mixed), generator=draw).to(mixed.device)]
            parts = list(mixed.split(count))
        return parts


class Student:
    """A model in training: `step` learns from one minibatch of tokens, by hand or with a learner."""

    def __init__(self, run: Run, vocabulary: int, device: torch.device) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(run.seed)
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=run.length, n_embd=run.width, n_layer=run.layers, n_head=run.heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.run, self.device, self.learner = run, device, None
        self.model: Any = GPT2LMHeadModel(config).to(device).train()
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self._prepare(run.warmup)

    def _prepare(self, warmup: int) -> None:
        """A new optimiser, and a new learner that continues the buffer of the one before."""
        run, trained = self.run, [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=run.lr, weight_decay=0.01, fused=self.device.type == "cuda")
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / warmup, total_iters=warmup)
        if run.method not in ("plain", "joint"):
            self.learner = self._learner(self.learner)

    def _learner(self, earlier: Any) -> Any:
        import holdfast as hf

        run = self.run
        options: dict[str, Any] = {
            "buffer_size": run.buffer_size, "replay": REPLAY, "class_dim": -1, "clip": run.clip, "seed": run.seed,
            "scheduler": self.scheduler, "precision": "bfloat16" if self.device.type == "cuda" else "float32",
        }  # fmt: skip
        if run.method == "replay":  # ER weighs each replayed sample, the others the mean over the draw
            learner: Any = hf.ExperienceReplay(self.model, self.optimizer, alpha=run.alpha / REPLAY, **options)
        else:
            learner = hf.ConsistencyReplay(
                self.model, self.optimizer, regularizer=run.method, alpha=run.alpha, beta=run.beta,
                answers=hf.TopK(run.top_k), **options,
            )  # fmt: skip
        if earlier is not None:
            learner.buffer.load_state_dict(earlier.buffer.state_dict())
        return learner

    def adapt(self) -> None:
        """From now on, train an adapter (LoRA) in place of the weights."""
        from peft import LoraConfig, get_peft_model

        targets = ["c_attn", "c_proj", "c_fc"]
        config = LoraConfig(r=16, lora_alpha=32, target_modules=targets, fan_in_fan_out=True, task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)
        self._prepare(warmup=1)  # an adapter begins at zero and needs no warm-up

    def step(self, tokens: Tensor) -> None:
        if self.learner is not None:
            import holdfast as hf

            self.learner.observe({"input_ids": tokens}, hf.next_tokens(tokens))
            return
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self.run.clip)
        self.optimizer.step()
        self.scheduler.step()

    @torch.no_grad()
    def perplexity(self, tokens: Tensor) -> float:
        self.model.eval()
        losses = []
        for part in tokens[:, : self.run.length].split(32):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                losses.append(self.model(input_ids=part, labels=part).loss.double() * len(part))
        self.model.train()
        return math.exp(min(700.0, float(torch.stack(losses).sum()) / len(tokens)))

    def buffer_bytes(self) -> int:
        if self.learner is None:
            return 0
        return sum(column.nbytes for column in self.learner.buffer.state_dict()["columns"])


def execute(run: Run, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Train a model through the stages; what is worth knowing about it."""
    _rest(device)
    student = Student(run, corpus.about["vocabulary"], device)
    matrix, seconds = [[student.perplexity(corpus.test[name]) for name in DOMAINS]], []
    for number, rows in enumerate(corpus.stages(run)):
        if run.lora and number == 1:
            student.adapt()
        begun = time.perf_counter()
        for tokens in rows.split(run.batch):
            student.step(tokens)
        _wait(device)
        seconds.append(time.perf_counter() - begun)
        matrix.append([student.perplexity(corpus.test[name]) for name in DOMAINS])
    trained = sum(each.numel() for each in student.model.parameters() if each.requires_grad)
    return {
        "run": asdict(run) | {"name": run.name, "buffer_size": run.buffer_size if run.buffer else 0},
        "domains": list(DOMAINS),
        "perplexity": matrix,
        "validation": [student.perplexity(corpus.validation[name]) for name in DOMAINS],
        "seconds": seconds,
        "parameters": student.parameters,
        "trained_parameters": trained,
        "peak_memory_bytes": _peak(device),
        "buffer_bytes": student.buffer_bytes(),
        "about": _about(device),
    }


def measure(run: Run, corpus: Corpus, device: torch.device, steps: int) -> dict[str, Any]:
    """Seconds of a step with a buffer that is not empty, and the most memory that was taken."""
    _rest(device)
    student = Student(replace(run, steps=max(steps, run.steps)), corpus.about["vocabulary"], device)
    rows = corpus.train[DOMAINS[0]][:, : run.length]
    minibatches = [rows[(i * run.batch) % (len(rows) - run.batch) :][: run.batch] for i in range(steps + 10)]
    for tokens in minibatches[:10]:
        student.step(tokens)
    _wait(device)
    begun = time.perf_counter()
    for tokens in minibatches[10:]:
        student.step(tokens)
    _wait(device)
    per_step = (time.perf_counter() - begun) / steps
    return {
        "about": _about(device),
        "method": run.method,
        "seconds_per_step": per_step,
        "peak_memory_bytes": _peak(device),
        "steps": steps,
    }


def _rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _about(device: torch.device) -> dict[str, Any]:
    import holdfast

    packages = {name: _version(name) for name in ("torch", "transformers", "peft", "numpy")}
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {"holdfast": holdfast.__version__, "python": platform.python_version(), "device": name, **packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- many runs -------------------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace, tasks: Any, results: Any) -> None:
    """One process: it loads what runs need, then does the tasks that it takes from the queue."""
    torch.set_num_threads(max(1, arguments.cores // arguments.workers))
    device = torch.device(arguments.device)
    corpus = Corpus(arguments.data, device)
    measure(_sized(Run("kl", BUFFERS[0], beta=1.0), arguments), corpus, device, 3)  # what is loaded and compiled once
    results.put(None)
    while (task := tasks.get()) is not None:
        kind, run, limit = task
        if time.time() + limit > arguments.end:
            results.put({"error": f"{run.name}: no time left"})
            continue
        try:
            made = measure(run, corpus, device, limit) if kind == "alone" else execute(run, corpus, device)
            results.put(made)
        except Exception as error:  # the other runs go on
            results.put({"error": f"{run.name}: {type(error).__name__}: {error}"})


class Crew:
    """Processes that share one device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self.tasks, self.results = context.Queue(), context.Queue()
        self.processes = [
            context.Process(target=work, args=(arguments, self.tasks, self.results)) for _ in range(arguments.workers)
        ]
        for process in self.processes:
            process.start()
        for _ in self.processes:
            self.results.get(timeout=arguments.seconds)

    def do(self, kind: str, runs: list[Run], limit: float) -> Iterator[dict[str, Any]]:
        """What comes of these runs, in the order in which they end; those that failed are told and left out."""
        for run in runs:
            self.tasks.put((kind, run, limit))
        for _ in runs:
            made = self.results.get()
            if "error" in made:
                _tell(made["error"])
            else:
                yield made

    def dismiss(self) -> None:
        for _ in self.processes:
            self.tasks.put(None)
        for process in self.processes:
            process.join()


class Plan(NamedTuple):
    """What the grid consists of, and how long one of its runs may take."""

    runs: list[Run]
    seconds: float


def work_off(arguments: argparse.Namespace) -> None:
    """Decide what the grid consists of, and work it off."""
    arguments.end = time.time() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.lora = arguments.lora and importlib.util.find_spec("peft") is not None
    crew = Crew(arguments)
    _tell(f"{arguments.workers} processes are ready{'' if arguments.lora else '; no LoRA'}")
    plan = missing(arguments) if arguments.add_to else chosen_plan(arguments, crew)
    _tell(f"{len(plan.runs)} runs, {plan.seconds:.0f} s each; {arguments.end - time.time():.0f} s left")
    done = 0
    for made in crew.do("execute", plan.runs, plan.seconds):
        done += 1
        write(arguments.out / f"{made['run']['name']}.json", made)
        _tell(f"{done} {made['run']['name']}: {[round(each, 1) for each in made['perplexity'][-1]]}")
    crew.dismiss()
    _tell(f"{done} of {len(plan.runs)} runs are done")


def missing(arguments: argparse.Namespace) -> Plan:
    """The runs of the grid that packed results lack, with the settings of those that are there."""
    (settings,), packed = (_lines(arguments.add_to / f"{name}.jsonl") for name in ("settings", "runs"))
    with np.load(arguments.data) as file:
        if json.loads(str(file["about"])) != settings["data"]:
            raise SystemExit(f"the domains are not those of {arguments.add_to}: run the whole grid.")
    there = {(run["method"], run["buffer"], run["seed"], run["lora"]) for run in packed}
    runs = [
        replace(_sized(run, arguments), steps=settings["steps"])
        for run in grid(arguments.seeds, arguments.lora, settings["chosen"], arguments.buffers)
        if (run.method, run.buffer, run.seed, run.lora) not in there
    ]
    return Plan(runs, max(sum(run["seconds"]) for run in packed))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def chosen_plan(arguments: argparse.Namespace, crew: Crew) -> Plan:
    """Measure alone, choose the weights, and decide how long a stage is."""
    betas = {name: given[len(given) // 2] for name, given in BETAS.items()}
    alone = [_sized(run, arguments) for run in (Run("plain"), *_methods(BUFFERS[0], 0, betas))]
    found = [made for run in alone for made in crew.do("alone", [run], arguments.alone)]
    write(arguments.out / "speed.json", {"alone": found, "run": asdict(alone[-1])})
    _tell(f"alone: {[round(1000 * each['seconds_per_step'], 1) for each in found]} ms a step")
    tried = [replace(_sized(run, arguments), steps=arguments.trial_steps) for run in trials()]
    trial_results = list(crew.do("execute", tried, 0.0))
    betas |= chosen(trial_results)
    tuned = {"chosen": betas, "trials": trial_results, "workers": arguments.workers}
    write(arguments.out / "tuning.json", tuned)
    load = max(sum(each["seconds"]) for each in trial_results) / 3 / arguments.trial_steps
    runs = [_sized(run, arguments) for run in grid(arguments.seeds, arguments.lora, betas, arguments.buffers)]
    steps = arguments.steps
    if steps is None:
        left = arguments.end - time.time() - 5
        rounds = len(runs) / arguments.workers + 0.5
        fit = left / rounds / load / 3 * 0.92  # the rest for evaluation and for what begins a run
        steps = max(25, min(arguments.most_steps, int(fit) // 10 * 10))
    _tell(f"weights {betas}; {1000 * load:.1f} ms a step under load: 3 x {steps} steps a run")
    return Plan([replace(run, steps=steps) for run in runs], 3 * steps * load * 1.05)


def _sized(run: Run, arguments: argparse.Namespace) -> Run:
    """The run as large as the machine allows."""
    sizes = {name: getattr(arguments, name) for name in ("batch", "length", "width", "layers", "heads")}
    return replace(run, **{name: value for name, value in sizes.items() if value is not None})


def write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(content), "utf-8")
    scratch.replace(path)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="what benchmarks/domains.py wrote")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "language", help="a folder for the results")
    parser.add_argument("--seconds", type=float, default=380.0, help="when to be done")
    parser.add_argument("--workers", type=int, default=8, help="processes on one device")
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of a stage; default: as many as fit into the time")
    parser.add_argument(
        "--trial-steps", type=int, default=TUNING_STEPS, help="of a stage of the runs that choose weights"
    )
    parser.add_argument("--most-steps", type=int, default=400, help="the data has so many minibatches a domain")
    parser.add_argument("--add-to", type=Path, help="packed results: only the runs that are missing there")
    parser.add_argument("--no-lora", dest="lora", action="store_false")
    parser.add_argument(
        "--small", action="store_true", help="one seed and one buffer of a model of half a million parameters"
    )
    for name in ("batch", "length", "width", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    arguments.alone, arguments.buffers = ALONE, BUFFERS
    if arguments.small:
        small = {"batch": 8, "length": 32, "width": 96, "layers": 2, "heads": 4, "steps": 60, "seeds": 1}
        small |= {"workers": 1, "cores": 1, "alone": 10, "trial_steps": 20, "seconds": 3600.0, "device": "cpu"}
        vars(arguments).update(small, buffers=BUFFERS[:1])
    work_off(arguments)


if __name__ == "__main__":
    main()
