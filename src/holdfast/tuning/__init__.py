"""Hyper-parameters of a method -> a study: many runs on a validation split, each with other values.

    study = tune(config, search_space(config), Path("tuning"))

Optuna (the extra `tune`) chooses the values. The folder holds its database of all studies, `study.db`, and the numbers
of each finished run in a folder of its fingerprint. A study that was stopped, or killed, is continued by the same call:
runs in flight go on from their checkpoints. Several processes may work on one study.
"""

from holdfast.tuning.database import import_optuna
from holdfast.tuning.preset import preset_text
from holdfast.tuning.ranges import Range, search_space, with_values
from holdfast.tuning.session import Watch, tune
from holdfast.tuning.study import Study, Trial

__all__ = ["Range", "Study", "Trial", "Watch", "import_optuna", "preset_text", "search_space", "tune", "with_values"]
