"""The comparison with other programs: what it tells them, what it reads of them, and what it computes."""

import gzip
import importlib.util
import json
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import ended, forked, trains_in_a_fork

PATH = Path(__file__).parents[1] / "benchmarks" / "peers.py"
spec = importlib.util.spec_from_file_location("peers", PATH)
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script is for Linux")
SETTINGS = {"tasks": 2, "seed": 3, "buffer_size": 200, "batch_size": 128, "replay_size": 64}
SETTINGS |= {"lr": 0.1, "avalanche_lr": 0.03, "alpha": 0.5, "beta": 1.0, "home": "/somewhere"}


def reading(cpu, accuracy=90.0, version="1"):
    told = {"imports": 1.0, "steps": 938, "accuracy": accuracy, "versions": {"torch": version}}
    return {**told, "cpu": cpu, "wall": 2 * cpu, "after_imports": cpu - 1, "load": 0.5}


def test_a_ratio_is_taken_within_a_turn():
    """A machine that slows down slows all programs of a turn."""
    turns = [
        {"holdfast": [reading(2 * slow), reading(4 * slow)], "mammoth": [reading(30 * slow)]} for slow in (1, 2, 5)
    ]
    found = peers.ratios(turns, "mammoth")
    assert found["cpu"] == pytest.approx({"median": 10, "low": 10, "high": 10})
    assert found["wall"] == pytest.approx({"median": 10, "low": 10, "high": 10})
    assert found["after_imports"] == pytest.approx({"median": 59 / 5, "low": 149 / 14, "high": 29 / 2})


def test_the_summary_has_all_readings_of_a_program():
    turns = [{"holdfast": [reading(2.0), reading(4.0, 91.0)], "avalanche": [reading(30.0)]}]
    found = peers.summary([*turns, *turns])
    assert found["programs"]["holdfast"]["runs"] == 4
    assert found["programs"]["holdfast"]["cpu"] == 3.0
    assert found["programs"]["holdfast"]["accuracy"] == 90.5
    assert found["programs"]["holdfast"]["accuracy_high"] == 91.0
    assert list(found["ratios"]) == ["avalanche"]


def test_a_program_must_not_change_between_turns():
    turns = [{"holdfast": [reading(2.0)], "mammoth": [reading(9.0, version=each)]} for each in "12"]
    with pytest.raises(SystemExit, match="mammoth changed"):
        peers.summary(turns)


def test_holdfast_runs_before_each_program():
    ran = []
    turn = peers.one_turn(["mammoth", "avalanche"], lambda name: ran.append(name) or reading(1.0))
    assert ran == ["holdfast", "mammoth", "holdfast", "avalanche"]
    assert [len(each) for each in turn.values()] == [2, 1, 1]


def test_what_mammoth_tells():
    text = "Accuracy for 1 task(s): [Domain-IL]: 93.34 %\nnoise\nAccuracy for 2 task(s): \t [Domain-IL]: 88.0 %\n"
    assert peers.heard_accuracy(text, 2) == 88.0
    with pytest.raises(ValueError, match="no accuracy after 3 tasks"):
        peers.heard_accuracy(text, 3)


def test_mammoth_names_the_weights_the_other_way_round():
    told = peers.mammoth_arguments(SETTINGS)
    values = dict(zip(told[::2], told[1::2], strict=True))
    assert values["--alpha"] == "1.0"  # of the old logits
    assert values["--beta"] == "0.5"
    assert values["--minibatch_size"] == "64"  # the replay
    assert values["--stop_after"] == "2"


def test_mnist_lies_where_both_classes_look(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train-labels.gz").write_bytes(gzip.compress(b"labels"))
    peers.lay_out(tmp_path / "files", tmp_path / "home")
    for name in ("MNIST", "MyMNIST"):
        assert (tmp_path / "home" / "MNIST" / name / "raw" / "train-labels").read_bytes() == b"labels"


def test_the_seconds_of_workers_count():
    worker = "import time\nwhile time.process_time() < 0.3: pass"
    line = peers.MARK + json.dumps({"imports": 0.1})
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}]); print('noise'); print({line!r})"
    )
    found = peers.measure([sys.executable, "-c", parent], None)
    assert found["cpu"] >= 0.3
    assert found["after_imports"] == pytest.approx(found["cpu"] - 0.1)


@pytest.mark.parametrize("child", ["raise SystemExit(3)", "print('no reading')"])
def test_a_program_that_fails_ends_the_comparison(child):
    with pytest.raises(SystemExit, match="ended with"):
        peers.measure([sys.executable, "-c", child], None)


