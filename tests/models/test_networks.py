import math
import sys

import pytest
import torch
from torch import nn

from holdfast.config import RunConfig
from holdfast.devices import cpu_threads, threads_for
from holdfast.errors import HoldfastError, UsageError
from holdfast.models import MLP, MODELS, ResNet18, features
from holdfast.rng import generator, seeded_globally
from holdfast.training import run


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def noise(*shape):
    return torch.randn(*shape, generator=generator(0, "noise"))


def shapes_through(model, x):
    """Output shapes of every convolution and block, in order of execution."""
    seen = []
    kept = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    hooks = [m.register_forward_hook(lambda m, i, out: seen.append(tuple(out.shape[1:]))) for m in kept]
    out = model.eval()(x)
    for hook in hooks:
        hook.remove()
    return seen, out


def test_resnet_has_the_parameters_of_the_paper():
    """11,173,962 for 10 classes; each further class has 512 weights and a bias."""
    assert count(ResNet18((3, 32, 32), 10)) == 11_173_962
    assert count(ResNet18((3, 32, 32), 100)) == 11_173_962 + 90 * 513


def test_resnet_layers():
    """A 3x3 stem at full resolution without pooling, then widths 1-2-4-8 with the resolution halved thrice."""
    seen, out = shapes_through(ResNet18((3, 32, 32), 10, width=8), noise(2, 3, 32, 32))
    stage1 = [(8, 32, 32)] * 4
    # Two convolutions and the shortcut of the first block, two of the second.
    later = [[(8 * k, side, side)] * 5 for k, side in ((2, 16), (4, 8), (8, 4))]
    assert seen == [(8, 32, 32), *stage1, *later[0], *later[1], *later[2]]
    assert out.shape == (2, 10)


def test_resnet_convolutions():
    model = ResNet18((3, 32, 32), 10)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20  # 1 + 16, and 3 shortcuts
    assert all(convolution.bias is None for convolution in convolutions)
    kernels = sorted(convolution.kernel_size for convolution in convolutions)
    assert kernels == [(1, 1)] * 3 + [(3, 3)] * 17
    assert sum(convolution.stride == (2, 2) for convolution in convolutions) == 6
    assert convolutions[0].stride == (1, 1)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 20
    assert not any(isinstance(module, nn.MaxPool2d) for module in model.modules())
    assert model.classifier.weight.shape == (10, 512)


def test_resnet_is_initialised_as_torch_does():
    """He-uniform with a = sqrt(5): bounded by 1/sqrt(fan in)."""
    with seeded_globally(0, "init"):
        model = ResNet18((3, 32, 32), 10, width=16)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            assert 0.95 * bound < module.weight.abs().max() <= bound
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert model.classifier.bias.abs().max() > 0


def test_resnet_is_made_of_residual_blocks():
    """With its second BatchNorm silenced, a block without change of shape passes its (non-negative) input on."""
    model = ResNet18((3, 8, 8), 5, width=4).eval()
    block = model.blocks[1]
    nn.init.zeros_(block.bn2.weight)
    x = noise(2, 4, 8, 8).abs()
    assert torch.equal(block(x), x)


@pytest.mark.parametrize(("model", "sizes"), [(MLP, ()), (ResNet18, (32, 16, 8, 4))])
def test_stages_lead_to_the_features_and_have_the_widths_they_say(model, sizes):
    model, x = model((3, 32, 32), 5, width=4).eval(), noise(2, 3, 32, 32)
    stages = model.stages(x)
    assert [each.shape[1] for each in stages] == list(model.widths[1:])
    assert [each.shape[2] for each in stages if each.dim() > 2] == list(sizes)
    last = stages[-1] if not sizes else stages[-1].mean((2, 3))
    assert torch.equal(last, model.features(x))


def test_resnet_pools_the_mean_over_all_places():
    model = ResNet18((3, 32, 32), 5, width=4).eval()
    features = {}
    model.blocks.register_forward_hook(lambda m, i, out: features.update(out=out))
    logits = model(noise(3, 3, 32, 32))
    torch.testing.assert_close(logits, model.classifier(features["out"].flatten(2).mean(2)))


@pytest.mark.parametrize("shape", [(3, 64, 64), (1, 28, 28), (3, 7, 9)])
def test_resnet_takes_images_of_other_sizes(shape):
    assert ResNet18(shape, 20, width=4)(noise(2, *shape)).shape == (2, 20)


def test_mlp_has_the_size_of_the_paper():
    """784-100-100-10."""
    model = MLP((1, 28, 28), 10)
    assert count(model) == (784 * 100 + 100) + (100 * 100 + 100) + (100 * 10 + 10)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in linear] == [(100, 784), (100, 100), (10, 100)]


