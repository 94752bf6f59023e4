"""What all learners take: a loss, class weights, clipping, schedulers, bfloat16, frozen parts; and broken losses."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import holdfast as hf
from holdfast.errors import DivergenceError, TrainingError, UsageError
from holdfast.learners import Sgd
from holdfast.regularizers import REGULARIZERS
from learners.conftest import CLASSES, assert_same_state, network, plain_copy, record, stream

LEARNERS = {
    "sgd": Sgd,
    "er": lambda *args, **options: hf.ExperienceReplay(*args, buffer_size=20, **options),
    "consistency": lambda *args, **options: hf.ConsistencyReplay(*args, buffer_size=20, **options),
}


def sgd(model, lr=0.1):
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr, momentum=0.5)


def make(name, model, **options):
    return LEARNERS[name](model, sgd(model), **options)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_cross_entropy_as_a_loss_of_ones_own_changes_little(name):
    plain, given = network("batchnorm"), network("batchnorm")
    learner, other = make(name, plain, **{}), make(name, given, loss=nn.CrossEntropyLoss())
    for x, y in stream(6):
        torch.testing.assert_close(learner.observe(x, y).as_dict(), other.observe(x, y).as_dict())
    assert_same_state(plain, given, rtol=1e-9, atol=1e-11)


def smooth(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.3)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 0.0])
@pytest.mark.parametrize("size", [3, 8])
def test_er_counts_samples_of_both_parts(alpha, size):
    """Against the sum over all samples, one at a time."""
    model = network("mlp")
    learner = hf.ExperienceReplay(model, sgd(model), buffer_size=20, alpha=alpha, replay_size=size, loss=smooth)
    buffer = record(learner)
    for x, y in stream(3):
        before = plain_copy("mlp", model)
        losses = learner.observe(x, y)
    drawn = buffer.draws[-1]
    now = [smooth(before(x[i : i + 1]), y[i : i + 1]) for i in range(8)]
    then = [smooth(before(drawn.x[i : i + 1]), drawn.y[i : i + 1]) for i in range(size)]
    torch.testing.assert_close(losses.total, (sum(now) + alpha * sum(then)).detach() / (8 + size))
    torch.testing.assert_close(losses.replay, sum(then).detach() / size)


@pytest.mark.parametrize("name", ["er", "consistency"])
def test_class_weights(name):
    """Each part is the weighted mean over its samples; a loop is the oracle."""
    weights = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1], dtype=torch.float64)

    def mean(logits, labels):
        terms = [-weights[label] * F.log_softmax(row, 0)[label] for row, label in zip(logits, labels, strict=True)]
        return sum(terms) / sum(weights[label] for label in labels)

    model = network("mlp")
    learner = make(name, model, class_weights=weights, alpha=0.7)
    buffer = record(learner)
    for x, y in stream(3):
        before = plain_copy("mlp", model)
        losses = learner.observe(x, y)
    drawn = buffer.draws[-1]
    now, then = mean(before(x), y).detach(), mean(before(drawn.x), drawn.y).detach()
    torch.testing.assert_close(losses.current, now)
    torch.testing.assert_close(losses.replay, then)
    if name == "er":
        torch.testing.assert_close(losses.total, (8 * now + 0.7 * 8 * then) / 16)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [0, 2], [[1.0]]])
def test_class_weights_must_be_positive(weights):
    with pytest.raises(UsageError, match="class_weights must be one finite number above 0"):
        make("er", network("mlp"), class_weights=weights)


def test_too_few_class_weights():
    with pytest.raises(UsageError, match="2 class weights, but the model has 5 outputs"):
        make("er", network("mlp"), class_weights=[1.0, 2.0]).observe(*next(stream(1)))


def test_class_weights_belong_to_cross_entropy():
    with pytest.raises(UsageError, match="belong to cross-entropy"):
        make("er", network("mlp"), class_weights=[1.0] * CLASSES, loss=smooth)


def test_a_loss_must_be_one_number():
    learner = make("sgd", network("mlp"), loss=lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"))
    with pytest.raises(UsageError, match=r"the loss has shape \(8,\); it must be one number"):
        learner.observe(*next(stream(1)))


@pytest.mark.parametrize("name", LEARNERS)
def test_an_optimiser_of_another_model(name):
    model = network("mlp")
    with pytest.raises(UsageError, match="updates none of the model's parameters"):
        LEARNERS[name](deepcopy(model), sgd(model))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_compiled_model(name, tmp_path):
    """Learns as the plain one, with names as if it were not compiled."""
    plain, wrapped = network("mlp"), network("mlp")
    wrapped.load_state_dict(plain.state_dict())
    learners = make(name, plain), make(name, torch.compile(wrapped, backend="eager"), head="classifier")
    for x, y in stream(3):
        for learner in learners:
            learner.observe(x, y)
    assert_same_state(learners[0].model, learners[1].model, rtol=0, atol=1e-12)
    learners[1].save(tmp_path / "compiled")
    learners[0].load(tmp_path / "compiled")
    learners[1].grow(CLASSES + 2)
    learners[1].observe(x, y + 2)


@pytest.mark.parametrize("name", LEARNERS)
def test_nothing_to_learn(name):
    model = network("mlp")
    learner = make(name, model)
    x, y = next(stream(1))
    with pytest.raises(UsageError, match="nothing to learn"), torch.no_grad():
        learner.observe(x, y)
    learner.observe(x, y)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="Are all of them frozen"):
        learner.observe(x, y)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda now, then: now - then, r"a tensor of shape \(3, 3\)"),
        (lambda now, then: 1.0, "a float"),
        (lambda now, then: (now - then).detach().square().mean(), "has no gradient"),
        (lambda now: now.square().mean(), "must take two arguments"),
        (lambda now, then, *, needed: now.sum() * needed, "needs a value for needed"),
    ],
)
def test_a_run_looks_at_a_regularizer_before_it_trains(function, says, monkeypatch):
    monkeypatch.setitem(REGULARIZERS._entries, "mine", function)
    config = hf.RunConfig.preset("rot-mnist", "mse", buffer_size=20, tasks=1, train_limit=50).change(method="mine")
    with pytest.raises(UsageError, match=says):
        hf.run(config, device="cpu")


# --- regression ------------------------------------------------------------------------------------------------------


class Regressor(nn.Module):
    """Outputs of any shape per sample."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.layer = shape, nn.Linear(3, max(1, math.prod(shape)))

    def forward(self, x):
        return self.layer(x).view(len(x), *self.shape)


