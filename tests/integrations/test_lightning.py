"""Lightning's real trainer, against the same steps done by hand."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

lightning = pytest.importorskip("lightning.pytorch", reason="make friends installs Lightning")
from holdfast.integrations.lightning import ForgettingCallback, ReplayCallback, ReplayModule  # noqa: E402

pytestmark = [
    # What Lightning says about loaders without workers, and about itself on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LEARNERS = {
    "consistency": partial(hf.ConsistencyReplay, buffer_size=12, regularizer="linf", alpha=0.5, beta=0.2, seed=3),
    "er": partial(hf.ExperienceReplay, buffer_size=12, seed=3),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def samples():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(40, 5, generator=draw), torch.randint(0, 3, (40,), generator=draw)


def stream():
    return DataLoader(TensorDataset(*samples()), batch_size=8)


def by_hand(make, epochs=1):
    model = network()
    learner = make(model, SGD(model.parameters()))
    for _ in range(epochs):
        for x, y in stream():
            losses = learner.observe(x, y)
    return learner, losses


def trainer(folder, **options):
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )


def same(left, right):
    return all(torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items())


@pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)
def test_the_trainer_does_the_steps_of_the_learner(make, tmp_path):
    expected, losses = by_hand(make)
    module = ReplayModule(network(), make, SGD)
    fitting = trainer(tmp_path)
    fitting.fit(module, stream())
    assert same(module.model, expected.model)
    assert fitting.global_step == 5
    assert fitting.callback_metrics["loss/total"] == losses.total
    assert module.learner.buffer.offered == 40
    assert torch.equal(module(samples()[0]), expected.model(samples()[0]))


def test_the_next_fit_goes_on_with_buffer_and_optimiser(tmp_path):
    expected, _ = by_hand(LEARNERS["consistency"], epochs=2)
    module = ReplayModule(network(), LEARNERS["consistency"], SGD)
    for _ in range(2):
        trainer(tmp_path).fit(module, stream())
    assert same(module.model, expected.model)
    assert module.learner.buffer.offered == 80


@pytest.mark.parametrize("make", LEARNERS.values(), ids=LEARNERS)
def test_a_checkpoint_of_lightning_holds_the_learner(make, tmp_path):
    expected, _ = by_hand(make, epochs=2)
    module = ReplayModule(network(), make, SGD)
    fitting = trainer(tmp_path)
    fitting.fit(module, stream())
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    later = ReplayModule(network(), make, SGD)
    trainer(tmp_path, max_epochs=2).fit(later, stream(), ckpt_path=tmp_path / "one.ckpt")
    assert same(later.model, expected.model)
    assert torch.equal(later.learner.buffer.contents().x, expected.buffer.contents().x)


class Own(lightning.LightningModule):
    """Somebody's module, which knows nothing of replay."""

    def __init__(self, model):
        super().__init__()
        self.model, self.sizes = model, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(y))
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return SGD(self.model.parameters())


def near(left, right):
    return all(torch.allclose(value, right.state_dict()[name], atol=1e-6) for name, value in left.state_dict().items())


def test_the_callback_makes_any_module_replay(tmp_path):
    expected, _ = by_hand(LEARNERS["er"])
    module = Own(network())
    trainer(tmp_path, callbacks=[ReplayCallback(buffer_size=12, seed=3)]).fit(module, stream())
    assert module.sizes == [8, 16, 16, 16, 16]
    assert near(module.model, expected.model)
    without = Own(network())
    trainer(tmp_path).fit(without, stream())
    assert not near(without.model, expected.model)


def test_a_module_that_works_in_place_leaves_what_is_stored(tmp_path):
    class InPlace(Own):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(0)
            batch[1].fill_(2)
            return super().training_step(batch, batch_idx)

    callback = ReplayCallback(buffer_size=40)
    trainer(tmp_path, callbacks=[callback]).fit(InPlace(network()), stream())
    stored, (x, y) = callback.buffer.contents(), samples()
    assert torch.equal(stored.x, x)
    assert torch.equal(stored.y, y)


def test_the_callback_continues_from_a_checkpoint(tmp_path):
    expected, _ = by_hand(LEARNERS["er"], epochs=2)
    first = trainer(tmp_path, callbacks=[ReplayCallback(buffer_size=12, seed=3)])
    first.fit(Own(network()), stream())
    first.save_checkpoint(tmp_path / "one.ckpt")
    module = Own(network())
    callback = ReplayCallback(buffer_size=12, seed=3)
    trainer(tmp_path, max_epochs=2, callbacks=[callback]).fit(module, stream(), ckpt_path=tmp_path / "one.ckpt")
    assert near(module.model, expected.model)
    assert callback.buffer.offered == 80


