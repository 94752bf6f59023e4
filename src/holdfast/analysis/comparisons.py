"""Results -> variants (one config over its seeds) -> comparisons (variants that belong in one picture)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import isnan

from holdfast.config import RunConfig
from holdfast.results import RunResult

__all__ = ["APPROXIMATE", "METHODS", "REGULARIZERS", "REPLAY", "STRICT"]
__all__ += ["Comparison", "Variant", "comparisons", "method_order", "variants"]

REGULARIZERS = ("l1", "l2", "linf", "kl", "mse", "mi", "simclr", "byol", "dino", "barlow")
"""In the order of the paper's tables."""
STRICT = ("l1", "l2", "linf", "mse")
APPROXIMATE = tuple(name for name in REGULARIZERS if name not in STRICT)
"""The paper's two families of regularizers: those that compare logits one by one, and the others."""
REPLAY = ("er", *REGULARIZERS)
METHODS = ("joint", "sgd", "er", *STRICT, *APPROXIMATE)
"""The paper's methods in the order in which they are shown."""

WHERE = ("benchmark", "tasks", "model", "epochs", "precision", "train_limit", "validation")
"""Settings that decide which runs can be compared at all, next to the buffer."""


@dataclass(frozen=True)
class Variant:
    """One config over its seeds. `label` is the method, with what sets it apart from its namesakes beside it."""

    label: str
    results: tuple[RunResult, ...]

    @property
    def config(self) -> RunConfig:
        """The config of the first seed."""
        return self.results[0].config

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method

    def values(self, metric: str) -> list[float]:
        """A metric of each seed where it is defined; forward transfer only where tasks share their classes."""
        found = [r for r in self.results if metric != "forward_transfer" or r.shares_classes]
        return [value for result in found if not isnan(value := float(getattr(result, metric)))]


@dataclass(frozen=True)
class Comparison:
    """Variants on one benchmark with one buffer size; methods without a buffer join those of every size."""

    title: str
    variants: tuple[Variant, ...]


def method_order(methods: Iterable[str]) -> list[str]:
    """The methods without repetition: the paper's in its order, then the others by name."""
    found = set(methods)
    return [*(name for name in METHODS if name in found), *sorted(found.difference(METHODS))]


def variants(results: Iterable[RunResult]) -> list[Variant]:
    """The results gathered by config apart from the seed, methods in the paper's order."""
    by_config: dict[RunConfig, list[RunResult]] = defaultdict(list)
    for result in results:
        by_config[result.config.change(seed=0)].append(result)
    labels = _labels(list(by_config))
    made = [
        Variant(labels[config], tuple(sorted(runs, key=lambda run: run.config.seed)))
        for config, runs in by_config.items()
    ]
    order = {method: place for place, method in enumerate(method_order(variant.method for variant in made))}
    return sorted(made, key=lambda variant: (order[variant.method], _sortable(variant.config)))


def comparisons(results: Iterable[RunResult]) -> list[Comparison]:
    """Which results belong in one picture, by benchmark, setting and buffer size."""
    places: dict[tuple[object, ...], list[RunResult]] = defaultdict(list)
    for result in results:
        tasks = result.matrix.shape[1]  # of the stream; a config need not say
        places[tuple(tasks if name == "tasks" else getattr(result.config, name) for name in WHERE)].append(result)
    found: list[Comparison] = []
    for place in sorted(places, key=lambda key: [str(part) for part in key]):
        runs = places[place]
        same_benchmark = [other for other in places if other[0] == place[0]]
        for size in _sizes(runs):
            inside = [run for run in runs if run.config.buffer_size in (size, None)]
            title = _title(place, size, same_benchmark)
            found.append(Comparison(title, tuple(variants(inside))))
    return found


def _sizes(runs: Iterable[RunResult]) -> list[int] | list[None]:
    """The buffer sizes among the runs; None alone if no run has a buffer."""
    return sorted({run.config.buffer_size for run in runs if run.config.buffer_size is not None}) or [None]


def _title(own: tuple[object, ...], buffer_size: int | None, places: Sequence[tuple[object, ...]]) -> str:
    """Benchmark and buffer, with the settings in which this comparison differs from others on the benchmark.

    A setting that is off, such as a limit of None or a validation of 0, is left out.
    """
    parts = [str(own[0])]
    for number, (name, value) in enumerate(zip(WHERE, own, strict=True)):
        if value and len({place[number] for place in places}) > 1:
            tasks = f"{value} task{'' if value == 1 else 's'}"
            parts.append(tasks if name == "tasks" else f"{name.replace('_', ' ')} {value}")
    return ", ".join([*parts, "no buffer" if buffer_size is None else f"buffer {buffer_size}"])


def _labels(configs: Sequence[RunConfig]) -> dict[RunConfig, str]:
    """A name of its own for each config: the method, and the settings in which it departs from most of its namesakes.

    Two configs never share a name: where they differ, at most one of them has the usual value, and the other tells it.
    """
    by_method: dict[str, list[RunConfig]] = defaultdict(list)
    for config in configs:
        by_method[config.method].append(config)
    labels = {}
    for method, namesakes in by_method.items():
        told = {config: _settings(config) for config in namesakes}
        names = {name for texts in told.values() for name in texts}
        usual = {name: _usual([texts.get(name, "") for texts in told.values()]) for name in names}
        for config, texts in told.items():
            labels[config] = ", ".join([method, *(text for name, text in texts.items() if text != usual[name])])
    return labels


def _usual(texts: Sequence[str]) -> str:
    """The text of a setting that labels leave out: the most common one, and of several such the first by letters.

    Empty if some configs have no text: they have the method's default, and only that is left out. Also empty if no
    two texts are the same.
    """
    counts = Counter(texts)
    most = max(counts.values())
    if "" in counts or most == 1 < len(counts):
        return ""
    return min(text for text, count in counts.items() if count == most)


def _settings(config: RunConfig) -> dict[str, str]:
    """What a label may say of a config: a text for each setting, and for those of its method that are not the usual."""
    own = ("options", "settings")
    shared = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in ("seed", *own)}
    texts = {name: f"{name.replace('_', ' ')} {_value(value)}" for name, value in shared.items() if value is not None}
    return texts | {
        f"{kind} {name}": f"{name}={_value(value)}" for kind in own for name, value in getattr(config, kind)
    }


def _value(value: object) -> str:
    """As short as possible, and never the same for two numbers."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else str(value)


def _sortable(config: RunConfig) -> list[tuple[bool, float, str]]:
    """Settings as a sort key: numbers by size, texts by letters, None first."""
    values = [getattr(config, field.name) for field in fields(config)]
    return [(v is not None, float(v) if isinstance(v, int | float) else 0.0, str(v)) for v in values]
