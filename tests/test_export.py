"""Exported files: read back by torch and by onnxruntime, and the command around them."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import results
from holdfast.augment import Normalize
from holdfast.cli import main
from holdfast.evaluation import predict
from holdfast.export import format_of
from holdfast.learners.turned import AtAllAngles

SUFFIX = {"torch": "pt2", "onnx": "onnx"}
KINDS = sorted(SUFFIX)


def answers(path, x):
    """What a reader without Holdfast gets from the file."""
    if path.suffix == ".pt2":
        return torch.export.load(BytesIO(path.read_bytes())).module()(x).detach()
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return torch.from_numpy(session.run(None, {given.name: x.numpy()})[0])


@pytest.fixture
def writing(monkeypatch):
    """Called with a model: that one is written instead of the one to be exported."""
    genuine = hf.export.__globals__["_torch_file"]

    def instead(other):
        def file(_, x, about):
            batch = torch.export.Dim("batch")
            return genuine(torch.export.export(other, (x,), dynamic_shapes=({0: batch},)), x, about)

        monkeypatch.setitem(hf.export.__globals__, "_torch_file", file)

    return instead


def small():
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(108, 4)]
    model = nn.Sequential(*body)
    model(torch.randn(16, 1, 8, 8))  # running statistics of its own
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_answers_as_the_model_in_evaluation_mode(kind, tmp_path):
    model = hf.group_batchnorm(small())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = hf.export(model, torch.randn(3, 1, 8, 8), tmp_path / f"model.{SUFFIX[kind]}", about={"note": "hello"})
    assert (made.format, made.size) == (kind, made.path.stat().st_size)
    assert made.difference < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == [made.path.name]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    for size in (1, 2, 9):
        x = torch.randn(size, 1, 8, 8)
        assert torch.allclose(answers(made.path, x), model(x).detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "normalize"),
    [*((kind, Normalize((0.3,), (0.2,))) for kind in KINDS), ("onnx", Normalize())],
    ids=[*KINDS, "scaled only"],
)
def test_a_view_becomes_part_of_the_file(kind, normalize, tmp_path):
    model = small()
    x = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    made = hf.export(model, x[:1], tmp_path / f"model.{SUFFIX[kind]}", view=normalize)
    assert torch.allclose(answers(made.path, x), predict(model, x, normalize), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_view_may_work_in_place(kind, tmp_path):
    model = nn.Sequential(nn.Hardtanh(0, 1, inplace=True), small())
    x = torch.randn(5, 1, 8, 8)
    made = hf.export(model, x, tmp_path / f"model.{SUFFIX[kind]}", view=lambda x: x.sub_(0.5))
    assert torch.allclose(answers(made.path, x.clone()), model.eval()(x - 0.5), atol=1e-5)


def test_a_file_knows_how_it_came_about(tmp_path):
    onnx = pytest.importorskip("onnx")
    about = {"fingerprint": "abc", "lr": 0.1}
    for kind in KINDS:
        hf.export(nn.Linear(2, 2), torch.zeros(2, 2), tmp_path / f"model.{SUFFIX[kind]}", about=about)
    kept = {"holdfast": ""}
    torch.export.load(BytesIO((tmp_path / "model.pt2").read_bytes()), extra_files=kept)
    assert json.loads(kept["holdfast"]) == about
    properties = onnx.load(tmp_path / "model.onnx").metadata_props
    assert {each.key: json.loads(each.value) for each in properties if each.key == "holdfast"} == {"holdfast": about}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 4), nn.Linear(7, 2)

    def forward(self, x):
        left, right = x["numbers"]
        joined = torch.cat([self.words(x["word"]), left, right], dim=1)
        return {"logits": self.layer(joined), "parts": (joined,)}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_outputs_may_have_structure(kind, tmp_path):
    x = {"word": torch.tensor([1, 2, 9]), "numbers": (torch.randn(3, 1), torch.randn(3, 2))}
    model = Pair()
    made = hf.export(model, x, tmp_path / f"model.{SUFFIX[kind]}")
    assert made.difference < 1e-5
    if kind == "torch":
        read = torch.export.load(BytesIO(made.path.read_bytes())).module()(x)
        assert torch.allclose(read["logits"], model(x)["logits"], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype, tmp_path):
    made = hf.export(nn.Linear(3, 2).to(dtype), torch.randn(4, 3, dtype=dtype), tmp_path / "model.pt2")
    assert made.difference == 0


class Masking(nn.Module):
    """Rules classes out."""

    def __init__(self, value, *classes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.value = nn.Linear(2, 3), value
        self.register_buffer("out", torch.tensor([each in classes for each in range(3)]))

    def forward(self, x):
        return self.linear(x).masked_fill(self.out, self.value)


@pytest.mark.parametrize(("kind", "classes"), [*((kind, (2,)) for kind in KINDS), ("onnx", (0, 1, 2))])
def test_answers_may_be_infinite(kind, classes, tmp_path):
    model = Masking(-math.inf, *classes)
    made = hf.export(model, torch.randn(4, 2), tmp_path / f"model.{SUFFIX[kind]}")
    assert made.difference < 1e-5
    x = torch.randn(5, 2)
    torch.testing.assert_close(answers(made.path, x), model(x).detach())


@pytest.mark.parametrize(
    "other",
    [Masking(-math.inf, 1), Masking(math.inf, 2), Masking(0.0, 2), Masking(math.nan, 2), Masking(-math.inf)],
)
def test_infinite_answers_must_be_the_same(other, tmp_path, writing):
    writing(other)
    with pytest.raises(hf.HoldfastError, match="does not answer as the model does: it differs by inf"):
        hf.export(Masking(-math.inf, 2), torch.randn(4, 2), tmp_path / "model.pt2")


def test_infinite_answers_hide_no_difference_of_the_others(tmp_path, writing):
    other = Masking(-math.inf, 2)
    with torch.no_grad():
        other.linear.bias[0] += 0.01
    writing(other)
    with pytest.raises(hf.HoldfastError, match=r"it differs by 0\.01"):
        hf.export(Masking(-math.inf, 2), torch.randn(4, 2), tmp_path / "model.pt2")


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Specialised(nn.Module):
    def forward(self, x):
        return x.reshape(4, -1)  # works for the example only


@pytest.mark.parametrize("model", [Branching(), Specialised()], ids=["branching", "specialised"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_cannot_be_exported_says_so(model, kind, tmp_path):
    with pytest.raises(hf.HoldfastError, match="cannot be exported to"):
        hf.export(model, torch.randn(4, 2), tmp_path / f"model.{SUFFIX[kind]}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_looks_into_its_layers_is_exported(kind, tmp_path, monkeypatch):
    """As ballast does with looks="angles"; here PyTorch's own default is strict, as it was in 2.6."""
    network = AtAllAngles(small())
    nn.init.normal_(network.turned.weight)
    monkeypatch.setattr(torch.export, "export", partial(torch.export.export, strict=True))
    path, x = tmp_path / f"model.{SUFFIX[kind]}", torch.randn(5, 1, 8, 8)
    hf.export(network, torch.randn(3, 1, 8, 8), path)
    with torch.no_grad():
        assert torch.allclose(answers(path, x), network.eval()(x), atol=1e-5)


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path, writing):
    (tmp_path / "model.pt2").write_bytes(b"the last good one")
    writing(nn.Linear(2, 2))
    with pytest.raises(hf.HoldfastError, match="does not answer as the model does"):
        hf.export(nn.Linear(2, 2), torch.randn(4, 2), tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_bytes() == b"the last good one"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(hf.HoldfastError, match=r"pip install 'holdfast\[onnx\]'"):
        hf.export(nn.Linear(2, 2), torch.randn(4, 2), tmp_path / "model.onnx")


def test_without_onnxruntime_the_file_is_written_and_nobody_claims_it_was_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    made = hf.export(nn.Linear(2, 2), torch.randn(4, 2), tmp_path / "model.onnx")
    assert made.difference is None
    assert made.path.exists()


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ([1.0], "must be a batch of inputs"),
        ({}, "must be a batch of inputs"),
        (torch.zeros(0, 2), "at least one"),
        ((torch.zeros(2, 2), torch.zeros(3, 2)), "same number of rows"),
    ],
)
def test_examples_are_checked(example, says, tmp_path):
    with pytest.raises(hf.UsageError, match=says):
        hf.export(nn.Linear(2, 2), example, tmp_path / "model.pt2")


