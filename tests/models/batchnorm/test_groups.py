"""One fused pass with grouped statistics must equal separate passes: outputs, gradients, running statistics."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.errors import UsageError
from holdfast.models import GroupedBatchNorm, GroupedForward, ResNet18, group_batchnorm
from holdfast.models.batchnorm import normalized_relu
from holdfast.rng import generator, seeded_globally

SIZES = [(4, 4, 4), (4, 4), (5, 3, 2), (2, 7), (6,), (1, 4, 1), (1, 1, 1)]
KINDS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-sequence": (nn.BatchNorm1d, (6,)),
    "2d": (nn.BatchNorm2d, (3, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
OPTIONS = {
    "plain": {},
    "fast": {"momentum": 0.7, "eps": 1e-3},
    "cumulative": {"momentum": None},
    "frozen": {"momentum": 0.0},
    "no-affine": {"affine": False},
    "no-running": {"track_running_stats": False},
    "neither": {"affine": False, "track_running_stats": False},
}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed, f"input {shape}"), dtype=torch.float64).to(dtype)


def prepared(norm, seed=0):
    """Parameters and running statistics away from where they start."""
    draw = generator(seed, "state")
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0, generator=draw)
    return norm


def separate(model, x, sizes):
    """The reference: a plain model, one pass per minibatch, in order."""
    return [model(part) for part in x.split(list(sizes))]


def assert_same(plain, fused, x, sizes, *, weight=None, **tolerance):
    """Outputs, gradients of inputs and parameters, buffers of two equal models after one step each."""
    results = []
    for forward, model in ((separate, plain), (lambda model, x, sizes: GroupedForward(model)(x, sizes), fused)):
        inputs = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        outputs = forward(model, inputs, sizes)
        assert [len(part) for part in outputs] == list(sizes)
        output = torch.cat(outputs)
        weight = randn(*output.shape, seed=9).to(output.dtype) if weight is None else weight
        (output * weight).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((output, inputs.grad, gradients, dict(model.named_buffers())))
    (output_a, input_a, gradients_a, buffers_a), (output_b, input_b, gradients_b, buffers_b) = results
    assert output_a.dtype == output_b.dtype
    torch.testing.assert_close(output_b, output_a, **tolerance)
    torch.testing.assert_close(input_b, input_a, **tolerance)
    torch.testing.assert_close(gradients_b, gradients_a, **tolerance)
    torch.testing.assert_close(buffers_b, buffers_a, **tolerance)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind, options):
    """As a penalty on gradients takes them."""
    layer, rest = KINDS[kind]
    plain = prepared(layer(3, **OPTIONS[options]).double())
    fused = group_batchnorm(copy.deepcopy(plain))
    found = []
    for forward, model in ((separate, plain), (lambda model, x, sizes: GroupedForward(model)(x, sizes), fused)):
        x = randn(12, 3, *rest).requires_grad_()
        leaves = [x, *model.parameters()]
        output = torch.cat(forward(model, x, (4, 4, 4)))
        gradients = torch.autograd.grad((output.sin() * randn(*output.shape, seed=9)).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def too_small(kind, sizes):
    """One value per channel has no variance."""
    return kind == "1d" and 1 in sizes


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_layer(kind, options, training):
    layer, rest = KINDS[kind]
    for sizes in SIZES:
        if too_small(kind, sizes):
            continue
        plain = prepared(nn.Sequential(layer(3, **OPTIONS[options]))).double().train(training)
        fused = group_batchnorm(copy.deepcopy(plain))
        assert GroupedForward(fused).fused
        assert_same(plain, fused, 3 * randn(sum(sizes), 3, *rest) + 1, sizes, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_in_float32(kind):
    layer, rest = KINDS[kind]
    for sizes in SIZES[:4]:
        plain = prepared(nn.Sequential(layer(3)))
        fused = group_batchnorm(copy.deepcopy(plain))
        x = 3 * randn(sum(sizes), 3, *rest, dtype=torch.float32) + 1
        assert_same(plain, fused, x, sizes, rtol=1e-4, atol=1e-5)


def test_statistics_are_really_those_of_each_group():
    """Not only alike: groups of different means all come out with mean 0, unlike under common statistics."""
    x = torch.cat([randn(50, 3), randn(50, 3, seed=1) + 10, randn(50, 3, seed=2) - 5])
    model = group_batchnorm(nn.Sequential(nn.BatchNorm1d(3)).double())
    for part in GroupedForward(model)(x, [50, 50, 50]):
        torch.testing.assert_close(part.mean(0), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)
    assert model(x)[50:100].mean() > 1


@pytest.mark.parametrize("steps", [5])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_over_several_steps(steps, momentum):
    plain = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum)).double()
    fused = group_batchnorm(copy.deepcopy(plain))
    forward = GroupedForward(fused)
    for step in range(steps):
        x = randn(12, 3, 4, 4, seed=step) * (step + 1) + step
        sizes = [4, 4, 4] if step % 2 else [3, 5, 4]
        separate(plain, x, sizes)
        forward(x, sizes)
    assert fused[0].num_batches_tracked == 3 * steps
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())
    x = randn(4, 3, 4, 4)
    torch.testing.assert_close(fused.eval()(x), plain.eval()(x))


def test_running_statistics_follow_the_order_of_the_groups():
    x = torch.cat([randn(4, 2), randn(4, 2, seed=1) + 100])
    forward, backward = (group_batchnorm(nn.BatchNorm1d(2).double()) for _ in range(2))
    GroupedForward(forward)(x, [4, 4])
    GroupedForward(backward)(x.roll(4, 0), [4, 4])
    assert (forward.running_mean > backward.running_mean + 0.5).all()


def test_channels_last():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    plain = plain.to(memory_format=torch.channels_last)
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(12, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    for sizes in ((4, 4, 4), (6, 4, 2)):
        assert_same(copy.deepcopy(plain), copy.deepcopy(fused), x, sizes)
    norm = fused[1]
    norm.groups.sizes = (6, 6)
    assert norm(plain[0](x)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_inputs_of_any_memory_layout(layout):
    x = {
        "transposed": randn(3, 12).t(),
        "sliced": randn(12, 6)[:, ::2],
        "expanded": randn(12, 1).expand(12, 3),
    }[layout]
    plain = nn.Sequential(nn.BatchNorm1d(3)).double()
    fused = group_batchnorm(copy.deepcopy(plain))
    torch.testing.assert_close(GroupedForward(fused)(x, [4, 4, 4]), separate(plain, x, [4, 4, 4]))


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 4, 3)])
def test_bfloat16_inputs_are_close_and_keep_their_type(sizes):
    plain = prepared(nn.Sequential(nn.BatchNorm2d(3)))
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(12, 3, 4, 4).bfloat16()
    outputs = GroupedForward(fused)(x, sizes)
    for ours, theirs in zip(outputs, separate(plain, x, sizes), strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_wholly_of_another_type(dtype):
    plain = prepared(nn.Sequential(nn.BatchNorm1d(3))).to(dtype)
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(8, 3).to(dtype)
    ours, theirs = GroupedForward(fused)(x, [4, 4]), separate(plain, x, [4, 4])
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=0.02, atol=0.02)


def test_large_means_do_not_drown_the_variance():
    """A mean of squares minus a squared mean would, in float32."""
    x = (randn(12, 3, 4, 4) + 1000).float()
    exact = torch.cat(separate(nn.Sequential(nn.BatchNorm2d(3)).double(), x.double(), [4, 4, 4]))
    fused = group_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))
    torch.testing.assert_close(torch.cat(GroupedForward(fused)(x, [4, 4, 4])).double(), exact, rtol=0, atol=5e-3)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (4, 1)])
def test_a_single_value_per_channel_has_no_statistics(sizes):
    fused = group_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GroupedForward(fused)(randn(sum(sizes), 3, dtype=torch.float32), sizes)


# --- conversion ------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A user's model: BatchNorms in lists, dicts, deep down, and one of two other kinds."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5)), "b": nn.Linear(4, 5)})
        self.other = nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        features = self.other(x).mean((2, 3))
        return self.heads["a"](features) + self.heads["b"](features)


def users_model():
    with seeded_globally(0, "init"):
        return Branches().double()


def test_conversion_keeps_parameters_buffers_and_state_dict():
    model = users_model()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    keys = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    assert group_batchnorm(model) is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    assert sum(isinstance(module, GroupedBatchNorm) for module in model.modules()) == 4
    assert type(model.other) is nn.GroupNorm
    plain = users_model()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def test_conversion_twice_changes_nothing():
    model = group_batchnorm(users_model())
    before = {name: id(module) for name, module in model.named_modules()}
    assert group_batchnorm(model) is model
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_an_optimizer_made_before_the_conversion_still_works():
    plain, fused = users_model(), users_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, fused)]
    group_batchnorm(fused)
    x, sizes = randn(9, 3, 6, 6), [3, 3, 3]
    for _ in range(3):
        for optimizer, outputs in zip(
            optimizers, (separate(plain, x, sizes), GroupedForward(fused)(x, sizes)), strict=True
        ):
            optimizer.zero_grad()
            sum((output * output).mean() * (k + 1) for k, output in enumerate(outputs)).backward()
            optimizer.step()
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())
    assert not torch.equal(fused.stem[1].weight, users_model().stem[1].weight)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 4, 2)])
def test_a_users_model(sizes):
    model = users_model()
    assert_same(model, group_batchnorm(copy.deepcopy(model)), randn(12, 3, 6, 6), sizes)


def test_conversion_keeps_hooks():
    plain, calls = nn.Sequential(nn.BatchNorm1d(3)), []
    plain[0].register_forward_hook(lambda *_: calls.append("hook"))
    group_batchnorm(plain)(randn(4, 3, dtype=torch.float32))
    assert calls == ["hook"]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_batchnorm_in_several_places_is_left_alone(depth):
    """A fused pass would update its running statistics in another order than separate passes do."""
    part = norm = nn.BatchNorm1d(3).double()
    for _ in range(depth):
        part = nn.Sequential(part)
    model = nn.Sequential(part, nn.Linear(3, 3).double(), part)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"1 of 1 BatchNorms were left .* are used in several places \(1\)"):
        fused = group_batchnorm(model)
    assert next(module for module in fused.modules() if isinstance(module, nn.BatchNorm1d)) is norm
    assert_same(plain, fused, randn(12, 3), (4, 4, 4))


class Twice(nn.Module):
    """Calls its one BatchNorm several times a pass, as a recurrent network does; and drops some of what it gives."""

    def __init__(self, calls=2, momentum=0.1):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 3)
        self.drop, self.calls = nn.Dropout(0.5), calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.drop(self.linear(self.norm(x)))
        return x


@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 4), (6, 6)])
@pytest.mark.parametrize("calls", [2, 3])
def test_a_batchnorm_called_several_times_a_pass(calls, sizes, momentum):
    with seeded_globally(0, "init"):
        plain = prepared(Twice(calls, momentum).double())
    fused = group_batchnorm(copy.deepcopy(plain))
    forward = GroupedForward(fused)
    for step in range(3):
        x = randn(12, 3, seed=step) + 10 * step
        outputs = []
        for passes in (lambda x: separate(plain, x, sizes), lambda x: forward(x, sizes)):
            with seeded_globally(step, "dropout"):
                outputs.append(passes(x))
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(dict(fused.named_buffers()), dict(plain.named_buffers()))
    assert fused.norm.num_batches_tracked == 3 * calls * len(sizes)
    assert not forward.fused


def test_a_pass_that_is_taken_back_leaves_no_trace_in_the_inputs():
    """Of a model that works in place on what it is given."""
    plain = Twice().double()
    plain.drop.eval()
    fused, x = group_batchnorm(copy.deepcopy(plain)), randn(12, 3)
    fused.register_forward_pre_hook(lambda _, given: (given[0].square_(),))
    outputs = separate(plain, x.square(), (4, 4, 4))
    torch.testing.assert_close(GroupedForward(fused)(x.clone(), (4, 4, 4)), outputs)


def test_a_converted_batchnorm_put_into_several_places():
    part = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    plain = nn.Sequential(*[copy.deepcopy(part)] * 2)
    fused = nn.Sequential(*[group_batchnorm(part)] * 2)
    assert_same(plain, fused, randn(12, 3), (4, 4, 4))


def test_a_batchnorm_without_running_statistics_may_be_called_several_times_in_one_pass():
    model = Twice()
    model.norm = nn.BatchNorm1d(3, track_running_stats=False)
    forward = GroupedForward(group_batchnorm(model))
    forward(randn(12, 3, dtype=torch.float32), [4, 4, 4])
    assert forward.fused


def test_a_batchnorm_called_several_times_only_later():
    model = group_batchnorm(Twice(calls=1).double())
    forward = GroupedForward(model)
    forward(randn(12, 3), [4, 4, 4])
    model.calls = 2
    with pytest.raises(UsageError, match=r"norm was called several times.* without group_batchnorm"):
        forward(randn(12, 3), [4, 4, 4])


class Checkpointed(nn.Module):
    """Computes a part of itself again in the backward pass."""

    def __init__(self, reentrant, *layers):
        super().__init__()
        self.first, self.part, self.reentrant = nn.Linear(3, 3), nn.Sequential(*layers), reentrant

    def forward(self, x):
        return checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_batchnorm_that_is_computed_again_in_the_backward_pass(reentrant):
    model = group_batchnorm(Checkpointed(reentrant, nn.BatchNorm1d(3), nn.Tanh()).double())
    forward = GroupedForward(model)
    forward(randn(4, 3), [4])[0].sum().backward()  # a single minibatch is the same again
    with pytest.raises(UsageError, match="computed again in the backward pass"):
        torch.cat(forward(randn(12, 3), [4, 4, 4])).sum().backward()
    model.part[0].eval()
    torch.cat(forward(randn(12, 3), [4, 4, 4])).sum().backward()


class TimeMajor(nn.Module):
    """Gives its BatchNorm all steps of (B, T, C, ...) as rows, the first step of every sequence first."""

    def __init__(self, kind, options):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), kind(3, **options), nn.Dropout(0.5)

    def forward(self, x):
        x = x.transpose(0, 1)
        out = self.norm(x.reshape(-1, *x.shape[2:])).view_as(x).mean(0)
        return self.drop(self.linear(out.flatten(2).mean(2) if out.dim() > 2 else out))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 4), (6, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_the_samples(kind, sizes, options):
    kind, shape = KINDS[kind]
    with seeded_globally(0, "init"):
        plain = prepared(TimeMajor(kind, OPTIONS[options]).double())
    fused = group_batchnorm(copy.deepcopy(plain))
    forward = GroupedForward(fused)
    for step in range(2):
        x = randn(12, 5, 3, *shape, seed=step)
        x[4:] += 10
        results = []
        for model, passes in ((plain, lambda x: separate(plain, x, sizes)), (fused, lambda x: forward(x, sizes))):
            with seeded_globally(step, "dropout"):
                outputs = passes(x)
            model.zero_grad()
            torch.cat(outputs).square().sum().backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            results.append((outputs, gradients, dict(model.named_buffers())))
        torch.testing.assert_close(results[1], results[0])
    assert not forward.fused


def test_rows_that_are_not_the_samples_in_evaluation_mode():
    """Without running statistics it mixes even then; with them it cannot, so that nothing is decided."""
    for options, fused in (({}, True), ({"track_running_stats": False}, False)):
        plain = TimeMajor(nn.BatchNorm1d, options).double().eval()
        forward = GroupedForward(group_batchnorm(copy.deepcopy(plain)))
        x = randn(12, 5, 3)
        torch.testing.assert_close(forward(x, [4, 4, 4]), separate(plain, x, [4, 4, 4]))
        assert forward.fused == fused


def test_rows_that_are_not_the_samples_only_later():
    forward = GroupedForward(group_batchnorm(TimeMajor(nn.BatchNorm1d, {}).double()))
    forward(randn(12, 1, 3), [4, 4, 4])
    with pytest.raises(UsageError, match=r"given other rows than one per sample.* without group_batchnorm"):
        forward(randn(12, 5, 3), [4, 4, 4])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_rows_that_are_not_the_samples_in_a_compiled_model():
    plain = TimeMajor(nn.BatchNorm1d, {}).double()
    plain.drop = nn.Identity()
    fused = group_batchnorm(copy.deepcopy(plain))
    forward, x = GroupedForward(fused), randn(12, 5, 3)
    x[4:] += 10
    network = torch.compile(fused, backend="eager", dynamic=False, fullgraph=True)
    torch.testing.assert_close(forward(x, [4, 4, 4], network), separate(plain, x, [4, 4, 4]))
    assert not forward.fused


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_counting_calls_does_not_compile_anew():
    model = group_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)).double())
    graphs = []
    network = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False)
    forward, plain = GroupedForward(model), copy.deepcopy(model)
    for step in range(4):
        x = randn(12, 3, seed=step)
        torch.testing.assert_close(forward(x, [4, 4, 4], network), separate(plain, x, [4, 4, 4]))
    assert len(graphs) == 1
    for norm in (model[0], model[2]):  # they count as well
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    for step in range(4):
        forward(randn(12, 3, seed=step), [4, 4, 4], network)
    assert len(graphs) == 2
    twice = group_batchnorm(Twice().double())
    forward = GroupedForward(twice)
    forward(x, [4, 4, 4], torch.compile(twice, backend="eager", dynamic=False))
    assert not forward.fused


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, nn.LazyBatchNorm2d])
def test_a_batchnorm_that_does_not_know_its_shape_yet(lazy):
    model = nn.Sequential(lazy())
    with pytest.raises(UsageError, match=r"'0' has no shape yet: call model"):
        group_batchnorm(model)
    x = randn(12, 3, *[4] * (lazy is nn.LazyBatchNorm2d) * 2, dtype=torch.float32)
    model(x)
    plain = copy.deepcopy(model)
    fused = group_batchnorm(model)
    assert GroupedForward(fused).fused
    assert_same(plain, fused, x, (4, 4, 4), rtol=1e-4, atol=1e-5)


def test_a_model_that_is_a_batchnorm_itself():
    converted = group_batchnorm(nn.BatchNorm1d(3))
    assert isinstance(converted, GroupedBatchNorm)
    assert GroupedForward(converted).fused


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_grouped_passes_it_is_an_ordinary_batchnorm(training):
    plain = users_model().train(training)
    fused = group_batchnorm(copy.deepcopy(plain))
    assert fused.training is training
    assert all(module.training is training for module in fused.modules())
    GroupedForward(copy.deepcopy(fused))(randn(6, 3, 6, 6), [3, 3])
    x = randn(5, 3, 6, 6)
    torch.testing.assert_close(fused(x), plain(x))
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())


def test_train_and_eval_still_reach_it():
    model = group_batchnorm(users_model())
    model.eval()
    assert not model.stem[1].training
    model.train()
    assert model.stem[1].training


def test_groups_end_with_the_pass_even_if_it_fails():
    fused = group_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(4, 2)).double())
    with pytest.raises(RuntimeError):
        GroupedForward(fused)(randn(8, 3), [4, 4])
    x = randn(8, 3)
    torch.testing.assert_close(fused[0](x), nn.BatchNorm1d(3).double()(x))


def test_a_copy_has_groups_of_its_own():
    first = group_batchnorm(users_model())
    second = copy.deepcopy(first)
    x = randn(8, 3, 6, 6)
    expected = separate(users_model(), x, [4, 4])
    for model in (first, second):
        torch.testing.assert_close(GroupedForward(model)(x, [4, 4]), expected)
    assert first.stem[1].groups is not second.stem[1].groups


def test_a_model_put_together_from_converted_parts():
    body, head = (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double() for _ in range(2))
    plain = nn.Sequential(copy.deepcopy(body), copy.deepcopy(head))
    fused = nn.Sequential(group_batchnorm(body), group_batchnorm(head))
    assert_same(plain, fused, randn(12, 3), (4, 4, 4))
    assert_same(copy.deepcopy(plain), group_batchnorm(copy.deepcopy(fused)), randn(12, 3), (4, 4, 4))


def test_a_batchnorm_added_later_is_converted_by_another_call():
    model = group_batchnorm(nn.Sequential(nn.BatchNorm1d(3)).double())
    model.append(nn.BatchNorm1d(3).double())
    assert not GroupedForward(model).fused
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    assert_same(plain, group_batchnorm(model), randn(12, 3), (4, 4, 4))


# --- GroupedForward --------------------------------------------------------------------------------------------------


class Counting(nn.Sequential):
    passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("layers", "passes"),
    [
        ([nn.BatchNorm1d(3)], 3),
        ([nn.BatchNorm1d(3).eval()], 1),
        ([nn.BatchNorm1d(3, track_running_stats=False).eval()], 3),
        ([nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)], 3),
        ([nn.SyncBatchNorm(3).eval()], 1),
        ([nn.Linear(3, 3), nn.LayerNorm(3)], 1),
        ([group_batchnorm(nn.BatchNorm1d(3))], 1),
        ([group_batchnorm(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)], 3),
    ],
    ids=["plain", "frozen", "without statistics", "half frozen", "frozen synchronised", "none", "grouped", "mixed"],
)
def test_plain_batchnorm_gets_separate_passes(layers, passes):
    model = Counting(*layers)
    x = randn(12, 3, dtype=torch.float32)
    outputs = GroupedForward(model)(x, [5, 4, 3])
    assert model.passes == passes
    reference = copy.deepcopy(model)
    torch.testing.assert_close(outputs, separate(reference, x, [5, 4, 3]))


def test_synchronised_batchnorm_is_left_alone():
    with pytest.warns(UserWarning, match=r"2 of 3 BatchNorms were left .* are SyncBatchNorms \(2\)"):
        model = group_batchnorm(nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3), nn.SyncBatchNorm(3)))
    assert type(model[0]) is nn.SyncBatchNorm
    assert not GroupedForward(model).fused


def test_freezing_and_thawing_is_noticed():
    model = nn.Sequential(nn.BatchNorm1d(3))
    forward = GroupedForward(model)
    assert [forward.fused, GroupedForward(model.eval()).fused, forward.fused] == [False, True, True]
    model.train()
    assert not forward.fused


@pytest.mark.parametrize("grouped", [False, True])
def test_inputs_of_several_tensors(grouped):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, x):
            return self.norm(x["a"] + x["b"][0])

    def inputs(x):
        return {"a": x, "b": (2 * x,)}

    plain = Sum()
    model = group_batchnorm(copy.deepcopy(plain)) if grouped else copy.deepcopy(plain)
    x = randn(12, 3)
    outputs = GroupedForward(model)(inputs(x), [5, 4, 3])
    torch.testing.assert_close(outputs, [plain(inputs(part)) for part in torch.split(x, [5, 4, 3])])
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class Doubled(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: BatchNorm, dropout and an activation in one layer, which normalises without torch's own forward."""

    def __init__(self, channels, **options):
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        tracked = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if tracked else (None, None)
        from_batch = self.training or self.running_mean is None
        out = nn.functional.batch_norm(x, *running, self.weight, self.bias, from_batch, momentum or 0.0, self.eps)
        return self.act(self.drop(out))


