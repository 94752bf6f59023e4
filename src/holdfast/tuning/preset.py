"""The best values of a study as text for presets.toml."""

import time

from holdfast.errors import HoldfastError
from holdfast.tuning.study import Study, Trial

__all__ = ["preset_text"]


def preset_text(study: Study, command: str) -> str:
    """The best values as a table of presets.toml, with where they come from. `command` is the command line."""
    best, config = study.best, study.config
    if best is None:
        raise HoldfastError("no trial has finished yet, so there is nothing to write down.")
    options = [name for name in best.values if name.startswith("regularizer.")]
    comments = _origin(study, best, command)
    if options:
        pairs = " ".join(f"{name}={best.values[name]!r}" for name in options)
        comments.append(f"A preset cannot hold these; give them with --set: {pairs}.")
    values = [f"{name} = {value!r}" for name, value in best.values.items() if name not in options]
    table = "\n".join(values) if config.buffer_size is None else f"{config.buffer_size} = {{ {', '.join(values)} }}"
    head = f"[benchmarks.{config.benchmark}.tuned.{config.method}]"
    return "".join(f"# {line}\n" for line in comments) + f"{head}\n{table}\n"


def _origin(study: Study, best: Trial, command: str) -> list[str]:
    """How the values were found, line by line."""
    config, made = study.config, study.best_result.environment if study.best_result else {}
    split = f"{100 * config.validation:g} % of the training samples"
    complete = study.count("complete")
    preset = [f"With the preset's values: {study.preset.accuracy:.2f} %."] if study.preset else []
    return [
        command,
        f"{complete} trial{'s' * (complete != 1)} complete, {study.count('pruned')} stopped early, "
        f"{study.count('failed')} failed; trial {best.number} is the best.",
        f"Accuracy {best.accuracy:.2f} % on {split}, seed {config.seed}.",
        *preset,
        "The best of many trials looks better than it is: compare with other seeds before you trust it.",
        f"holdfast {made.get('holdfast')}, commit {made.get('commit')}, torch {made.get('torch')}, "
        f"{made.get('device')}, {time.strftime('%Y-%m-%d')}.",
    ]
