"""A learner's state: what it consists of, its file, whether a saved one fits, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.learners.optimizers import ByUpdates
from holdfast.ranks import Ranks
from holdfast.rng import check_globally, global_generators, restore

if TYPE_CHECKING:
    from holdfast.learners.base import Learner

__all__ = ["load_state", "networks_of", "read_learner", "state_of", "without_frozen", "write_learner"]


def state_of(learner: Learner) -> dict[str, Any]:
    """All that decides what the learner's next steps do. The tensors are the learner's own, not copies."""
    state: dict[str, Any] = {"learner": type(learner).__name__, "model": dict(learner.model.state_dict())}
    state["global"] = {kind: each.get_state() for kind, each in global_generators(learner.device).items()}
    for name, part in _parts(learner).items():
        # Of the optimiser and the scheduler, the kind as well: the state of another kind would not fit.
        own = part.state_dict()
        state[name] = own if name == "buffer" else {"type": _kind(part), "state": own}
    if "optimizer" in state:
        state["optimizer"]["names"] = _updated(learner)
    if (answers := _answers(learner)) is not None:
        state["answers"] = answers
    if extra := _extra(learner):
        state["extra"] = extra
    if (generator := learner.view_generator) is not None:
        state["augment"] = generator.get_state()
    if learner.ranks is not None:
        _add_ranks(learner.ranks, state)
    return state


def load_state(learner: Learner, state: dict[str, Any]) -> None:
    """Put the learner where the one was that gave `state`; a state that does not fit raises and changes nothing."""
    with learner.together("continue from a saved learner"):
        _check(learner, state)
    if learner.head is not None:
        learner.grow(len(state["model"][f"{learner.head.name}.weight"]))
    for name, part in _parts(learner).items():
        # A copy: torch.optim keeps the tensors it is given, which may be another learner's own.
        part.load_state_dict(state[name] if name == "buffer" else deepcopy(state[name]["state"]))
    if "optimizer" in state:
        _restore_types(learner.optimizer, state["optimizer"]["state"])
    learner.model.load_state_dict(state["model"], strict="frozen" not in state)
    saved = _completed(learner, state)
    for name, each in learner.extra_state().items():
        _restore(each, saved[name])
    _restore_generators(learner, state)  # last, because loading may draw from the global ones


def write_learner(learner: Learner, path: Path, extra: dict[str, Any], trainable_only: bool) -> None:
    """`Learner.save`."""
    with learner.together("check the model"):
        learner.check_finite()
    own = learner.state_dict()
    state = {"learner": without_frozen(learner, own) if trainable_only else own, "extra": extra}
    with learner.together("save a checkpoint"):
        if learner.ranks is None or learner.ranks.rank == 0:
            checkpoint.write(path, "learner", state)
    if learner.buffer is not None:
        learner.buffer.commit(state["learner"]["buffer"])


def read_learner(learner: Learner, path: Path) -> dict[str, Any]:
    """`Learner.load`."""
    with learner.together("read a checkpoint"):
        state = checkpoint.read(path, "learner").state
    try:
        learner.load_state_dict(state["learner"])
        extra: dict[str, Any] = state["extra"]
    except HoldfastError:
        raise
    except checkpoint.NONSENSE as error:
        raise CheckpointError(
            f"{path} is whole, but not what such a learner saves: {error!r}. Part of it may have been taken over; "
            "make the learner anew."
        ) from error
    if learner.buffer is not None:
        learner.buffer.commit()
    return extra


def _restore_types(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Give the optimiser's numbers the types that they were saved in: torch.optim loads them in that of the weights."""
    weights = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    for number, values in saved.get("state", {}).items() if weights else ():
        own = optimizer.state.get(weights[number], {})
        for name, value in values.items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and own[name].dtype != value.dtype:
                own[name] = value.to(own[name].device, copy=True)


def without_frozen(learner: Learner, state: dict[str, Any]) -> dict[str, Any]:
    """The learner's state without its frozen weights; "frozen" says which those are, and their shapes.

    Copies of the model are left without those that equal the model's bit for bit: `load` takes them from the model.
    """
    frozen, model = _frozen(learner.model), state["model"]
    extra = dict(state.get("extra", {}))
    for name in _copies(learner):
        same = {each for each in frozen if torch.equal(extra[name][each], model[each])}
        extra[name] = {each: value for each, value in extra[name].items() if each not in same}
    return state | {
        "model": {name: each for name, each in model.items() if name not in frozen},
        "frozen": frozen,
        **({"extra": extra} if extra else {}),
    }


