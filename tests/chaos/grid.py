"""The experiment that chaos reproduces: four runs of a second. `--plugin grid` registers it."""

from holdfast.config import RunConfig
from holdfast.experiments import Cell, Experiment, register

SMALL = {"tasks": 2, "train_limit": 300, "batch_size": 16, "replay_size": 16, "buffer_size": 30}
CONFIGS = [RunConfig.preset("rot-mnist", method, **SMALL) for method in ("er", "linf", "mse", "l1")]

register(
    Experiment(
        "chaos",
        "Four small runs",
        "nowhere",
        "They end as they would undisturbed.",
        tuple(Cell("buffer 30", config.method, "rot-mnist", "accuracy", config) for config in CONFIGS),
    )
)
