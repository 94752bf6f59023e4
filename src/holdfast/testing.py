"""Contract checks for regularizers, learners and benchmarks written elsewhere.

What Holdfast relies on, as functions that raise an AssertionError with a sentence. The package's own parts are under
the same checks; a test of yours needs one line:

>>> from holdfast.testing import check_regularizer
>>> check_regularizer(lambda current, stored: (current - stored).abs().mean())
>>> check_regularizer(lambda current, stored: -(current - stored).abs().mean())  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
AssertionError: regularizer '<lambda>': ... a smaller value must mean more consistent answers.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.augment import Normalize
from holdfast.benchmarks import Benchmark, Task
from holdfast.config import RunConfig
from holdfast.data import ImageSet, data_root
from holdfast.engine import BfloatTwin
from holdfast.errors import UsageError
from holdfast.learners import Learner, Losses, Optimizer, Parts, settings_of
from holdfast.models import group_batchnorm
from holdfast.regularizers import name_of
from holdfast.rng import generator, seeded_globally

__all__ = ["check_benchmark", "check_learner", "check_regularizer"]


# --- regularizers ----------------------------------------------------------------------------------------------------


def check_regularizer(
    function: Callable[..., Tensor], classes: Sequence[int] = (2, 10), rows: Sequence[int] = (1, 2, 16), seed: int = 0
) -> None:
    """Raise an AssertionError unless `function` can be used as a regularizer.

    It takes the logits (B, C) of now and of then and needs nothing else. Its value is one finite number, the same every
    time; the gradient for the current logits is finite, also where both agree, for rows of zeros, for single rows and
    for logits of +-1e4. The inputs stay as they are, and a step never waits for the device. Unrelated logits must not
    score better than identical ones. `classes` and `rows` are the numbers of classes and of samples to try.
    """
    what = f"regularizer '{name_of(function)}'"
    _check_signature(function, what)
    draw = generator(seed, "testing")
    for width in classes:
        for height in rows:
            for case, current, stored in _logit_pairs(height, width, draw):
                _check_terms(function, current, stored, f"{what}: for {case} logits of shape ({height}, {width}),")
        _check_effect(function, width, draw, what)


def _check_signature(function: Callable[..., Tensor], what: str) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some callables written in C do not tell.
        return
    own = [each for each in list(parameters.values())[2:] if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    required = [each.name for each in own if each.default is each.empty]
    _require(not required, f"{what}: hyper-parameters need defaults, but {', '.join(required)} have none.")


def _logit_pairs(rows: int, classes: int, draw: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs (current, stored) of float32 logits that occur in training, with a name each."""
    current, stored = (torch.randn(rows, classes, generator=draw) for _ in range(2))
    zeros, huge = torch.zeros_like(current), 1e4 * current.sign()
    alternating = torch.ones_like(current)
    alternating[:, ::2] = -1
    yield "random", current, stored
    yield "identical", stored.clone(), stored
    yield "current zero", zeros, stored
    yield "stored zero", current, zeros
    yield "all-zero", zeros.clone(), zeros
    yield "+-1e4", huge, 1e4 * stored.sign()
    yield "identical +-1e4", huge.clone(), huge
    yield "opposite +-1e4", 1e4 * alternating, -1e4 * alternating
    yield "tiny", 1e-20 * current, 1e-20 * stored
    yield "constant", torch.full_like(current, 3.0), torch.full_like(current, 3.0)


def _check_terms(function: Callable[..., Tensor], current: Tensor, stored: Tensor, where: str) -> None:
    value, gradient = _value_and_gradient(function, current, stored, where)
    _require(value.isfinite(), f"{where} the value is {value.item()}.")
    _require(gradient.isfinite().all(), f"{where} the gradient is not finite.")
    again, gradient_again = _value_and_gradient(function, current, stored, where)
    _require(torch.equal(value, again), f"{where} it gives {value.item()} once and {again.item()} the next time.")
    _require(torch.equal(gradient, gradient_again), f"{where} a second call gives another gradient.")