def test_the_report_is_written_after_each_turn(tmp_path, monkeypatch):
    commands, out = [], tmp_path / "report.json"
    options = SimpleNamespace(mammoth=tmp_path / "clone", avalanche=True, python="other", tasks=2)
    options.turns, options.cores, options.out = 2, 1, out

    def measure(command, cores):
        assert len(cores) == 1
        assert out.exists() == (len(commands) >= 4)
        commands.append(command)
        return reading(10.0 if command[3] == "holdfast" else 30.0)

    monkeypatch.setattr(peers, "measure", measure)
    peers.compare(options, tmp_path)
    assert [each[3] for each in commands[:4]] == ["holdfast", "mammoth", "holdfast", "avalanche"]
    assert [each[0] for each in commands[:4]] == [sys.executable, "other", sys.executable, "other"]
    assert [json.loads(each[4])["seed"] for each in commands] == [0] * 4 + [1] * 4
    report = json.loads(out.read_text())
    assert report["turns"] == 2
    assert report["ratios"]["avalanche"]["cpu"]["median"] == 3
    assert str(tmp_path) not in out.read_text(), "folders of a machine do not belong there"


def test_a_program_must_be_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    with pytest.raises(SystemExit):
        peers.arguments()
    assert "--mammoth FOLDER" in capsys.readouterr().err


def child(program, folder, files):
    """What the script's own child tells of a program that consists of these files, with a torchvision that is empty."""
    files = {"torchvision-1.0.dist-info/METADATA": "Name: torchvision\nVersion: 1.0\n", **files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    settings, said = json.dumps({**SETTINGS, "mammoth": str(folder)}), folder / "said.md"

    def tell():
        warnings.resetwarnings()
        sys.argv[:] = [str(PATH), "--child", program, settings]
        sys.path.insert(0, str(folder))
        with said.open("w") as sys.stdout:
            runpy.run_path(str(PATH), run_name="__main__")

    assert ended([forked(tell)]) == [0]
    return json.loads(said.read_text().splitlines()[-1].removeprefix(peers.MARK))


MAMMOTH = """
import sys, open_clip, torch
PREPARED = open_clip.create_model_and_transforms("ViT-B-16", pretrained="openai")[2]
torch.set_num_threads(2)
def main():
    assert torch.get_num_threads() == 1
    assert "--buffer_size" in sys.argv
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        weight.sum().backward()
        optimizer.step()
    print("much else")
    print("Accuracy for 2 task(s): [Domain-IL]: 87.5 %", file=sys.stderr)
"""


@trains_in_a_fork
def test_mammoth_in_a_process(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "empty"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    found = child("mammoth", tmp_path, {"main.py": MAMMOTH, "utils/__init__.py": "", "utils/training.py": ""})
    assert (found["steps"], found["accuracy"]) == (5, 87.5)
    assert found["imports"] > 0
    assert found["versions"]["torchvision"] == "1.0"
    assert len(found["versions"]["commit"]) == 40


AVALANCHE = {
    "avalanche/benchmarks/classic.py": """
from types import SimpleNamespace
def RotatedMNIST(tasks, *, rotations_list, dataset_root, train_transform, eval_transform):
    assert dataset_root == "/somewhere/MNIST"
    assert len(rotations_list) == tasks and all(0 <= angle <= 180 for angle in rotations_list)
    return SimpleNamespace(train_stream=list(range(tasks)), test_stream=list(range(tasks)))
""",
    "avalanche/evaluation/metrics.py": "def accuracy_metrics(*, stream): return stream",
    "avalanche/training/plugins.py": "def EvaluationPlugin(metrics, *, loggers): return None",
    "avalanche/training/supervised.py": """
from types import SimpleNamespace
class DER:
    def __init__(self, *, alpha, beta, batch_size_mem, **rest):
        assert (alpha, beta, batch_size_mem) == (1.0, 0.5, 64)
        self.clock = SimpleNamespace(train_iterations=0)
    def train(self, experience):
        self.clock.train_iterations += 469
    def eval(self, seen):
        return {"Top1_Acc_Stream/eval": 1 / len(seen)}
""",
    **{f"avalanche/{name}__init__.py": "" for name in ("", "benchmarks/", "evaluation/", "training/")},
    "avalanche_lib-0.6.dist-info/METADATA": "Name: avalanche-lib\nVersion: 0.6\n",
}


def test_avalanche_in_a_process(tmp_path):
    found = child("avalanche", tmp_path, AVALANCHE)
    assert (found["steps"], found["accuracy"]) == (938, 50)
    assert found["versions"]["avalanche-lib"] == "0.6"
