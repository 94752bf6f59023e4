"""Holdfast in Lightning: a module that a Holdfast learner trains, and callbacks for any other module.

Needs the extra `lightning`.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.buffer import Reservoir
from holdfast.errors import UsageError, needing
from holdfast.learners import Learner
from holdfast.models import copied, evaluating
from holdfast.monitor import ForgettingMonitor
from holdfast.rng import generator

with needing("lightning", "this needs Lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["ForgettingCallback", "ReplayCallback", "ReplayModule"]

KEY = "holdfast"  # the entry of the learner in Lightning's checkpoints
COUNTS = "holdfast network"  # the entry of the network that counts, where it is not the model


class ReplayModule(LightningModule):
    """A model that the trainer trains with a Holdfast learner.

        module = ReplayModule(
            model,
            partial(hf.ConsistencyReplay, buffer_size=500, regularizer="linf", alpha=0.5, beta=0.2),
            partial(torch.optim.SGD, lr=0.1),
        )
        Trainer(max_epochs=1).fit(module, stream)

    `make_learner(model, optimizer)` is called when training begins, with the model on its device, and
    `make_optimizer(parameters)` when the trainer asks for an optimiser. Batches are pairs (inputs, labels). The loss
    terms are logged as loss/total and so on. The next `fit` continues with the same learner and buffer. Both are part
    of Lightning's checkpoints. To test one in another process, for instance with `Trainer().test(module, data, path)`,
    make the module as it was made for training.
    """

    def __init__(
        self,
        model: nn.Module,
        make_learner: Callable[..., Learner],
        make_optimizer: Callable[..., torch.optim.Optimizer],
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # a learner does its own backward pass and update
        self.model, self.make_learner, self.make_optimizer = model, make_learner, make_optimizer
        self.learner: Learner | None = None
        self._saved: dict[str, Any] | None = None
        """The learner of a checkpoint, from which training is to go on."""
        self._weights: dict[str, Tensor] | None = None
        """Those of the network that counts in that checkpoint, where it is not the model."""
        self._shown: list[nn.Module] = []
        """That network once it was asked for. A module in an attribute of its own would become a part of this one."""

    def forward(self, x: Any) -> Any:
        """The output of the network that counts: the model, or for some methods the learner's average of it."""
        network = self._network()
        # The trainer knows nothing of an average, and changes the mode of its own modules only.
        with nullcontext() if self.training else evaluating(network):
            return network(x)

    def _network(self) -> nn.Module:
        """The network that counts: of a checkpoint that was loaded, else the learner's."""
        if self._weights is None:
            return self.model if self.learner is None else self.learner.evaluated()
        if not self._shown:
            with torch.inference_mode(False):  # in which the trainer tests; what it makes is of no use outside
                self._shown = [self._restored(self._weights)]
        return self._shown[0]

    def _restored(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """A network with these weights, without a learner: its buffer may be in a folder that another process uses."""
        network, kind = copied(self.model), getattr(self.make_learner, "func", self.make_learner)
        if isinstance(kind, type) and issubclass(kind, Learner):
            network = kind.wrap(network, **getattr(self.make_learner, "keywords", {}))
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(
                "the network of this checkpoint has another form than the model: make the module with the same model, "
                "and with make_learner=partial(...) of the same learner and settings, as it was made for training."
            ) from error
        return network

    def configure_optimizers(self) -> Any:
        """The learner's optimiser, or a new one for the learner to come."""
        return self.make_optimizer(self.model.parameters()) if self.learner is None else self.learner.optimizer

    def on_train_start(self) -> None:
        """Make the learner, unless an earlier `fit` did; continue from a checkpoint if one was loaded."""
        if self.learner is None:
            self.learner = self.make_learner(self.model, self.optimizers().optimizer)
        if self._saved is not None:
            self.learner.load_state_dict(self._saved)
            self._saved, self._weights, self._shown = None, None, []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One step of the learner."""
        assert self.learner is not None
        x, y = batch
        losses = self.learner.losses(x, y)
        self.learner.descend(losses, self.optimizers())  # the trainer counts the steps of its wrapper only
        self.learner.commit(losses)
        terms = losses.detach().as_dict()
        self.log_dict({f"loss/{term}": value for term, value in terms.items()}, batch_size=len(y))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the learner into the checkpoint, buffer, counters and generators, and the network that counts."""
        if self.learner is None:
            return
        checkpoint[KEY] = self.learner.state_dict()
        if (network := self.learner.evaluated()) is not self.learner.model:
            checkpoint[COUNTS] = dict(network.state_dict())  # the learner's own tensors, which are written once

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the learner's state until training begins."""
        self._saved, self._weights, self._shown = checkpoint.get(KEY), checkpoint.get(COUNTS), []
        if self._saved is not None:  # it has the optimiser's state, also of layers that are not the model's
            checkpoint["optimizer_states"] = []


class ReplayCallback(Callback):
    """Experience replay for any Lightning module without a change to its code: stored samples join every batch.

    Batches must be lists [inputs, labels], as DataLoader makes them of pairs. `replay_size` is the number of samples
    that join; None for as many as the batch has. With a loss that is a mean over the batch, this equals
    `hf.ExperienceReplay` with alpha = 1. For consistency regularization, use `ReplayModule`.
    """

    def __init__(self, buffer_size: int, replay_size: int | None = None, seed: int = 0) -> None:
        Reservoir(buffer_size)  # a wrong size is refused now, not at the first batch
        self.buffer_size, self.replay_size, self.seed = buffer_size, replay_size, seed
        self.buffer: Reservoir | None = None
        self._saved: dict[str, Any] | None = None
        self._observed: tuple[Tensor, Tensor] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Add samples from the buffer to the batch, in place."""
        if not isinstance(batch, list) or len(batch) != 2:
            raise UsageError(
                f"replay needs batches that are lists [inputs, labels], not {type(batch).__name__}; "
                "let the DataLoader collate pairs, or use ReplayModule."
            )
        buffer = self._reservoir(pl_module.device)
        self._observed = (batch[0], batch[1])
        parts = [self._observed]
        if buffer.stored:
            drawn = buffer.sample(self.replay_size or len(batch[1]))
            parts.append((drawn.x, drawn.y))
        # New memory, also without a draw: the module may change its batch, and what is stored must stay as it came.
        batch[:] = [torch.cat(column) for column in zip(*parts, strict=True)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Offer the new samples of the batch to the buffer."""
        if self._observed is not None:
            self._reservoir(pl_module.device).add(*self._observed)
            self._observed = None

    def state_dict(self) -> dict[str, Any]:
        """The buffer, for Lightning's checkpoints."""
        return {} if self.buffer is None else {"buffer": self.buffer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the buffer of a checkpoint."""
        self._saved = state_dict.get("buffer")

    def _reservoir(self, device: torch.device) -> Reservoir:
        if self.buffer is None:
            self.buffer = Reservoir(self.buffer_size, generator=generator(self.seed, "buffer", device))
        if self._saved is not None:
            self.buffer.load_state_dict(self._saved)
            self._saved = None
        return self.buffer


class ForgettingCallback(Callback):
    """A forgetting monitor that counts the training steps and logs its readings."""

    def __init__(self, monitor: ForgettingMonitor) -> None:
        self.monitor = monitor

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step; log the readings when the slices were measured."""
        if self.monitor.observe():
            pl_module.log_dict(self.monitor.values())

    def state_dict(self) -> dict[str, Any]:
        """The history, for Lightning's checkpoints."""
        return self.monitor.to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the history of a checkpoint. Add the slices first."""
        self.monitor.load_dict(state_dict)