def waves(steps, shape):
    """Inputs whose range drifts, and a linear function of them."""
    draw = torch.Generator().manual_seed(0)
    slopes = torch.randn(3, max(1, math.prod(shape)), generator=draw)
    for step in range(steps):
        x = torch.randn(16, 3, generator=draw) + 4 * step / steps - 2
        yield x, (x @ slopes).view(16, *shape)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3, 2)])
@pytest.mark.parametrize("regularizer", ["l1", "l2", "linf", "mse"])
def test_regression(shape, regularizer):
    norms = {"l1": lambda d: d.abs().sum(), "l2": lambda d: d.square().sum().sqrt(), "linf": lambda d: d.abs().max()}
    model = Regressor(shape)
    learner = hf.ConsistencyReplay(
        model, sgd(model, 0.01), buffer_size=30, regularizer=regularizer, beta=0.1, loss=nn.MSELoss()
    )
    buffer = record(learner)
    first = None
    for x, y in waves(150, shape):
        draws = len(buffer.draws)
        then = {name: value.clone() for name, value in model.state_dict().items()}
        losses = learner.observe(x, y)
        first = losses.total if first is None else first
    assert losses.total < 0.2 * first
    one, two = buffer.draws[draws:]
    assert one.logits.shape == (16, *shape)
    assert two.y.dtype == torch.float32
    model.load_state_dict(then)
    differences = [(model(x[None])[0] - past).flatten() for x, past in zip(one.x, one.logits, strict=True)]
    expected = sum(norms.get(regularizer, lambda d: d.square().mean())(each) for each in differences) / len(differences)
    torch.testing.assert_close(losses.consistency, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.replay, F.mse_loss(model(two.x), two.y).detach())


@pytest.mark.parametrize("name", LEARNERS)
def test_targets_of_several_tensors(name):
    model = nn.Linear(3, 4)
    learner = make(name, model, loss=lambda outputs, y: F.mse_loss(outputs, torch.cat([y["a"], y["b"]], 1)))
    for x, y in waves(60, (4,)):
        losses = learner.observe(x, {"a": y[:, :1], "b": y[:, 1:]})
    assert losses.current < 1


