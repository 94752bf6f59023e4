"""The command line as a user meets it: what it prints where, its exit codes, and never a traceback."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from holdfast import results
from holdfast.cli import app, main
from holdfast.errors import HoldfastError
from holdfast.regularizers import REGULARIZERS

QUICK = ["--tasks", "2", "--set", "train_limit=300", "--device", "cpu"]


@pytest.fixture
def holdfast(monkeypatch, capfd, tmp_path):
    """Call the command in an empty folder; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return call


def test_run_prints_a_summary_and_keeps_the_result(holdfast, tmp_path):
    code, out, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert code == 0
    shown = [line.strip("│ ").partition("  ")[0].partition(" │")[0] for line in out.splitlines() if "│" in line]
    assert shown[:3] == ["accuracy (%)", "forward transfer (points)", "backward transfer (points)"]
    assert "Task-IL" not in out, "tasks share their classes: it would be the same number again"
    assert "saved to" in err
    (folder,) = (tmp_path / "runs").iterdir()
    assert {file.name for file in folder.iterdir()} == {"result.json", "logits.safetensors", "weights.safetensors"}


def test_json_is_one_object_with_the_promised_keys(holdfast):
    code, out, _ = holdfast("run", "rot-mnist", "er", "--buffer-size", "50", "--seed", "3", *QUICK, "--json")
    assert code == 0
    result = json.loads(out)
    assert (result["benchmark"], result["method"], result["buffer_size"], result["seed"]) == ("rot-mnist", "er", 50, 3)
    promised = {"accuracy", "accuracy_matrix", "forward_transfer", "backward_transfer", "forgetting", "seconds"}
    assert promised | {"fingerprint"} <= set(result)
    assert 0 <= result["accuracy"] <= 100


def test_a_result_that_is_there_is_shown_not_computed_again(holdfast):
    first = json.loads(holdfast("run", "seq-mnist", "l1", "--set", "train_limit=200", "--json")[1])
    code, out, err = holdfast("run", "seq-mnist", "l1", "--set", "train_limit=200", "--json")
    assert code == 0
    assert json.loads(out) == first
    assert "--force" in err


def test_a_result_in_a_folder_that_cannot_be_written_is_shown(holdfast, monkeypatch):
    """It was refused: nothing could be written there. Nothing has to be."""
    assert holdfast("run", "rot-mnist", "mse", *QUICK)[0] == 0

    def refuse(folder):
        raise HoldfastError(f"nothing can be written to {folder}")

    monkeypatch.setattr("holdfast.results.check_writable", refuse)
    code, out, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert (code, "accuracy (%)" in out, "already in" in err) == (0, True, True)
    assert holdfast("run", "rot-mnist", "mse", *QUICK, "--force")[0] == 1