def test_the_callback_says_what_batches_it_needs(tmp_path):
    loader = DataLoader([{"x": torch.randn(5)} for _ in range(4)])
    with pytest.raises(hf.UsageError, match=r"lists \[inputs, labels\], not dict"):
        trainer(tmp_path, callbacks=[ReplayCallback(buffer_size=12)]).fit(Own(network()), loader)
    with pytest.raises(hf.UsageError, match="buffer size must be at least 1"):
        ReplayCallback(buffer_size=0)


def test_forgetting_is_watched_and_logged(tmp_path):
    expected, _ = by_hand(LEARNERS["er"])
    module = ReplayModule(network(), LEARNERS["er"], SGD)
    monitor = hf.ForgettingMonitor(module, every=2, drop=100)
    monitor.add("old", *samples())
    fitting = trainer(tmp_path, callbacks=[ForgettingCallback(monitor)])
    fitting.fit(module, stream())
    assert [reading.step for reading in monitor.history] == [0, 2, 4]
    assert fitting.callback_metrics["old/score"] == pytest.approx(monitor.history[-1].score)
    assert same(module.model, expected.model)  # watching changes nothing
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    later = hf.ForgettingMonitor(module, every=2, drop=100)
    later.add("old", *samples())
    again = trainer(tmp_path, max_epochs=2, callbacks=[ForgettingCallback(later)])
    again.fit(ReplayModule(network(), LEARNERS["er"], SGD), stream(), ckpt_path=tmp_path / "one.ckpt")
    assert [reading.step for reading in later.history] == [0, 2, 4, 6, 8, 10]


def test_without_lightning_the_message_names_the_extra():
    code = "import sys; sys.modules['lightning'] = None; import holdfast.integrations.lightning"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'holdfast[lightning]'" in answer.stderr.splitlines()[-1]


def test_the_network_that_counts_answers(tmp_path):
    """Before training the model; then, for a method with an average, the average."""
    module = ReplayModule(network(), partial(hf.LEARNERS["ballast"], buffer_size=12), SGD)
    x, _ = samples()
    module.eval()
    assert torch.equal(module(x), module.model(x))
    module.train()
    trainer(tmp_path).fit(module, stream())
    module.eval()
    average = module.learner.evaluated()
    assert average.training  # as its statistics come from draws
    before = average[1].running_mean.clone()
    found = module(x)
    assert torch.equal(average[1].running_mean, before)
    assert torch.equal(found, average.eval()(x))
    assert not torch.equal(found, module.model(x))


class Features(nn.Module):
    """A network for methods that ask for its features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def features(self, x):
        return self.body(x).relu()

    def forward(self, x):
        return self.head(self.features(x))


class WithTest(ReplayModule):
    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("loss", F.cross_entropy(self(x), y))


def after(folder, module, **options):
    return trainer(folder, **options).test(module, stream(), verbose=False)[0]["loss"]


@pytest.mark.parametrize("method", ["clser", "ballast", "esmer", "dualnet", "er"])
def test_a_checkpoint_that_is_loaded_is_tested_as_it_was(method, tmp_path):
    """In a new module, and in one whose learner has gone on since; training then goes on from there."""
    make, path = partial(hf.LEARNERS[method], buffer_size=12), tmp_path / "one.ckpt"
    module = WithTest(Features(), make, SGD)
    fitting = trainer(tmp_path)
    fitting.fit(module, stream())
    fitting.save_checkpoint(path)
    expected = after(tmp_path, module)
    again = WithTest(Features(), make, SGD)
    trainer(tmp_path, max_epochs=2).fit(module, stream(), ckpt_path=path)
    later = after(tmp_path, module)
    assert later != expected
    for each in (again, module):
        found = trainer(tmp_path).test(each, stream(), ckpt_path=path, verbose=False)[0]["loss"]
        assert found == expected
    trainer(tmp_path, max_epochs=2).fit(again, stream(), ckpt_path=path)
    assert after(tmp_path, again) == later


def test_after_a_test_gradients_of_inputs_can_be_asked_for(tmp_path):
    make = partial(hf.LEARNERS["clser"], buffer_size=12)
    fitting = trainer(tmp_path)
    fitting.fit(WithTest(network(), make, SGD), stream())
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    module = WithTest(network(), make, SGD)
    trainer(tmp_path).test(module, stream(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    x = samples()[0].requires_grad_()
    module.eval()(x).square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_a_network_of_another_form_is_refused_with_what_to_do(tmp_path):
    make = partial(hf.LEARNERS["dualnet"], buffer_size=12)
    fitting = trainer(tmp_path)
    fitting.fit(WithTest(Features(), make, SGD), stream())
    fitting.save_checkpoint(tmp_path / "one.ckpt")
    hidden = WithTest(Features(), lambda *given: make(*given), SGD)
    with pytest.raises(hf.UsageError, match=r"make_learner=partial\(...\) of the same learner"):
        trainer(tmp_path).test(hidden, stream(), ckpt_path=tmp_path / "one.ckpt", verbose=False)
