"""Kernels compiled before the first step are those that steps call, and a failure to compile them changes nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from holdfast.models import GroupedForward, ResNet18, group_batchnorm
from holdfast.models.batchnorm import ahead, fused

pytest.importorskip("triton")
from holdfast.models.batchnorm import kernels

PASSES = ((1, 1), (3, 3), (2, 1), (2, 2))


@pytest.fixture
def called(monkeypatch):
    """What identifies each kernel that was called: its name, its constants, and what Triton specialises it for."""
    found = set()

    def launch(kernel, grid, *arguments, **constants):
        found.add((kernel.__name__, tuple(constants.items()), tuple(map(special, arguments))))

    monkeypatch.setattr(kernels, "_launch", launch)
    return found


def special(argument):
    if isinstance(argument, Tensor):
        return argument.dtype
    return (argument == 1, argument % 16 == 0) if isinstance(argument, int) else float


@pytest.mark.parametrize("size", [16, 32])
def test_every_kernel_of_a_step_is_compiled_ahead(monkeypatch, called, size):
    monkeypatch.setattr(fused, "compiles_for", lambda device: True)
    model = group_batchnorm(ResNet18((3, size, size), 10, width=16)).to(memory_format=torch.channels_last)
    for _, *rest in ahead.input_shapes(model, (3, size, size)):
        for minibatches, groups in PASSES:
            ahead.compile_kernels((8 * minibatches, *rest), groups, torch.float32)
    compiled = set(called)
    called.clear()
    for sizes in ([8], [8, 8, 8], [16], [8, 8]):  # the first step, the paper's method, experience replay, der
        x = torch.rand(sum(sizes), 3, size, size).to(memory_format=torch.channels_last)
        torch.cat(GroupedForward(model)(x, sizes)).sum().backward()
    assert {name for name, *_ in called} == {"_add_up", "_normalize", "_add_up_slopes", "_descend", "_update"}
    assert called <= compiled


def test_a_run_begins_with_it(monkeypatch, called):
    """On a machine without a GPU, all but the compiler itself."""
    monkeypatch.setattr(fused, "compiles_for", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(ahead, "import_module", lambda name: None)  # takes seconds
    model = group_batchnorm(ResNet18((3, 32, 32), 10, width=16))
    with ahead.compiling_ahead(model, PASSES, (3, 32, 32), 8, torch.bfloat16, torch.device("cuda")):
        begun = set(called)
    shapes = ahead.input_shapes(model, (3, 32, 32))
    called.clear()
    for _, *rest in shapes:
        for minibatches, groups in PASSES:
            ahead.compile_kernels((8 * minibatches, *rest), groups, torch.bfloat16)
    assert begun == called != set()


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize(("samples", "groups"), [(32, 1), (96, 3), (64, 1)])
def test_the_work_is_shared_out_whole(side, samples, groups):
    """The layers of a ResNet-18: all rows are read, by many programs where there are enough, and few need a loop."""
    for level in range(4):
        channels, pixels = 64 << level, (side >> level) ** 2
        plan = kernels._plan(torch.empty(samples, channels, pixels, device="meta"), groups)
        strips, pieces, _ = plan.grid
        assert pieces <= plan.most
        assert pieces * plan.turns * plan.reads * kernels.ROWS.value >= samples * pixels // groups
        assert strips * pieces * groups >= min(128, samples * channels * pixels // (2 * 32 * 128) // 2)
        assert plan.turns == 1 or (samples, side) != (96, 32)


def test_looking_for_shapes_leaves_the_model_as_it_was():
    model = group_batchnorm(ResNet18((3, 32, 32), 10, width=8))
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    state = {name: each.clone() for name, each in model.state_dict().items()}
    assert ahead.input_shapes(model, (3, 32, 32)) == {(1, 8 << level, 32 >> level, 32 >> level) for level in range(4)}
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("kind", ["ResNet18", "unmeasurable", "compiled"])
def test_a_failure_goes_unnoticed_and_errors_inside_do_not(monkeypatch, kind):
    monkeypatch.setattr(fused, "compiles_for", lambda device: True)
    model = ResNet18((3, 32, 32), 10, width=8) if kind == "ResNet18" else nn.Linear(2, 2)
    if kind == "unmeasurable":
        model.compiles = False
    block = ahead.compiling_ahead(model, PASSES, (3, 32, 32), 8, torch.float32, torch.device("cuda"))
    with pytest.raises(KeyError, match="inside"), block:
        raise KeyError("inside")