def test_as_many_targets_as_inputs():
    learner = make("er", nn.Linear(3, 1), loss=F.mse_loss)
    with pytest.raises(UsageError, match="4 inputs need as many targets, not 3"):
        learner.observe(torch.zeros(4, 3), torch.zeros(3, 1))


def test_targets_must_go_on_as_they_began():
    learner = make("er", nn.Linear(3, 1), loss=F.mse_loss)
    learner.observe(torch.zeros(4, 3), torch.zeros(4, 1))
    with pytest.raises(UsageError, match=r"y is \(2,\) float32, stored is \(1,\) float32"):
        learner.observe(torch.zeros(4, 3), torch.zeros(4, 2))


def test_cross_entropy_of_outputs_that_are_not_logits():
    with pytest.raises(UsageError, match=r"outputs have shape \(4, 2, 3\); cross-entropy needs"):
        make("er", Regressor((2, 3))).observe(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


def test_a_model_that_returns_more_than_a_tensor():
    class Verbose(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    with pytest.raises(UsageError, match="the model returns a dict; a learner needs one tensor"):
        make("consistency", Verbose(3, 2)).observe(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


# --- clipping and schedulers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_clip_limits_the_gradient(name):
    model = network("mlp")
    learner = LEARNERS[name](model, torch.optim.SGD(model.parameters(), lr=1.0), clip=0.01)
    for x, y in stream(4):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        learner.observe(100 * x, y)
        moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm()
        assert moved <= 0.01 * (1 + 1e-6)
    assert moved > 0.0099


def test_clip_looks_at_what_the_optimiser_updates():
    """A backbone that someone forgot to freeze gathers gradients, which must not count."""

    def train(frozen):
        model = network("mlp")
        model.requires_grad_(not frozen)
        model.classifier.requires_grad_(True)
        learner = hf.ExperienceReplay(
            model, torch.optim.SGD(model.classifier.parameters(), lr=0.1), buffer_size=20, clip=0.1
        )
        for x, y in stream(5):
            learner.observe(x, y)
        return model

    with pytest.warns(UserWarning, match="does not hold 4 of the model's parameters"):
        careless = train(False)
    assert_same_state(train(True), careless, rtol=0, atol=0)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, math.inf])
def test_clip_must_be_positive(clip):
    with pytest.raises(UsageError, match="clip must be a finite number above 0"):
        make("er", network("mlp"), clip=clip)


class LikeTimm:
    """A schedule as timm's: by epochs or by updates, with a state that is its attributes."""

    def __init__(self, optimizer, t_in_epochs=False):
        self.optimizer, self.t_in_epochs, self.noise_range_t = optimizer, t_in_epochs, None

    def step(self, epoch, metric=None):
        raise AssertionError("a learner knows of no epochs")

    def step_update(self, num_updates, metric=None):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + num_updates)

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def test_a_schedule_by_updates_is_told_their_number_also_after_loading(tmp_path):
    def new(make=LikeTimm):
        optimizer = sgd(model := network("mlp"))
        return hf.ExperienceReplay(model, optimizer, buffer_size=20, scheduler=make(optimizer)), optimizer

    (learner, optimizer), (other, other_optimizer) = new(), new()
    for number, (x, y) in enumerate(stream(4), 1):
        learner.observe(x, y)
        assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + number)
    learner.save(tmp_path / "file")
    other.load(tmp_path / "file")
    other.observe(*next(stream(1)))
    assert other_optimizer.param_groups[0]["lr"] == 0.1 / 6
    with pytest.raises(UsageError, match="the saved scheduler is LikeTimm, this one CosineAnnealingLR"):
        new(SCHEDULERS["cosine"])[0].load(tmp_path / "file")
    with pytest.raises(UsageError, match="t_in_epochs=False"):
        new(lambda optimizer: LikeTimm(optimizer, t_in_epochs=True))


def mixup(x, y):
    """Each sample mixed with the next, three to one; targets become probabilities."""
    targets = torch.nn.functional.one_hot(y, CLASSES).to(x.dtype)
    return 0.75 * x + 0.25 * x.roll(1, 0), 0.75 * targets + 0.25 * targets.roll(1, 0)


def taught(name, model, **options):
    kind = hf.LEARNERS[name]
    return kind(model, sgd(model), **({"buffer_size": 20} if kind.needs_buffer else {}), **options)


