"""What a buffer does when the rule to learn changes: 6,000 samples, whose labels follow another rule after 3,000.

    python benchmarks/when_not_to_replay.py

Trains the same network with several buffers and with none, five seeds each, and writes the accuracy on the new rule
after the whole stream, in percent, to docs/when-not-to-replay.json, from which the page has its numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf

OUT = Path(__file__).resolve().parents[1] / "docs" / "when-not-to-replay.json"
FEATURES, CLASSES, BATCH, BEFORE, AFTER, BUFFER = 10, 4, 30, 3_000, 3_000, 500


def samples(rule: nn.Module, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, FEATURES)
    with torch.no_grad():
        return x, rule(x).argmax(1)


def learn(seed: int, policy: str | None, drift: bool = False) -> tuple[float, list[int]]:
    """Accuracy on the new rule at the end, in percent, and the samples after which a drift was noticed."""
    torch.manual_seed(seed)
    rules = [nn.Linear(FEATURES, CLASSES, bias=False) for _ in range(2)]
    stream = [samples(rules[0], BEFORE), samples(rules[1], AFTER)]
    test = samples(rules[1], 2_000)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    learner: Any
    if policy is None:
        learner = hf.LEARNERS["sgd"](model, optimizer)
    else:
        size, beta = BUFFER, 0.5  # as in ReplayClassifier
        learner = hf.ConsistencyReplay(model, optimizer, buffer_size=size, beta=beta, buffer_policy=policy, seed=seed)
    monitor = hf.DriftMonitor(on_drift=learner.forget_all if drift else None)
    for x, y in stream:
        for part in zip(x.split(BATCH), y.split(BATCH), strict=True):
            monitor.observe(learner.observe(*part).current)
    with torch.no_grad():
        right = (model(test[0]).argmax(1) == test[1]).double().mean()
    return 100 * float(right), [BATCH * step for step in monitor.alarms]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms: dict[str, tuple[str | None, bool]] = {
        "none": (None, False),
        "default": ("reservoir", False),
        "decay": ("decay", False),
        "window": ("window", False),
        "emptied": ("reservoir", True),
    }
    found: dict[str, Any] = {"seeds": options.seeds, "final": {}, "accuracies": {}, "alarms": {}}
    for name, arm in arms.items():
        runs = [learn(seed, *arm) for seed in range(options.seeds)]
        found["accuracies"][name] = [round(accuracy, 3) for accuracy, _ in runs]
        found["final"][name] = round(statistics.mean(accuracy for accuracy, _ in runs), 3)
        found["alarms"][name] = [alarms for _, alarms in runs]
        print(f"{name:8} {found['final'][name]:5.1f}  drift noticed after {found['alarms'][name]} samples")
    options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