class AtTestTime(nn.BatchNorm1d):
    """Normalises by the batch in evaluation mode as well."""

    def forward(self, input):
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, True)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 4)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_batchnorm_with_an_activation(options, training, sizes):
    layers = [nn.Conv2d(3, 5, 3), BatchNormAct2d(5, **OPTIONS[options]), nn.Conv2d(5, 2, 1), BatchNormAct2d(2)]
    plain = prepared(nn.Sequential(*layers).double()).train(training)
    fused = group_batchnorm(copy.deepcopy(plain))
    assert isinstance(fused[1], GroupedBatchNorm)
    assert isinstance(fused[1], BatchNormAct2d)
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert GroupedForward(fused).fused
    assert_same(plain, fused, randn(12, 3, 6, 6), sizes)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", [Doubled, AtTestTime])
def test_a_batchnorm_with_a_forward_pass_of_its_own(kind, training):
    plain = prepared(nn.Sequential(nn.Linear(3, 3), kind(3)).double()).train(training)
    fused = Counting(*group_batchnorm(copy.deepcopy(plain)))
    assert_same(plain, nn.Sequential(*fused), randn(12, 3), (4, 4, 4))
    GroupedForward(fused)(randn(12, 3), (4, 4, 4))
    assert fused.passes == 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_batchnorm_with_a_forward_pass_of_its_own_that_needs_separate_passes(training):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Doubled(3)

        def forward(self, x):
            return self.norm(self.norm(x))

    class Frames(Again):
        def forward(self, x):
            return self.norm(x.flatten(0, 1)).view_as(x)

    for model, x in ((Again(), randn(12, 3)), (Frames(), randn(12, 2, 3))):
        plain = model.double().train(training)
        assert_same(plain, group_batchnorm(copy.deepcopy(plain)), x, (4, 4, 4))