@pytest.mark.parametrize("name", ["sgd", "er", "agem"])
def test_a_view_may_change_targets_and_what_is_stored_stays_raw(name):
    model = network("mlp")
    learner, twin = taught(name, model, augment=mixup), plain_copy("mlp", model)
    (x, y), *_ = stream(1)
    loss = learner.observe(x, y).total
    mixed, targets = mixup(x, y)
    expected = -(twin(mixed).log_softmax(1) * targets).sum(1).mean()
    torch.testing.assert_close(loss, expected.detach())
    if learner.buffer is not None:
        assert torch.equal(learner.buffer.contents().x, x)
        assert torch.equal(learner.buffer.contents().y, y)
        assert learner.observe(x, y).replay > 0


@pytest.mark.parametrize("name", ["sgd", "er", "agem"])
def test_a_view_may_change_targets_in_place(name):
    (x, y), *_ = stream(1)
    before = y.clone()
    learner = taught(name, network("mlp"), augment=lambda x, y: (x, y.zero_()))
    learner.observe(x, y)
    assert torch.equal(y, before)
    assert learner.buffer is None or torch.equal(learner.buffer.contents().y, before)


@pytest.mark.parametrize("name", ["consistency", "clser", "lwf"])
def test_methods_that_compare_outputs_refuse_views_that_change_targets(name):
    with pytest.raises(UsageError, match=r"cannot change targets.*ExperienceReplay"):
        taught(name, network("mlp"), augment=mixup)


def test_a_view_with_a_second_parameter_that_has_a_default_gets_inputs_alone():
    make("er", network("mlp"), augment=lambda x, strength=2: x * strength).observe(*next(stream(1)))


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=30),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 7]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 7),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of PyTorch 2.6 uses it itself
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_step_once_per_minibatch_and_are_saved(kind, tmp_path):
    def new():
        model = network("mlp")
        optimizer = sgd(model)
        scheduler = SCHEDULERS[kind](optimizer)
        return model, hf.ExperienceReplay(model, optimizer, buffer_size=20, scheduler=scheduler), optimizer

    def rate(optimizer):
        return optimizer.param_groups[0]["lr"]

    (model, learner, optimizer), (_, other, other_optimizer) = new(), new()
    alone = sgd(network("mlp"))
    reference, losses = SCHEDULERS[kind](alone), []
    batches = list(stream(12))
    for x, y in batches[:5]:
        losses.append(learner.observe(x, y).total)
        alone.step()
        reference.step(*([losses[-1]] if kind == "plateau" else []))
        assert rate(optimizer) == pytest.approx(rate(alone))
    learner.save(tmp_path / "file")
    other.load(tmp_path / "file")
    for x, y in batches[5:]:
        learner.observe(x, y)
        other.observe(x, y)
        assert rate(optimizer) == rate(other_optimizer)
    assert rate(optimizer) != 0.1
    assert_same_state(model, other.model, rtol=0, atol=0)


def test_a_saved_scheduler_needs_one_to_load_into():
    def learner(scheduled, kind="cosine"):
        model = network("mlp")
        optimizer = sgd(model)
        scheduler = SCHEDULERS[kind](optimizer) if scheduled else None
        return hf.ExperienceReplay(model, optimizer, buffer_size=20, scheduler=scheduler)

    with pytest.raises(UsageError, match="the saved learner keeps state of its scheduler, this one does not"):
        learner(False).load_state_dict(learner(True).state_dict())
    with pytest.raises(UsageError, match="this learner keeps state of its scheduler"):
        learner(True).load_state_dict(learner(False).state_dict())
    with pytest.raises(UsageError, match="saved scheduler is MultiStepLR, this one CosineAnnealingLR"):
        learner(True).load_state_dict(learner(True, "milestones").state_dict())