def test_mlp_is_initialised_by_xavier_with_zero_biases():
    with seeded_globally(0, "init"):
        model = MLP((1, 28, 28), 10)
    for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
        bound = math.sqrt(6 / sum(layer.weight.shape))
        assert 0.95 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert (layer.bias == 0).all()


def test_mlp_is_relu_between_linear_layers():
    with seeded_globally(0, "init"):
        model = MLP((1, 5, 5), 3, width=7).double()
    x = noise(4, 1, 5, 5).double()
    weights = [model.hidden1.weight, model.hidden2.weight, model.classifier.weight]
    hidden = (x.flatten(1) @ weights[0].T).clamp_min(0)
    torch.testing.assert_close(model(x), (hidden @ weights[1].T).clamp_min(0) @ weights[2].T)


@pytest.mark.parametrize("name", MODELS)
def test_every_registered_model(name):
    """(shape, classes) -> logits; the same seed gives the same network, and all of it is trained."""
    twins = []
    for _ in range(2):
        with seeded_globally(3, "init"):
            twins.append(MODELS[name]((3, 8, 8), 4))
    for one, two in zip(*(model.parameters() for model in twins), strict=True):
        assert torch.equal(one, two)
    out = twins[0](noise(3, 3, 8, 8))
    assert out.shape == (3, 4)
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in twins[0].parameters())
    assert MODELS.describe(name)


def test_an_unknown_model():
    with pytest.raises(UsageError, match="unknown model 'resnet': did you mean 'resnet18'"):
        MODELS["resnet"]


TIMM = """
from torch import nn

def create_model(name, pretrained, num_classes, in_chans):
    if name != "tiny":
        raise RuntimeError(f"Unknown model ({name})")
    assert pretrained is False
    return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, num_classes))
"""


@pytest.fixture
def timm(tmp_path, monkeypatch):
    """A stand-in: the real one needs a torchvision that fits the torch at hand."""
    (tmp_path / "timm.py").write_text(TIMM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    yield
    sys.modules.pop("timm", None)


def test_a_network_of_timm_by_name(timm):
    assert MODELS["timm:tiny"]((3, 8, 8), 4)(noise(2, 3, 8, 8)).shape == (2, 4)
    with pytest.raises(UsageError, match=r"'tinny': Unknown model \(tinny\). timm.list_models"):
        MODELS["timm:tinny"]((3, 8, 8), 4)
    with pytest.raises(UsageError, match=r"takes images .*, not samples of shape \(4,\)"):
        MODELS["timm:tiny"]((4,), 4)
    with pytest.raises(UsageError, match="unknown model 'timm:'"):
        MODELS["timm:"]


def test_a_run_with_a_network_of_timm(timm):
    config = RunConfig.preset("seq-mnist", "mse", buffer_size=50, tasks=2, train_limit=64, model="timm:tiny")
    assert len(run(config, device="cpu").matrix) == 2


def test_without_timm_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(HoldfastError, match=r"pip install 'holdfast\[timm\]'"):
        MODELS["timm:resnet18"]((3, 8, 8), 4)


def test_only_the_small_network_prefers_one_thread():
    with cpu_threads(2):
        assert [threads_for(RunConfig.preset("rot-mnist", "er", model=name)) for name in ("mlp", "resnet18")] == [1, 2]
    with pytest.raises(UsageError, match="did you mean 'mlp'"):
        threads_for(RunConfig.preset("rot-mnist", "er", model="mpl"))


@pytest.mark.parametrize(("name", "width"), [("mlp", 100), ("resnet18", 512)])
def test_features_are_what_the_last_layer_sees(name, width):
    with seeded_globally(0, "init"):
        model = MODELS[name]((3, 8, 8), 10)
    x, seen = noise(4, 3, 8, 8), []
    model.classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    logits = model.eval()(x)
    assert model.features(x).shape == (4, width)
    assert torch.equal(model.features(x), seen[0])
    assert torch.equal(features(model, x), seen[0])
    assert torch.equal(model.classifier(model.features(x)), logits)


def test_features_of_a_network_that_has_none():
    with pytest.raises(UsageError, match=r"Linear has no method features\(x\). Add one that returns"):
        features(nn.Linear(3, 2), noise(4, 3))


def test_features_that_are_still_images():
    class Maps(nn.Module):
        features = nn.Conv2d(3, 5, 3)

    with pytest.raises(UsageError, match=r"features\(x\) of Maps has shape \(4, 5, 6, 6\), not \(B, D\)"):
        features(Maps(), noise(4, 3, 8, 8))