def test_a_converted_batchnorm_of_another_class_is_copied_and_pickled():
    model = group_batchnorm(nn.Sequential(Doubled(3).double()))
    again = group_batchnorm(copy.deepcopy(model))
    pickled = pickle.loads(pickle.dumps(model))
    assert type(model[0]) is type(again[0]) is type(pickled[0])
    for other in (again, pickled):
        assert_same(copy.deepcopy(model), other, randn(12, 3), (4, 4, 4))
        assert other[0].groups is not model[0].groups


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet"])
def test_networks_of_timm(name):
    timm = pytest.importorskip("timm", exc_type=ImportError)  # which needs a torchvision that loads
    with seeded_globally(0, "init"):
        plain = timm.create_model(name, num_classes=5).double()
    fused = group_batchnorm(copy.deepcopy(plain))
    assert GroupedForward(fused).fused
    assert_same(plain, fused, randn(12, 3, 32, 32), (4, 4, 4))


def test_a_batchnorm_without_a_forward_pass_of_its_own():
    class Renamed(nn.BatchNorm1d):
        pass

    plain = nn.Sequential(Renamed(3)).double()
    fused = group_batchnorm(copy.deepcopy(plain))
    assert type(fused[0]) is GroupedBatchNorm
    assert_same(plain, fused, randn(12, 3), (4, 4, 4))