def _completed(learner: Learner, state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of the method; frozen weights that its copies were saved without come from the model."""
    extra, model = dict(state.get("extra", {})), learner.model.state_dict()
    frozen = {name: model[name] for name in state.get("frozen", {})}
    return extra | {name: frozen | extra[name] for name in _copies(learner) if name in extra}


def _copies(learner: Learner) -> list[str]:
    """Which networks of the method are copies of the model, as averages and teachers are."""
    model, extra = _forms(learner.model.state_dict()), learner.extra_state()
    return [name for name, each in extra.items() if isinstance(each, nn.Module) and _forms(each.state_dict()) == model]


def _frozen(model: nn.Module) -> dict[str, str]:
    """The shape of each weight that no gradient reaches, by its name."""
    weights = model.state_dict(keep_vars=True).items()
    return {
        name: str(tuple(each.shape))
        for name, each in weights
        if isinstance(each, nn.Parameter) and not each.requires_grad
    }


def _parts(learner: Learner) -> dict[str, Any]:
    """What a learner has besides its model, as far as it has a state."""
    parts = {"optimizer": learner.optimizer, "scheduler": learner.scheduler, "buffer": learner.buffer}
    return {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}


def _kind(part: Any) -> str:
    """The name of its class; of a scheduler that a learner has put into `ByUpdates`, the name of the scheduler's."""
    return type(part.inner if isinstance(part, ByUpdates) else part).__name__


def _updated(learner: Learner) -> list[list[str]]:
    """The names of the parameters in each group of the optimiser, whose own state only numbers them.

    Those of a network of the method's begin with its name in `extra_state`. Parameters of no network have their shape.
    """
    parts = reversed(networks_of(learner).items())  # the model last, whose names count
    names = {id(each): part + name for part, network in parts for name, each in network.named_parameters()}
    groups = getattr(learner.optimizer, "param_groups", [])
    return [[names.get(id(each), f"one of shape {tuple(each.shape)}") for each in group["params"]] for group in groups]


def _answers(learner: Learner) -> str | None:
    """The option `answers` in words, as far as there are any; None where no outputs are stored."""
    answers = getattr(learner, "answers", None)
    return answers.name if answers is not None and getattr(learner, "stores_outputs", False) else None


# --- a method's own state --------------------------------------------------------------------------------------------


def networks_of(learner: Learner) -> dict[str, nn.Module]:
    """The model and the method's own networks, by what goes before the names of their weights."""
    own = {f"{name}.": each for name, each in learner.extra_state().items() if isinstance(each, nn.Module)}
    return {"": learner.model, **own}


def _extra(learner: Learner) -> dict[str, Any]:
    """The values of a method's own state by name: tensors, and for a module a dict of them."""

    def value(each: nn.Module | Tensor | torch.Generator) -> Any:
        if isinstance(each, nn.Module):
            return dict(each.state_dict())
        return each.get_state() if isinstance(each, torch.Generator) else each

    return {name: value(each) for name, each in learner.extra_state().items()}


def _restore(each: nn.Module | Tensor | torch.Generator, saved: Any) -> None:
    """In place: a captured step reads from the addresses it was captured with."""
    if isinstance(each, nn.Module):
        each.load_state_dict(saved)
    elif isinstance(each, torch.Generator):
        restore(each, saved)
    else:
        each.copy_(saved)


# --- generators ------------------------------------------------------------------------------------------------------


def _add_ranks(ranks: Ranks, state: dict[str, Any]) -> None:
    """Make `state` the same on all ranks: the first one's, with what is each rank's own beside it."""
    with ranks.together("read the learner") as meeting:
        meeting.form = f"views {'with' if 'augment' in state else 'without'} a generator"
    state["ranks"] = {"global": {kind: ranks.gather(each) for kind, each in state["global"].items()}}
    state["global"] = {kind: each[0] for kind, each in state["ranks"]["global"].items()}
    if "augment" in state:
        state["ranks"]["augment"] = ranks.gather(state["augment"])
        state["augment"] = state["ranks"]["augment"][0]


def _restore_generators(learner: Learner, state: dict[str, Any]) -> None:
    """Put the generators back; of several ranks, each its own."""
    by_rank, own = state.get("ranks", {}), global_generators(learner.device)
    saved = [(each, state["global"][kind], by_rank.get("global", {}).get(kind)) for kind, each in own.items()]
    if (view := learner.view_generator) is not None:
        saved.append((view, state["augment"], by_rank.get("augment")))
    for generator, alone, each_rank in saved:
        if learner.ranks is None:
            restore(generator, alone)
        else:
            learner.ranks.restore(generator, each_rank or [alone])


# --- does a saved state fit? -----------------------------------------------------------------------------------------


def _check(learner: Learner, state: Mapping[str, Any]) -> None:
    """Raise before anything is changed if `state` is of another learner."""
    if state["learner"] != type(learner).__name__:
        raise UsageError(f"this is a {type(learner).__name__}, but the saved learner is a {state['learner']}.")
    own = {*_parts(learner), *(["augment"] if learner.view_generator is not None else [])}
    for name in ("optimizer", "scheduler", "buffer", "augment"):
        if (name in own) != (name in state):
            has, lacks = ("this", "the saved") if name in own else ("the saved", "this")
            raise UsageError(f"{has} learner keeps state of its {name}, {lacks} one does not; make them alike.")
    check_globally(state["global"], learner.device)
    if learner.buffer is not None:
        learner.buffer.check_state(state["buffer"])
        labels = dict(zip(state["buffer"]["names"], state["buffer"]["columns"], strict=True)).get("y")
        if learner.labelled and labels is not None and labels.dtype != torch.int64:
            raise UsageError(f"the saved buffer holds labels of type {labels.dtype}, which no learner stores.")
    if (saved := state.get("answers")) != (stored := _answers(learner)):
        raise UsageError(f"the saved learner stores {saved}, this one {stored}: make it with the same option answers=.")
    if "frozen" in state:
        advice = "Load the model that it began with, and freeze the same weights."
        complaint = "the saved learner was trained on another model, with other frozen weights"
        _check_same(complaint, state["frozen"], _frozen(learner.model), advice)
    _check_model(learner, state["model"], state.get("frozen", {}))
    for name in ("optimizer", "scheduler"):
        if name in own:
            _check_kind(name, state[name], getattr(learner, name))
    if "optimizer" in state:
        _check_order(state["optimizer"]["names"], _updated(learner))
    extra = _forms(_completed(learner, state)), _forms(_extra(learner))
    _check_same("the saved learner's own state does not fit this one", *extra, "Make this learner as that one was.")


def _check_model(learner: Learner, saved: Mapping[str, Any], left_out: Mapping[str, str]) -> None:
    """The same tensors in the same shapes; a head that may grow may have fewer outputs than the saved one."""
    own = {name: each for name, each in learner.model.state_dict().items() if name not in left_out}
    there, here = _forms(saved), _forms(own)
    for name, part in learner.head.parameters().items() if learner.head is not None else ():
        other = saved.get(name)
        if other is not None and len(other) > len(part) and other.shape[1:] == part.shape[1:]:
            here[name] = there[name]
    advice = (
        "Build the model as it was when saved; one whose head had grown, with head= as then, or with as many outputs "
        "as it had in the end."
    )
    _check_same("the saved model does not fit this one", there, here, advice)


def _check_kind(name: str, saved: Mapping[str, Any], own: Any) -> None:
    """An optimiser or a scheduler must be of the same kind and update the same numbers of parameters."""
    word = "optimiser" if name == "optimizer" else name
    if saved["type"] != _kind(own):
        raise UsageError(f"the saved {word} is {saved['type']}, this one {_kind(own)}.")
    there, here = (
        [len(group["params"]) for group in groups]
        for groups in (saved["state"].get("param_groups", []), getattr(own, "param_groups", []))
    )
    if there != here:
        raise UsageError(
            f"the saved {word} does not fit this one: it updates groups of {there} parameters, this one {here}. "
            f"Build the {word} as it was when saved."
        )


def _check_order(there: list[list[str]], here: list[list[str]]) -> None:
    """The optimiser must update the same parameters in the same order; each would get the momentum of another."""
    for number, (saved, own) in enumerate(zip(there, here, strict=True)):
        for place, (one, other) in enumerate(zip(saved, own, strict=True)):
            if one != other:
                raise CheckpointError(
                    f"the saved optimiser does not fit this one: parameter {place} of its group {number} is {one}, of "
                    f"this one {other}. Build the optimiser from the same parameters, in the order it had when saved."
                )


def _check_same(complaint: str, there: Mapping[str, str], here: Mapping[str, str], advice: str) -> None:
    """Raise, and name the first tensor, if the file and this learner have other tensors or other forms of them."""
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise UsageError(
                f"{complaint}: {name} is {there.get(name, 'missing')} in the file and {here.get(name, 'missing')} "
                f"here. {advice}"
            )


def _forms(values: Mapping[str, Any]) -> dict[str, str]:
    """Shape and type of every tensor, also of those in a module's state."""
    forms: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            forms |= {f"{name}.{part}": form for part, form in _forms(value).items()}
        elif isinstance(value, Tensor):
            forms[name] = f"{tuple(value.shape)} {value.dtype}"
    return forms