def _value_and_gradient(
    function: Callable[..., Tensor], current: Tensor, stored: Tensor, where: str
) -> tuple[Tensor, Tensor]:
    now, then = current.clone().requires_grad_(), stored.clone()
    with _global_generator_untouched(where), _NeverWaits(where):
        value = function(now, then)
    _require(isinstance(value, Tensor), f"{where} it returns {type(value).__name__}, not a tensor.")
    _require(value.dim() == 0, f"{where} the value has shape {tuple(value.shape)}; it must be one number (0-d).")
    _require(value.dtype == current.dtype, f"{where} the value is {value.dtype}, the logits are {current.dtype}.")
    _require(value.requires_grad, f"{where} the value carries no gradient for the current logits.")
    _require(torch.equal(now, current), f"{where} it changes the current logits in place.")
    _require(torch.equal(then, stored), f"{where} it changes the stored logits in place.")
    _require(not then.requires_grad, f"{where} it asks for a gradient of the stored logits, which are constants.")
    (gradient,) = torch.autograd.grad(value, now, allow_unused=True)
    _require(gradient is not None, f"{where} the value does not depend on the current logits.")
    return value.detach(), gradient


def _check_effect(function: Callable[..., Tensor], classes: int, draw: torch.Generator, what: str) -> None:
    """On a larger batch, where it must be able to tell consistent answers from others."""
    stored, unrelated = (3 * torch.randn(64, classes, generator=draw) for _ in range(2))
    where = f"{what}: for random logits of shape (64, {classes}),"
    far, gradient = _value_and_gradient(function, unrelated, stored, where)
    _require(gradient.any(), f"{where} the gradient is 0 everywhere, so it would have no effect.")
    near, _ = _value_and_gradient(function, stored, stored, where)
    _require(
        near <= far,
        f"{where} identical ones score {near.item():.4g} and unrelated ones {far.item():.4g}; "
        "a smaller value must mean more consistent answers.",
    )


# --- learners --------------------------------------------------------------------------------------------------------


def check_learner(learner: type[Learner], config: RunConfig | None = None) -> None:
    """Raise an AssertionError unless runs can use this `Learner` subclass.

    It is made from `config` and shown minibatches of 8, 8, 8, 8, 3 and 1 samples in two tasks, as a run would. Each
    step returns finite `Losses` without gradient, changes the model, leaves the minibatch and torch's global generator
    alone, never waits for the device (unless the class says `capturable = False`), and changes nothing of the learner
    but tensors: a captured step would freeze anything else. A buffer stores samples as they came, whole. Every setting
    is read somewhere in the class. The same seeds give the same weights, and so does a learner that
    continues from a saved state. `wrap` makes a network for the weights of the evaluated one. Losses come from
    `network`, of which an engine may train a copy in bfloat16, unless the class says `uses_parameters = True`. `config`
    are the settings to make it from, if the default does not suit.
    """
    what = f"learner '{learner.__name__}'"
    _require(issubclass(learner, Learner), f"{what} must be a subclass of holdfast.Learner.")
    config = config or RunConfig(
        benchmark="testing", method="mse", buffer_size=12, lr=0.05, batch_size=8, replay_size=6, alpha=0.5, beta=0.5
    )
    _check_settings(learner, what)
    first, again = (_train_a_little(learner, config, what) for _ in range(2))
    resumed = _train_a_little(learner, config, what, resume=True)
    for name, weight in first.items():
        same, as_saved = torch.equal(weight, again[name]), torch.equal(weight, resumed[name])
        _require(same, f"{what}: the same seeds gave other weights in {name} the second time.")
        _require(as_saved, f"{what}: continued from its state_dict, it has other weights in {name}; see `extra_state`.")
    if not learner.uses_parameters:
        try:
            _train_a_little(learner, config.change(precision="bfloat16"), f"{what} in bfloat16")
        except UsageError as error:
            raise AssertionError(f"{what}: {error}") from error