def test_a_batchnorm_that_cannot_be_converted_is_reported():
    class Conditional(nn.BatchNorm1d):
        def forward(self, input, condition=1):
            return condition * super().forward(input)

    replaced = nn.BatchNorm1d(3)
    replaced.forward = lambda x: 2 * x
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(Conditional(3), replaced, nn.BatchNorm1d(3), shared, shared)
    with pytest.warns(UserWarning, match="BatchNorms were left") as found:
        converted = group_batchnorm(model)
    (message,) = map(str, [warning.message for warning in found])
    assert message == (
        "3 of 4 BatchNorms were left as they were, because they have a special forward pass in Conditional (1) "
        "or have a special forward pass in BatchNorm1d (1) or are used in several places (1). "
        "Each minibatch gets a forward pass of its own: the results are right, but it is slower."
    )
    assert [isinstance(module, GroupedBatchNorm) for module in converted] == [False, False, True, False, False]
    assert not GroupedForward(nn.Sequential(replaced.eval())).fused  # nobody knows what its forward pass does
    replaced.train()
    assert_same(copy.deepcopy(model), converted, randn(12, 3, dtype=torch.float32), (4, 4, 4))


# --- the whole network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 2)])
def test_resnet_fused_equals_three_passes(sizes):
    with seeded_globally(0, "init"):
        plain = ResNet18((3, 16, 16), 10, width=8).double()
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(sum(sizes), 3, 16, 16)
    assert_same(plain, fused, x, sizes, rtol=1e-8, atol=1e-9)
    assert fused.bn.num_batches_tracked == 3