# --- bfloat16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
@pytest.mark.parametrize("name", LEARNERS)
def test_bfloat16_with_a_model_and_an_optimiser_of_ones_own(name, optimizer):
    full, half = (network("batchnorm", torch.float32) for _ in range(2))
    kinds = [
        LEARNERS[name](model, optimizer(model.parameters(), lr=0.01), precision=precision)
        for model, precision in ((full, "float32"), (half, "bfloat16"))
    ]
    seen = []
    half[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for x, y in stream(8, dtype=torch.float32):
        one, other = (learner.observe(x, y) for learner in kinds)
        assert other.total.dtype == torch.float32
        torch.testing.assert_close(one.total, other.total, rtol=0.1, atol=0.1)
    assert set(seen) == {torch.bfloat16}
    assert {value.dtype for value in half.parameters()} == {torch.float32}
    if name == "consistency":
        assert kinds[1].buffer.contents().logits.dtype == torch.float32


# --- frozen parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_frozen_backbone_stays_as_it_is(name, convert):
    model = network("grouped" if convert else "batchnorm")
    backbone, head = model[:7], nn.Linear(54, CLASSES).double()
    for x, _ in stream(5):
        backbone(x)  # as if pretrained: statistics of its own
    model = nn.Sequential(backbone.eval().requires_grad_(False), head)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learner = make(name, model)
    for x, y in stream(10):
        learner.observe(x, y)
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"1.weight", "1.bias"}
    assert not any(parameter.grad is not None for parameter in backbone.parameters())
    assert not backbone.training


# --- wrong batches and broken losses ---------------------------------------------------------------------------------


class Noise:
    """A random view with a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x):
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm2d, lambda: nn.LazyConv2d(2, 3)])
def test_a_model_that_does_not_know_its_shapes_yet(layer):
    model = nn.Sequential(layer(), nn.Flatten(), nn.LazyLinear(CLASSES))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match=r"0.weight has no shape yet: pass a minibatch through the model"):
        hf.ExperienceReplay(model, optimizer, buffer_size=20)
    x, y = next(stream(1, dtype=torch.float32))
    model(x)
    make("consistency", model).observe(x, y)


@pytest.mark.parametrize("kind", ["batchnorm", "grouped"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", LEARNERS)
def test_labels_are_checked_before_anything_moves(name, steps, kind):
    """BatchNorm's statistics and the generators too; learning goes on as if the minibatch had not come."""

    def train(wrong):
        model = network(kind)
        learner = make(name, model, augment=Noise())
        batches = list(stream(6))
        for x, y in batches[:steps]:
            learner.observe(x, y)
        if wrong:
            for labels in (y * 0 + CLASSES if steps else batches[0][1] + 99, torch.full((8,), -1)):
                with pytest.raises(UsageError, match="label"):
                    learner.observe(batches[0][0], labels)
        for x, y in batches[steps:]:
            learner.observe(x, y)
        return model

    assert_same_state(train(True), train(False), rtol=0, atol=0)


def test_a_head_made_larger_by_hand_takes_larger_labels():
    model = network("mlp")
    learner = make("sgd", model)
    batches = list(stream(2))
    learner.observe(*batches[0])
    model.classifier = nn.Linear(12, CLASSES + 1).double()
    learner.optimizer = sgd(model)
    learner.observe(batches[1][0], torch.full((8,), CLASSES))
    with pytest.raises(UsageError, match=r"labels up to 6 .*0\.\.5"):
        learner.observe(batches[1][0], torch.full((8,), CLASSES + 1))
    model.classifier = nn.Linear(12, 2).double()
    with pytest.raises(UsageError, match=r"labels up to 5 .*0\.\.1"):
        learner.observe(batches[1][0], torch.full((8,), CLASSES))


def spoil(form, x, y, value):
    """A minibatch with a number that is not finite, among the inputs or the targets, in a tensor or deep in a dict."""
    x = x.clone()
    x[3, 0, 2, 4] = value
    return {"tensor": (x, y), "dict": ({"all": [x]}, y), "targets": (x.nan_to_num(0, 0), y / value * value)}[form]


class Dict(nn.Module):
    """A network whose inputs come in a dict."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x["all"][0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["tensor", "dict", "targets"])
@pytest.mark.parametrize("kind", ["batchnorm", "grouped"])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_minibatch_that_is_not_finite_leaves_no_trace(name, kind, form, value, tmp_path):
    """Not in BatchNorm's statistics, and not in any generator, that of dropout among them."""
    torch.manual_seed(0)
    model = nn.Sequential(network(kind), nn.Dropout(0.5))
    if form == "dict":
        model = Dict(model)
    options = {"loss": lambda outputs, targets: F.mse_loss(outputs[:, 0], targets)} if form == "targets" else {}
    learner = make(name, model, augment=None if form == "dict" else Noise(), **options)
    batches = [(x, y.double() if form == "targets" else y) for x, y in stream(4)]
    for x, y in batches[:3]:
        learner.observe({"all": [x]} if form == "dict" else x, y)
    learner.save(tmp_path / "before")
    for _ in range(2):
        with pytest.raises(TrainingError, match=rf"no step was made: {'y' if form == 'targets' else 'x'}.* not finite"):
            learner.observe(*spoil(form, *batches[3], value))
    learner.save(tmp_path / "after")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