def _check_settings(learner: type[Learner], what: str) -> None:
    """Every setting must be read: its name has to appear in the code of the class, outside the signature."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(learner)))
    except (OSError, TypeError):  # defined where no source is kept, for instance typed into a shell
        return
    read = {node.id for node in ast.walk(source) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = inspect.signature(learner.__init__).parameters
    for name in (each for each in settings_of(learner) if each in own):
        _require(name in read, f"{what}: nobody reads the setting {name}, so it would be accepted without effect.")


def _train_a_little(learner: type[Learner], config: RunConfig, what: str, resume: bool = False) -> dict[str, Tensor]:
    """The state of the evaluated network after a few checked steps; with `resume`, those of a second learner."""
    draw, offered = generator(config.seed, "testing"), set()
    built = _make(learner, config, what)
    for step, size in enumerate((8, 8, 8, 8, 3, 1), start=1):
        x = torch.randint(0, 256, (size, 1, 4, 4), generator=draw, dtype=torch.uint8)
        y = torch.randint(0, 3, (size,), generator=draw)
        if step in (1, 4):
            built.begin_task((0, 1, 2))
        offered |= {_identity(*sample) for sample in zip(x, y, strict=True)}
        _check_step(built, x, y, f"{what}, step {step} ({size} samples):", frozen=step > 2)
        if step > 3 or not learner.needs_boundaries:  # some fill their buffer when a task ends
            _check_buffer(built, config, offered, f"{what}, after step {step}:")
        if step in (3, 6):
            built.end_task(x, y)
        if resume and step == 4:
            state = copy.deepcopy(built.state_dict())
            built = _make(learner, config, what)
            built.load_state_dict(state)
    found = {name: tensor.clone() for name, tensor in built.evaluated().state_dict().items()}
    try:  # as an analysis of a finished run does
        learner.wrap(_network(config), **dict(config.settings)).load_state_dict(found)
    except RuntimeError as error:
        raise AssertionError(f"{what}: the weights of evaluated() do not fit wrap(model): {error}") from error
    return found


class _Network(nn.Sequential):
    """Layers that end with a linear one; some methods ask for what that one sees."""

    def features(self, x: Tensor) -> Tensor:
        return self[:-1](x)  # type: ignore[no-any-return]


def _network(config: RunConfig) -> nn.Module:
    with seeded_globally(config.seed, "init"):
        layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
        return group_batchnorm(_Network(*layers))


def _make(learner: type[Learner], config: RunConfig, what: str) -> Learner:
    model = _network(config)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    network: nn.Module = model
    if config.precision == "bfloat16" and not learner.uses_parameters:  # as an engine does on a GPU
        optimizer = BfloatTwin(model, config.lr)
        network = optimizer.network
    parts = Parts(model, optimizer, Normalize(), generator(config.seed, "buffer"), network)
    built = learner.from_config(config, parts)
    _require(isinstance(built, learner), f"{what}: from_config returns {type(built).__name__}.")
    _require(built.model is model, f"{what}: `model` must be the one from_config was given, which runs train.")
    return built


def _check_step(learner: Learner, x: Tensor, y: Tensor, where: str, frozen: bool) -> None:
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    x_given, y_given, values = x.clone(), y.clone(), _plain_values(learner)
    waiting = _NeverWaits(where) if learner.capturable else nullcontext()
    with _global_generator_untouched(where), waiting:
        losses = learner.observe(x_given, y_given)
    _require(isinstance(losses, Losses), f"{where} observe returns {type(losses).__name__}, not Losses.")
    for name, term in losses.as_dict().items():
        _require(isinstance(term, Tensor), f"{where} the loss term '{name}' is not a tensor.")
        _require(term.dim() == 0, f"{where} the loss term '{name}' has shape {tuple(term.shape)}; it must be 0-d.")
        _require(not term.requires_grad, f"{where} the loss term '{name}' holds on to its graph; detach it.")
        _require(term.isfinite(), f"{where} the loss term '{name}' is {term.item()}.")
        _require(name in ("total", *learner.terms), f"{where} the loss term '{name}' is not among its `terms`.")
    _require(torch.equal(x, x_given), f"{where} observe changes the inputs in place.")
    _require(torch.equal(y, y_given), f"{where} observe changes the labels in place.")
    _require(learner.model.training, f"{where} observe leaves the model in evaluation mode.")
    after = list(learner.model.parameters())
    _require(all(parameter.isfinite().all() for parameter in after), f"{where} weights are no longer finite.")
    changed = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    _require(changed, f"{where} the model does not change.")
    for name, value in _plain_values(learner).items() if frozen else ():
        _require(
            values.get(name) == value,
            f"{where} `{name}` changes from {values.get(name)!r} to {value!r}. A captured step would freeze it: make "
            "it a tensor that changes in place, and name it in `extra_state`.",
        )


def _plain_values(learner: Learner) -> dict[str, object]:
    """The learner's own attributes that are numbers, texts, or containers of them."""

    def is_plain(value: Any) -> bool:
        held = value.values() if isinstance(value, dict) else value
        parts = held if isinstance(value, tuple | list | set | dict) else [value]
        return all(isinstance(part, bool | int | float | str | None) for part in parts)

    return {name: copy.copy(value) for name, value in vars(learner).items() if is_plain(value)}