def test_resnet_fused_in_float32_and_channels_last():
    with seeded_globally(0, "init"):
        plain = ResNet18((3, 16, 16), 10, width=8).to(memory_format=torch.channels_last)
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(12, 3, 16, 16, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    assert_same(plain, fused, x, (4, 4, 4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["channels-first", "last"])
def test_resnet_on_a_cpu_computes_the_bits_of_three_passes(layout):
    """As published code makes them. Gradients of convolutions are sums over all rows, which round otherwise."""
    with seeded_globally(0, "init"):
        plain = ResNet18((3, 16, 16), 10, width=8).to(memory_format=layout)
    fused = group_batchnorm(copy.deepcopy(plain))
    x = randn(24, 3, 16, 16, dtype=torch.float32).contiguous(memory_format=layout)
    theirs, ours = torch.cat(separate(plain, x, [8, 8, 8])), torch.cat(GroupedForward(fused)(x, [8, 8, 8]))
    assert torch.equal(ours, theirs)
    assert all(torch.equal(one, two) for one, two in zip(fused.buffers(), plain.buffers(), strict=True))
    for outputs in (theirs, ours):
        outputs.square().sum().backward()
    norms = [name for name, parameter in plain.named_parameters() if parameter.dim() == 1 and "classifier" not in name]
    assert len(norms) == 2 * 20
    for name in norms:
        assert torch.equal(fused.get_parameter(name).grad, plain.get_parameter(name).grad), name


class Called(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_sum_and_relu_overwrite_what_nobody_else_sees():
    model = group_batchnorm(ResNet18((3, 8, 8), 10, width=4))
    with Called() as called:
        model(randn(4, 3, 8, 8, dtype=torch.float32))
    assert called.names.count("relu_") == 17
    assert not {"relu", "add"} & set(called.names)


def test_shortcut_and_input_keep_their_values():
    norm = group_batchnorm(nn.BatchNorm2d(4)).double()
    x, shortcut = randn(6, 4, 3, 3), randn(6, 4, 3, 3, seed=1)
    before = x.clone(), shortcut.clone()
    got = normalized_relu(norm, x, shortcut)
    assert torch.equal(got, (norm(x) + shortcut).relu())
    assert all(torch.equal(one, two) for one, two in zip((x, shortcut), before, strict=True))


def test_hooks_see_what_comes_before_the_relu():
    norm, seen = group_batchnorm(nn.BatchNorm2d(4)).double(), []
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    normalized_relu(norm, randn(6, 4, 3, 3))
    assert seen[0].min() < 0


def test_a_class_that_needs_its_output_for_its_gradient_keeps_it():
    class Squashed(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).sigmoid()

    plain = Squashed(4).double()
    x, found = randn(6, 4, 3, 3), []
    for norm in (plain, group_batchnorm(copy.deepcopy(plain))):
        normalized_relu(norm, x, randn(6, 4, 3, 3, seed=1)).square().sum().backward()
        found.append(norm.weight.grad)
    assert torch.equal(*found)