def test_the_name_of_the_file_decides_unless_a_format_is_named(tmp_path):
    assert format_of(tmp_path / "a.onnx") == "onnx"
    assert format_of(tmp_path / "a.pt2") == "torch"
    assert format_of(tmp_path / "a.bin", "onnx") == "onnx"
    with pytest.raises(hf.UsageError, match=r"end it with .pt2 or .onnx"):
        format_of(tmp_path / "a.bin")
    with pytest.raises(hf.UsageError, match="did you mean 'onnx'"):
        format_of(tmp_path / "a.bin", "onx")


# --- the command ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run with its weights, as `holdfast run` keeps it."""
    config = hf.RunConfig.preset("seq-mnist", "mse", buffer_size=50, train_limit=500)
    return results.save(hf.run(config, device="cpu"), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def holdfast(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalized", [True, False], ids=["bytes", "floats"])
def test_the_command_exports_what_the_run_ended_with(holdfast, finished, tmp_path, kind, normalized):
    flag = [] if normalized else ["--without-normalization"]
    file = tmp_path / f"deep/model.{SUFFIX[kind]}"
    code, out, err = holdfast("export", finished, "--out", file, *flag, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["input"] == ("uint8 (batch, 1, 28, 28)" if normalized else "float32 (batch, 1, 28, 28)")
    assert report["output"] == "float32 (batch, 10)"
    assert report["bytes"] == file.stat().st_size
    # Against the logits that the run itself kept for its last test set.
    stored = results.read(finished, tensors=True)
    benchmark = hf.BENCHMARKS["seq-mnist"](stored.config, hf.data.data_root())
    images = benchmark.tasks[-1].test.images
    logits = answers(file, images if normalized else benchmark.normalize(images))
    assert torch.allclose(logits, stored.logits["logits.4"], atol=1e-4)
    accuracy = 100 * float((logits.argmax(1) == stored.logits["labels.4"]).double().mean())
    assert math.isclose(accuracy, float(stored.matrix[-1, -1]))


def test_a_folder_of_results_is_not_a_result(holdfast, finished):
    code, _, err = holdfast("export", str(finished.parent))
    assert code == 2
    assert f"is a folder of results (1): give one of them, for instance {finished}" in err
    code, _, err = holdfast("export", str(finished / "result.json"))
    assert code == 2
    assert f"is a file; give the folder that a run was saved to, for instance {finished}." in err


def test_by_default_the_file_is_named_after_the_run(holdfast, finished, tmp_path):
    code, out, _ = holdfast("export", finished)
    assert code == 0
    name = f"seq-mnist-mse-{finished.name}.pt2"
    assert (tmp_path / name).exists()
    assert name in out
    assert "largest difference" in out


def test_results_without_weights_say_how_to_get_them(holdfast, finished, tmp_path):
    bare = tmp_path / finished.name
    bare.mkdir()
    (bare / "result.json").write_bytes((finished / "result.json").read_bytes())
    code, out, err = holdfast("export", bare, "--format", "onnx")
    assert code == 1
    assert out == ""
    assert "has no weights, so there is no model to export. To get them: holdfast run seq-mnist mse" in err


@pytest.mark.parametrize("command", ["export", "analyze"])
@pytest.mark.parametrize("buffer_size", [50, None])
def test_a_run_of_a_plugin_that_is_not_named(holdfast, finished, tmp_path, command, buffer_size):
    """It was an unknown method, or one that needs a buffer size, with no word of what to do."""
    result = results.read(finished, tensors=command == "export")
    stranger = replace(result.config, method="stranger", buffer_size=buffer_size)
    folder = results.save(replace(result, config=stranger), tmp_path / "runs")
    code, _, err = holdfast(command, folder)
    assert code == 2
    assert f"{folder} is a run of the method 'stranger'" in err
    assert "--plugin MODULE" in err


def test_weights_of_another_network_are_refused(holdfast, finished, tmp_path):
    other = tmp_path / finished.name
    other.mkdir()
    (other / "result.json").write_bytes((finished / "result.json").read_bytes())
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, other / "weights.safetensors")
    code, _, err = holdfast("export", other)
    assert code == 1
    assert "does not fit the model of its run" in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nowhere"], 1, "holds no result"),
        (["RUN", "--format", "onx"], 2, "unknown format 'onx': did you mean 'onnx'?"),
        (["RUN", "--out", "model.bin"], 2, "end it with .pt2 or .onnx"),
        (["RUN", "--out", "taken/model.pt2"], 1, "could not be written to taken/model.pt2"),
    ],
)
def test_bad_usage_is_one_clear_message(holdfast, finished, tmp_path, arguments, code, says):
    (tmp_path / "taken").write_text("a file")
    got, out, err = holdfast("export", *(finished if word == "RUN" else word for word in arguments))
    assert got == code
    assert says in " ".join(err.split())
    assert out == ""
    assert "Traceback" not in err
    assert np.all([not file.name.endswith(".new") for file in tmp_path.rglob("*")])