def test_the_same_config_gives_the_same_numbers_again(holdfast):
    def numbers():
        result = json.loads(holdfast("run", "rot-mnist", "linf", *QUICK, "--force", "--json")[1])
        return [result[key] for key in ("accuracy_matrix", "task_il_matrix", "untrained", "fingerprint")]

    assert numbers() == numbers()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "rot-mnist", "msee"], 2, "unknown method 'msee': did you mean 'mse'?"),
        (["bench", "--device", "cpu", "--only", "seq-cifar10"], 2, "--only chooses among the benchmarks measured on"),
        (["run", "rot-mnits", "mse"], 2, "unknown benchmark 'rot-mnits': did you mean 'rot-mnist'?"),
        (["run", "rot-mnist", "mse", "--set", "learning_rate=1"], 2, "unknown setting 'learning_rate'"),
        (["run", "rot-mnist", "mse", "--set", "lr"], 2, "'lr' is not of the form key=value"),
        (["run", "rot-mnist", "mse", "--set", "lr=fast"], 2, "lr must be a number"),
        (["run", "rot-mnist", "mse", "--set", "buffer_size=9"], 2, "buffer_size decides the preset"),
        (["run", "rot-mnist", "simclr", "--set", "regularizer.temprature=1"], 2, "did you mean 'temperature'?"),
        (["run", "rot-mnist", "mse", "--set", "regularizer.temperature=1"], 2, "unknown hyper-parameter"),
        (["run", "rot-mnist", "er", "--set", "regularizer.temperature=1"], 2, "er has no regularizer"),
        (["run", "rot-mnist", "ER"], 2, "did you mean 'er'?"),
        (["run", "rot-mnist", "er", "--seed", "4", "--set", "seed=3"], 2, "--seed and --set seed=3 say the same"),
        (["run", "rot-mnist", "er", "--buffer-size", "9", "--set", "buffer_size=9"], 2, "--buffer-size and --set"),
        (["run", "rot-mnist", "er", "--set", "lr=1", "--set", "lr = 2"], 2, "--set lr=1 and --set lr = 2 say the same"),
        (["run", "mnist-360", "er", "--tasks", "3"], 2, "mnist-360 has 1 task here, not 3"),
        (["run", "rot-mnist", "er", "--seed", str(10**30)], 2, "seed must be a whole number between -2**63 and 2**63"),
        (["run", "rot-mnist", "dualnet", "--set", "slow_steps=1" + 20 * "0"], 2, "slow_steps must be a finite number"),
        (["run", "rot-mnist", "er", "--log", "tensorbord:x"], 2, "unknown logger 'tensorbord': did you mean"),
        (["run", "rot-mnist", "er", "--log", "tensorboard"], 2, "does not say where to log: write tensorboard:WHERE"),
        (["run", "rot-mnist", "sgd", "--set", "regularizer.temperature=1"], 2, "sgd has no regularizer"),
        (["run", "rot-mnist", "mse", "--buffer-size", "0"], 2, "buffer size must be a whole number of at least 1"),
        (["run", "rot-mnist", "mse", "--buffer-size", "-5"], 2, "buffer size must be a whole number of at least 1"),
        (["run", "rot-mnist", "mse", "--precision", "float16"], 2, "unknown precision 'float16'"),
        (["run", "rot-mnist", "mse", "--device", "tpu"], 2, "unknown device 'tpu'"),
        (["run", "rot-mnist", "mse", "--set", "model=resnet"], 2, "unknown model 'resnet': did you mean 'resnet18'?"),
        (["run", "seq-mnist", "mse", "--tasks", "3"], 2, "10 classes cannot be split into 3 equal tasks"),
        (["run", "rot-mnist", "mse", "--plugin", "no_such_module"], 1, "plugin 'no_such_module' could not be imported"),
        (["run", "rot-mnist", "mse", "--plugin", ""], 2, "'' is not the name of a Python module"),
        (["run", "rot-mnist", "mse", "--threads", "100000"], 2, "--threads"),
        (["run", "rot-mnist", "mse", "--set", "lr=1e308"], 2, "lr must be a finite number of at least 0 that float32"),
        (["run", "rot-mnist", "mse", "--buffer-size", str(10**30)], 2, "buffer size must be a whole number"),
        (["run", "rot-mnist", "mse", "--set", "batch_size=1e30"], 2, "batch size must be a whole number"),
        (["run", "rot-mnist", "mse", "--device", "cpu:x"], 2, "'cpu:x' is not a device"),
        (["run", "rot-mnist", "mse", "--data", "~nosuchuser/data"], 2, "~nosuchuser/data cannot be found"),
        (["run", "rot-mnist", "sgd", "--buffer-size", "50"], 2, "method 'sgd' stores no samples: leave out --buffer"),
        (["run", "rot-mnist"], 2, "Missing argument"),
        (["run", "rot-mnist", "mse", "--no-such-option"], 2, "No such option"),
        (["list", "methodes"], 2, "did you mean 'methods'?"),
        (["data", "mnits"], 2, "unknown data set 'mnits': did you mean 'mnist'?"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_bad_usage_is_one_clear_message(holdfast, arguments, code, says):
    got, out, err = holdfast(*arguments)
    assert got == code
    assert says in " ".join(err.split())
    assert out == ""
    assert "Traceback" not in err


def test_ctrl_c_is_told_by_every_command(holdfast, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.run.make_benchmark", stop)
    code, out, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert (code, out, err) == (130, "", "stopped.\n")


def test_standard_error_has_no_empty_lines_where_it_is_a_file(holdfast):
    _, _, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert "" not in err.rstrip("\n").split("\n")


def test_a_target_of_log_is_checked_also_where_the_result_is_there(holdfast):
    holdfast("run", "rot-mnist", "mse", *QUICK)
    code, _, err = holdfast("run", "rot-mnist", "mse", *QUICK, "--log", "nonsense")
    assert code == 2
    assert "unknown logger 'nonsense'" in err


def test_a_loss_that_is_not_finite_names_step_task_and_terms(holdfast, tmp_path):
    code, _, err = holdfast("run", "rot-mnist", "mse", *QUICK, "--set", "lr=1e6")
    assert code == 1
    assert "no longer finite at step" in err
    assert "task 1" in err
    assert "consistency" in err
    assert not list((tmp_path / "runs").iterdir())


def test_an_output_folder_that_cannot_be_written_is_found_out_before_training(holdfast, tmp_path):
    (tmp_path / "taken").write_text("a file")
    code, _, err = holdfast("run", "rot-mnist", "mse", "--out", "taken")
    assert code == 1
    assert "nothing can be written to taken" in err


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_finished_run_on_a_full_disk_is_saved_elsewhere(holdfast, tmp_path, monkeypatch):
    """Hours of training must not be lost for want of room at their end."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "elsewhere"))
    write = results._write
    monkeypatch.setattr(results, "_write", lambda result, out: full() if out.name == "runs" else write(result, out))
    code, out, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert code == 1
    assert "accuracy (%)" in out
    assert "the result could not be written to runs: No space left on device" in err
    (folder,) = (tmp_path / "elsewhere").glob("*/*")
    assert f"saved to {folder} instead; move it to runs" in err
    assert results.read(folder, tensors=True).weights


def test_a_finished_run_that_can_be_saved_nowhere_prints_its_numbers(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(results, "_write", full)
    code, out, err = holdfast("run", "rot-mnist", "mse", *QUICK, "--json")
    assert code == 1
    assert 0 <= json.loads(out)["accuracy"] <= 100
    assert "could not be saved anywhere" in err
    assert list(tmp_path.glob("holdfast-*")) == []


def test_a_folder_for_results_that_is_gone_at_the_end_is_made_anew(holdfast, tmp_path, monkeypatch):
    save = results.save

    def gone(result, out):
        shutil.rmtree(out)
        return save(result, out)

    monkeypatch.setattr(results, "save", gone)
    assert holdfast("run", "rot-mnist", "mse", *QUICK, "--out", "some/where")[0] == 0
    assert len(list((tmp_path / "some" / "where").glob("*/result.json"))) == 1


def test_output_that_cannot_be_written():
    with Path("/dev/full").open("w") as device:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "list"], stdout=device, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be used: No space left on device.\n"


def test_output_that_is_closed(tmp_path):
    command, errors = [sys.executable, "-m", "holdfast", "list"], tmp_path / "errors"
    done = subprocess.run(["sh", "-c", f'"$@" >&- 2>{errors}', "sh", *command])
    assert (done.returncode, errors.read_text()) == (0, "")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ..."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_too_little_memory(holdfast, monkeypatch, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr("holdfast.cli.run.run", run)
    code, _, err = holdfast("run", "rot-mnist", "mse", *QUICK)
    assert code == 1
    assert "there is not enough memory" in err
    assert "Choose a smaller buffer, batch or network" in err


def test_data_that_is_not_there_says_which_file_to_put_where(holdfast, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    waited = []
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=waited.append))  # 6 seconds between its four attempts
    code, _, err = holdfast("run", "seq-cifar10", "er", "--data", str(tmp_path / "data"))
    assert (code, len(waited)) == (1, 3)
    assert "cifar-10-python.tar.gz" in err
    assert str(tmp_path / "data") in "".join(err.split())
    assert "Traceback" not in err


def test_altered_data_is_refused(holdfast, tmp_path):
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"altered")
    code, _, err = holdfast("run", "seq-cifar10", "er", "--data", str(tmp_path / "data"))
    assert code == 1
    assert "checksum" in err


@pytest.mark.parametrize("command", ["run strange er", "run rot-mnist strange --resume", "reproduce strange"])
def test_a_name_that_a_plugin_may_have(holdfast, tmp_path, monkeypatch, command):
    code, _, err = holdfast(*command.split())
    assert code == 2
    assert "unknown" in err
    assert " If a plugin has it, name its module: --plugin MODULE." in " ".join(err.split())
    assert "--plugin" not in holdfast(*command.split(), "--plugin", "json")[2], "that is not what is wrong"


def test_what_a_plugin_registers_is_listed_and_run(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(REGULARIZERS, "_entries", dict(REGULARIZERS._entries))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_plugin.py").write_text(
        "import torch, holdfast as hf\n"
        "@hf.REGULARIZERS.register('huber-test', 'Huber distance')\n"
        "def huber(current, stored):\n"
        "    return torch.nn.functional.huber_loss(current, stored)\n"
    )
    code, listed, _ = holdfast("list", "methods", "--plugin", "my_plugin")
    assert code == 0
    assert "huber-test" in listed
    code, told, _ = holdfast("run", "rot-mnist", "huber-test", "--plugin", "my_plugin", *QUICK, "--json")
    assert sys.modules.pop("my_plugin").__file__ == str(tmp_path / "my_plugin.py")
    assert code == 0
    assert json.loads(told)["method"] == "huber-test"


def test_list_and_data_show_everything(holdfast, tmp_path):
    _, listed, _ = holdfast("list")
    for name in ("seq-tinyimagenet", "mnist-360", "barlow", "joint", "er-ace", "derpp"):
        assert name in listed
    assert "named below" not in listed, "a list of sources belongs below a table of results"
    code, shown, _ = holdfast("data", "--data", str(tmp_path))
    assert code == 0
    assert "bundled" in shown
    assert "missing" in shown


def test_list_and_data_as_json(holdfast, tmp_path):
    code, out, _ = holdfast("list", "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told) == {"benchmarks", "methods", "experiments"}
    assert {"name": "derpp", "about": "another name for mse"} in told["methods"]
    (calibration,) = [one for one in told["experiments"] if one["name"] == "calibration"]
    assert calibration["also"] == ["figure4", "figure7"]
    assert set(json.loads(holdfast("list", "methods", "--json")[1])) == {"methods"}
    code, out, _ = holdfast("data", "--data", str(tmp_path), "--json")
    told = json.loads(out)
    assert (code, told["root"]) == (0, str(tmp_path))
    assert (told["datasets"]["mnist"]["state"], told["datasets"]["cifar10"]["state"]) == ("bundled", "missing")


def test_demo_compares_and_draws(holdfast, tmp_path):
    code, out, _ = holdfast("demo", "--tasks", "2", "--train-limit", "300")
    assert code == 0
    for method in ("sgd", "er", "l2", "mse"):
        assert method in out
    picture = tmp_path / "holdfast-demo" / "accuracy-over-tasks.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_of_a_single_task(holdfast, tmp_path):
    code, _, err = holdfast("demo", "--tasks", "1", "--train-limit", "100")
    assert code == 0, err
    assert (tmp_path / "holdfast-demo" / "accuracy-over-tasks.svg").exists()


def help_of(*command):
    """What --help prints in a terminal of 80 columns."""
    shown = CliRunner().invoke(app, [*command, "--help"], prog_name="holdfast", env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    return shown.stdout


def test_help_is_whole_sentences_and_words_for_people():
    from click import Context
    from typer.main import get_command

    command = get_command(app)
    for name in (None, *command.list_commands(Context(command))):
        shown = help_of(*([name] if name else []))
        assert "<" not in shown.replace("<=", ""), f"{name}: a type of Python's"
        assert "{" not in shown, name
        commands = shown.partition("Commands:")[2]
        assert all(line.endswith(".") and not line.endswith("...") for line in commands.split("\n") if line), commands


def test_commands_come_in_the_order_in_which_they_are_needed():
    shown = help_of().partition("Commands:")[2]
    assert [line.split()[0] for line in shown.strip().splitlines()][:5] == ["demo", "run", "list", "data", "reproduce"]
    assert "Usage: holdfast run [OPTIONS] BENCHMARK METHOD\n" in help_of("run")


def test_a_long_run_is_announced(holdfast, monkeypatch):
    """Before anything is fetched or trained; here the data is not there."""
    monkeypatch.setattr("holdfast.cli.run.make_benchmark", lambda *_: full())
    _, _, err = holdfast("run", "seq-cifar10", "mse", "--device", "cpu")
    assert "this run takes about 3.7 days on one core of a server; see --resume" in err
    _, _, err = holdfast("run", "rot-mnist", "mse", "--device", "cpu")
    assert "takes about" not in err


@pytest.mark.parametrize("has", [True, False], ids=["has", "lacks"])
def test_a_processor_without_bfloat16_is_announced(holdfast, monkeypatch, has):
    """The presets of images are for GPUs."""
    monkeypatch.setattr("holdfast.cli.run.make_benchmark", lambda *_: full())
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    _, _, err = holdfast("run", "seq-cifar10", "mse", "--device", "cpu")
    assert ("ten times as long as with --precision float32" in err) is not has
    _, _, err = holdfast("run", "seq-cifar10", "mse", "--device", "cpu", "--precision", "float32")
    assert "bfloat16" not in err


STORED = Path(__file__).parent.parent / "results" / "mnist-360"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["list"], rb"mnist-360"),
        (["run", "rot-mnist", "mse", "--tasks", "1", "--set", "train_limit=100"], rb"accuracy"),
        (["demo", "--tasks", "1", "--train-limit", "100"], rb"mse"),
        (
            ["report", str(STORED), "--format", "markdown", "--experiment", "table1"],
            rb"\d\d\.\d\d \+- \d\.\d\d \(\d+\)",
        ),
    ],
    ids=["list", "run", "demo", "report"],
)
def test_a_terminal_without_our_signs_gets_others(holdfast, monkeypatch, command, says):
    """As Python makes its streams where the locale or PYTHONIOENCODING says ASCII."""
    said = [io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", said[0])
    monkeypatch.setattr(sys, "stderr", said[1])
    assert holdfast(*command)[0] == 0
    assert all(each.buffer.getvalue().isascii() for each in said)
    assert re.search(says, said[0].buffer.getvalue())


def test_names_of_files_cannot_steer_the_terminal(holdfast, tmp_path):
    folder = tmp_path / os.fsdecode(b"runs\x1b]0;owned\x07\xff")
    folder.mkdir()
    for name in (b"cut\x1b[2J\xfe.json", b"[red]x.json"):
        (folder / os.fsdecode(name)).write_text("{")
    command = [sys.executable, "-m", "holdfast", "report", folder]
    done = subprocess.run(command, env={**os.environ, "COLUMNS": "200"}, capture_output=True)
    assert rb"cut\x1b[2J\udcfe.json" in done.stderr
    for code, out, err in (
        (done.returncode, done.stdout.decode(), done.stderr.decode()),
        holdfast("analyze", str(folder)),
    ):
        assert code == 1
        assert "\x1b" not in out + err
        assert "Traceback" not in err
        assert r"runs\x1b]0;owned" in err


def test_version(holdfast):
    assert holdfast("--version")[1].strip().count(".") == 2