def _check_buffer(learner: Learner, config: RunConfig, offered: set[bytes], where: str) -> None:
    if learner.buffer is None:
        return
    stored = learner.buffer.stored
    _require(stored > 0, f"{where} the buffer is still empty.")
    most = stored if config.buffer_size is None else config.buffer_size
    _require(stored <= most, f"{where} the buffer holds {stored} of at most {most} samples.")
    found = learner.buffer.contents()
    whole = all(_identity(*sample) in offered for sample in zip(found.x, found.y, strict=True))
    _require(whole, f"{where} the buffer holds an input and label that were not observed together, as they came.")


def _identity(x: Tensor, y: Tensor) -> bytes:
    return f"{x.dtype} {y.item()} ".encode() + x.contiguous().numpy().tobytes()


# --- benchmarks ------------------------------------------------------------------------------------------------------


def check_benchmark(
    function: Callable[[RunConfig, Path], Benchmark], config: RunConfig | None = None, root: Path | str | None = None
) -> None:
    """Raise an AssertionError unless runs can use this benchmark function.

    Its tasks hold uint8 images of one shape with int64 labels among the task's classes; the views of them are finite
    float32 of `shape`; an epoch shows a sample at most once; and everything follows from the config's seed. `config`
    are the settings to build it from, `root` is the folder of the data sets.
    """
    what = f"benchmark '{name_of(function)}'"
    config = config or RunConfig(benchmark="testing", method="sgd", buffer_size=None)
    with _global_generator_untouched(f"{what}:"):
        benchmark = function(config, data_root(root))
    _require(isinstance(benchmark, Benchmark), f"{what} returns {type(benchmark).__name__}, not a Benchmark.")
    _require(benchmark.classes >= 2, f"{what} has {benchmark.classes} classes; there must be 2 at least.")
    _require(benchmark.tasks, f"{what} has no tasks.")
    if config.tasks is not None:
        _require(len(benchmark.tasks) == config.tasks, f"{what} has {len(benchmark.tasks)} tasks, not {config.tasks}.")
    again = function(config, data_root(root))
    _require(len(again.tasks) == len(benchmark.tasks), f"{what}: a second call with the same config gives other tasks.")
    for number, (task, twin) in enumerate(zip(benchmark.tasks, again.tasks, strict=True), start=1):
        _check_task(benchmark, task, twin, config, f"{what}, task {number}:")