@pytest.mark.parametrize("name", LEARNERS)
def test_a_first_minibatch_that_is_not_finite_leaves_no_trace(name):
    model = network("batchnorm")
    learner = make(name, model)
    x, y = next(stream(1))
    with pytest.raises(TrainingError, match="not finite"):
        learner.observe(x * math.nan, y)
    assert_same_state(model, network("batchnorm"), rtol=0, atol=0)
    learner.observe(x, y)


@pytest.mark.parametrize("name", LEARNERS)
def test_missing_values_that_the_model_understands_are_welcome(name):
    """What counts is the loss."""
    model = network("batchnorm")
    learner = make(name, model, augment=torch.nan_to_num)
    for x, y in stream(5):
        x[2, 0, 1] = math.nan
        learner.observe(x, y)
    learner.check_finite()


@pytest.mark.parametrize("name", LEARNERS)
def test_a_loss_that_is_not_finite_raises_before_the_step(name):
    """The weights are to blame here, not the minibatch; it leaves no trace in BatchNorm's statistics either."""
    model = nn.Sequential(network("mlp"), nn.BatchNorm1d(CLASSES).double())
    learner = make(name, model)
    batches = list(stream(5))
    for x, y in batches[:3]:
        learner.observe(x, y)
    with torch.no_grad():
        model[0].classifier.weight *= 1e308
    before, offered = deepcopy(model), 0 if learner.buffer is None else learner.buffer.offered
    with pytest.raises(DivergenceError, match=r"so no step was made.*smaller learning rate"):
        learner.observe(100 * x, y)
    assert_same_state(model, before, rtol=0, atol=0)
    assert learner.buffer is None or learner.buffer.offered == offered


@pytest.mark.parametrize(("kind", "part"), [("mlp", "classifier.bias"), ("batchnorm", "1.running_var")])
def test_a_broken_model_does_not_replace_a_whole_one(kind, part, tmp_path):
    model = network(kind)
    learner = make("er", model)
    learner.observe(*next(stream(1)))
    learner.save(tmp_path / "file")
    good = (tmp_path / "file").read_bytes()
    model.state_dict()[part][0] = math.nan
    with pytest.raises(DivergenceError, match=f"{part} is no longer finite"):
        learner.save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == good
    learner.load(tmp_path / "file")
    learner.check_finite()


@pytest.mark.parametrize(
    ("name", "part"), [("clser", "stable"), ("ballast", "average"), ("dualnet", "projector"), ("lwf", "teacher")]
)
def test_networks_of_the_method_do_not_break_a_checkpoint_either(name, part, tmp_path):
    model = network("mlp")
    options = {"buffer_size": 20} if hf.LEARNERS[name].needs_buffer else {}
    learner = hf.LEARNERS[name](model, sgd(model), **options)
    learner.save(tmp_path / "file")
    weight = next(iter(getattr(learner, part).state_dict()))
    getattr(learner, part).state_dict()[weight][0] = math.nan
    with pytest.raises(TrainingError, match=rf"{part}\.{weight} is no longer finite"):
        learner.save(tmp_path / "file")


def test_without_validation_nothing_is_looked_at():
    model = network("mlp")
    learner = make("er", model, validate=False)
    x, y = next(stream(1))
    learner.observe(x * math.nan, y)
    with pytest.raises(TrainingError):
        learner.check_finite()


@pytest.mark.parametrize("name", ["replay_size", "consistency_size"])
@pytest.mark.parametrize("size", [0, 2.5, 8.0, "8"])
def test_sizes_of_draws_are_whole_numbers(name, size):
    with pytest.raises(UsageError, match=f"{name} must be at least 1 and a whole number, .* not {size!r}"):
        make("consistency", network("mlp"), **{name: size})


def test_a_misspelt_option_names_the_nearest():
    for wrong, right in (("reply_size", "replay_size"), ("class_dims", "class_dim"), ("buffer_polcy", "buffer_policy")):
        with pytest.raises(UsageError, match=f"unknown option of ConsistencyReplay '{wrong}': did you mean '{right}'"):
            make("consistency", network("mlp"), **{wrong: 1})
