"""A scikit-learn estimator that learns portion by portion, saved after each, with its buffer in a folder."""

from pathlib import Path

import numpy as np
import torch

from holdfast.data import load
from holdfast.estimators import ReplayClassifier

from .learners import ending, keep
from .program import Program

PORTIONS, SIZE = 30, 64
DIGITS = load("mnist").train


def act(place: Path) -> None:
    """Continue with the portion after the last one that was saved."""
    saved = place / "estimator.safetensors"
    images = DIGITS.images[: PORTIONS * SIZE].flatten(1).numpy().astype(np.float32) / 255
    labels = DIGITS.labels[: PORTIONS * SIZE].numpy()
    if saved.exists():
        estimator = ReplayClassifier.load(saved, storage=place / "buffer")
    else:
        estimator = ReplayClassifier(buffer_size=100, storage=place / "buffer", random_state=0)
    done = estimator.learner_.buffer.offered // SIZE if saved.exists() else 0
    for number in range(done, PORTIONS):
        portion = slice(number * SIZE, (number + 1) * SIZE)
        estimator.partial_fit(images[portion], labels[portion], classes=list(range(10)))
        estimator.save(saved)
    keep(place, {"probabilities": torch.from_numpy(estimator.predict_proba(images)).contiguous()})


def guarded(place: Path) -> list[Path]:
    return [*place.glob("estimator.safetensors"), *place.glob("buffer/*.*")]


PROGRAM = Program("estimator", act, ending, guarded)