def _check_task(benchmark: Benchmark, task: Task, twin: Task, config: RunConfig, where: str) -> None:
    inside = all(0 <= label < benchmark.classes for label in task.classes)
    _require(inside, f"{where} its classes {task.classes} are not all in 0..{benchmark.classes - 1}.")
    _require(task.classes, f"{where} it has no classes.")
    _require(len(set(task.classes)) == len(task.classes), f"{where} its classes {task.classes} repeat.")
    with _global_generator_untouched(where):
        train = task.train()
    for part, images, other in (("training", train, twin.train()), ("test", task.test, twin.test)):
        _check_images(benchmark, task, images, f"{where} the {part} set")
        same = all(map(torch.equal, images, other))
        _require(same, f"{where} the {part} set differs when the benchmark is made again from the same config.")
    # A run that validates on a part of it, or that was stopped and continues, makes it more than once.
    _require(
        all(map(torch.equal, train, task.train())), f"{where} a second call of train() gives another training set."
    )
    _check_views(benchmark, train.images[:4], where)
    _check_order(benchmark, len(train.labels), config.batch_size, where)


def _check_images(benchmark: Benchmark, task: Task, images: ImageSet, what: str) -> None:
    pixels, labels = images
    _require(len(labels), f"{what} is empty.")
    _require(len(pixels) == len(labels), f"{what} has {len(pixels)} images and {len(labels)} labels.")
    _require(pixels.dtype == torch.uint8, f"{what} has images of {pixels.dtype}, not uint8.")
    _require(labels.dtype == torch.int64, f"{what} has labels of {labels.dtype}, not int64.")
    _require(labels.dim() == 1, f"{what} has labels of shape {tuple(labels.shape)}, not one per image.")
    strangers = sorted(set(labels.tolist()) - set(task.classes))
    _require(not strangers, f"{what} has labels {strangers} that are not among the task's classes {task.classes}.")


def _check_views(benchmark: Benchmark, images: Tensor, where: str) -> None:
    views = ("training", benchmark.train_view(generator(0, "augment"))), ("test", benchmark.normalize)
    for part, view in views:
        before = images.clone()
        with _global_generator_untouched(where), _NeverWaits(where):
            shown = view(images)
        shape, expected = tuple(shown.shape), (len(images), *benchmark.shape)
        _require(shape == expected, f"{where} {part} views have shape {shape}, not {expected}.")
        _require(shown.dtype == torch.float32, f"{where} {part} views are {shown.dtype}, not float32.")
        _require(shown.isfinite().all(), f"{where} {part} views are not finite.")
        _require(torch.equal(images, before), f"{where} making {part} views changes the images.")


def _check_order(benchmark: Benchmark, count: int, batch_size: int, where: str) -> None:
    first, again = (list(benchmark.batches(count, batch_size, generator(0, "order"))) for _ in range(2))
    _require(first, f"{where} an epoch has no minibatches.")
    fitting = all(0 < len(batch) <= batch_size for batch in first)
    _require(fitting, f"{where} a minibatch is empty or over {batch_size}.")
    indices = torch.cat(first)
    _require(torch.equal(indices, torch.cat(again)), f"{where} the order does not follow from its generator alone.")
    inside = bool(indices.min() >= 0 and indices.max() < count)
    _require(inside, f"{where} a minibatch asks for samples that are not there.")
    _require(len(set(indices.tolist())) == len(indices), f"{where} an epoch shows a sample twice.")


# --- what all of them must heed --------------------------------------------------------------------------------------


def _require(condition: object, sentence: str) -> None:
    """An assertion that also holds under `python -O`, and whose message is nothing but the sentence."""
    if not condition:
        raise AssertionError(sentence)


@contextmanager
def _global_generator_untouched(where: str) -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    same = torch.equal(before, torch.get_rng_state())
    _require(same, f"{where} it draws from torch's global generator; everything random needs a generator of the run.")


class _NeverWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where the value of a tensor is asked for: `.item()`, `float(t)`, `if t > 0`, boolean indexing."""

    WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"})

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = function.name().partition(".")[0]
        chosen = args[1] if operation == "aten::index" else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in chosen)
        _require(
            operation not in self.WAITS and not by_mask,
            f"{self.where} it asks for the value of a tensor ({operation}), for instance by .item(), a branch or "
            "boolean indexing; on a GPU, a step must not wait for that.",
        )
        return function(*args, **(kwargs or {}))
