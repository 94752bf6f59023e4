"""Results: whole or not at all, and read back as they were written."""

import contextlib
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast import results
from holdfast.cli import main
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.results import RunResult, environment, find, read, read_tensors, save

NAN = math.nan
CONFIG = RunConfig.preset("rot-mnist", "simclr", buffer_size=200, seed=3, tasks=3).parse(
    ["regularizer.temperature=0.1"]
)


def result(config: RunConfig = CONFIG, shift: float = 0.0) -> RunResult:
    draw = torch.Generator().manual_seed(0)
    return RunResult(
        config=config,
        matrix=torch.tensor(
            [[90.0, 20.0, NAN], [70.0, 80.0, 100 / 3], [60.0, 85.0, 95.0 + shift]], dtype=torch.float64
        ),
        task_matrix=torch.tensor([[90.0, 20.0, NAN], [70.0, 80.0, 30.0], [61.0, 86.0, 96.0]], dtype=torch.float64),
        untrained=torch.tensor([10.0, 15.0, 5.0], dtype=torch.float64),
        seconds=12.5,
        timing={"training": 10.25, "steps": 7},
        environment={"torch": "2", "commit": None},
        logits={"logits.0": torch.randn(4, 10, generator=draw), "labels.0": torch.tensor([1, 2, 3, 4])},
        weights={"hidden.weight": torch.randn(3, 2, generator=draw), "count": torch.tensor(5)},
    )


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_round_trip(tmp_path):
    written = result()
    folder = save(written, tmp_path / "deep" / "out")
    assert folder == tmp_path / "deep" / "out" / CONFIG.fingerprint
    back = read(folder, tensors=True)
    assert back.config == CONFIG
    for name in ("matrix", "task_matrix", "untrained"):
        torch.testing.assert_close(getattr(back, name), getattr(written, name), rtol=0, atol=1e-9, equal_nan=True)
    assert back.seconds == 12.5
    assert back.timing == written.timing
    assert back.environment == written.environment
    for name in ("logits", "weights"):
        mine, theirs = getattr(back, name), getattr(written, name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
    for name in ("accuracy", "task_il_accuracy", "forward_transfer", "backward_transfer", "forgetting"):
        assert getattr(back, name) == pytest.approx(getattr(written, name))


def test_whole_seconds_are_a_number_like_others():
    values = result().to_json() | {"seconds": 12}
    assert isinstance(RunResult.from_json(values).seconds, float)


def test_logits_are_read_without_the_weights(tmp_path):
    folder = save(result(), tmp_path)
    (folder / "weights.safetensors").write_text("damaged")
    assert read_tensors(folder, results.LOGITS).keys() == result().logits.keys()
    with pytest.raises(HoldfastError, match=r"weights\.safetensors is not readable"):
        read_tensors(folder, results.WEIGHTS)
    (folder / "weights.safetensors").unlink()
    assert read_tensors(folder, results.WEIGHTS) == {}


def test_without_tensors_nothing_large_is_read(tmp_path):
    back = read(save(result(), tmp_path))
    assert back.logits == {}
    assert back.weights == {}


def test_result_json_is_strict_json_with_what_was_promised(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (save(result(), tmp_path) / "result.json").read_text("utf-8")
    values = json.loads(text, parse_constant=refuse)
    assert values["accuracy_matrix"][0] == [90.0, 20.0, None]
    assert {
        "benchmark": "rot-mnist",
        "method": "simclr",
        "buffer_size": 200,
        "seed": 3,
        "accuracy": 80.0,
        "backward_transfer": -12.5,
        "forgetting": 15.0,
        "seconds": 12.5,
        "fingerprint": CONFIG.fingerprint,
    }.items() <= values.items()
    assert values["forward_transfer"] == pytest.approx((5 + 100 / 3 - 5) / 2)
    assert values["config"]["options"] == {"temperature": 0.1}


def test_metrics_that_are_not_defined_are_null(tmp_path):
    one = torch.tensor([[50.0]], dtype=torch.float64)
    single = RunResult(CONFIG, one, one, torch.tensor([10.0], dtype=torch.float64), 1.0)
    folder = save(single, tmp_path)
    values = json.loads((folder / "result.json").read_text())
    assert values["accuracy"] == 50.0
    assert values["forward_transfer"] is values["backward_transfer"] is values["forgetting"] is None
    assert math.isnan(read(folder).forgetting)
    assert listing(folder) == ["result.json"]


def test_second_save_replaces_the_first(tmp_path):
    save(result(), tmp_path)
    folder = save(result(shift=-3.0), tmp_path)
    assert read(folder).accuracy == pytest.approx(79.0)
    assert listing(tmp_path) == sorted(
        [
            folder.name,
            *(f"{folder.name}/{name}" for name in ("logits.safetensors", "result.json", "weights.safetensors")),
        ]
    )


def test_two_who_save_one_run_at_once_both_succeed(tmp_path):
    def often():
        for _ in range(30):
            try:
                save(result(), tmp_path)
            except HoldfastError as error:
                failed.append(error)

    failed: list[HoldfastError] = []
    both = [threading.Thread(target=often) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert failed == []
    assert find(tmp_path, CONFIG).accuracy == 80.0
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG.fingerprint]


def test_others_may_read_what_was_saved(tmp_path):
    folder = save(result(), tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) & 0o555 == 0o555
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path.name


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("place", ["save_file", "write_text", "flush", "rename"])
def test_failure_while_writing_leaves_what_was_there_before(tmp_path, monkeypatch, place, earlier):
    if earlier:
        save(result(), tmp_path)
    before = listing(tmp_path)

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if place == "rename":
        monkeypatch.setattr(Path, "rename", fail)
        monkeypatch.setattr(Path, "replace", fail)
    elif place == "write_text":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(results, place, fail)
    with pytest.raises(HoldfastError, match=r"could not be written to .*: No space left on device"):
        save(result(shift=-3.0), tmp_path)
    monkeypatch.undo()
    assert listing(tmp_path) == before
    found = find(tmp_path, CONFIG)
    assert (found.accuracy if found else None) == (80.0 if earlier else None)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(12))
def test_killed_at_any_step_while_replacing_a_result_leaves_one(tmp_path, monkeypatch, step):
    """The old result was moved away before the new one had its name: killed in between, there was none."""
    save(result(), tmp_path)
    left = [step]

    def dying(act):
        def perform(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return act(*args, **kwargs)

        return perform

    for name in ("rename", "replace", "unlink", "rmdir", "write_text"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # the dead do not tidy up
    with contextlib.suppress(Killed):
        save(result(shift=-3.0), tmp_path)
    monkeypatch.undo()
    found = find(tmp_path, CONFIG)
    assert found is not None
    assert found.accuracy == pytest.approx(80.0) or found.accuracy == pytest.approx(79.0)
    assert results.read(tmp_path / CONFIG.fingerprint, tensors=True).logits


def test_what_was_computed_from_an_old_result_goes_with_it(tmp_path):
    folder = save(result(), tmp_path)
    (folder / "measures.json").write_text('{"mra": 3.0}')
    (folder / "analysis" / "figures").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    save(replace(result(shift=-3.0), weights={}), tmp_path)
    assert listing(folder) == ["logits.safetensors", "result.json"]


def test_files_and_folders_are_on_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(results, "flush", lambda path, *flags: happened.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *args: happened.append("rename") or rename(*args))
    folder = save(result(), tmp_path / "out")
    scratch, done, outer = happened[-3:]
    assert sorted(happened[:-3]) == ["logits.safetensors", "result.json", "weights.safetensors"]
    assert scratch.startswith(f".{folder.name}-")
    assert (done, outer) == ("rename", "out")
    happened.clear()
    save(result(), tmp_path / "out")
    assert happened[-2:] == [folder.name, "out"]


def test_scratch_folders_of_killed_processes_are_removed_in_time(tmp_path):
    old, young = tmp_path / ".0123456789abcdef-killed", tmp_path / ".0123456789abcdef-writing"
    mine = tmp_path / ".git"
    for folder in (old, young, mine):
        folder.mkdir()
        (folder / "weights.safetensors").write_text("half")
    for folder in (old, mine):
        os.utime(folder, (1, 1))
    save(result(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([young.name, mine.name, CONFIG.fingerprint])


def test_failure_inside_safetensors_is_told_like_any_other(tmp_path, monkeypatch):
    """It has an error class of its own, which is no OSError."""
    original = results.save_file
    monkeypatch.setattr(
        results, "save_file", lambda tensors, path: original(tensors, tmp_path / "no" / "such" / "folder")
    )
    with pytest.raises(HoldfastError, match="could not be written"):
        save(result(), tmp_path / "out")
    assert listing(tmp_path) == ["out"]


def test_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(result(), tmp_path)
    assert listing(tmp_path) == []


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(HoldfastError, match=r"could not be written to .*out.* --out"):
        save(result(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HoldfastError, match="Permission denied"):
            save(result(), tmp_path)
    finally:
        tmp_path.chmod(0o755)


def test_missing_result(tmp_path):
    with pytest.raises(HoldfastError, match="holds no result"):
        read(tmp_path)
    with pytest.raises(HoldfastError, match="holds no result"):
        read(tmp_path / "nowhere")


def change(**values):
    return lambda text: json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "3",
        lambda text: "{}",
        lambda text: '"\\ud800"',
        change(config={}),
        change(config=None),
        change(config={**CONFIG.to_dict(), "options": ["temperature"]}),
        change(config={**CONFIG.to_dict(), "colour": "blue"}),
        change(config={**CONFIG.to_dict(), "buffer_size": 0}),
        change(accuracy_matrix=[[1.0, 2.0], [3.0]]),
        change(accuracy_matrix=[["high"]]),
        change(timing=None),
        change(timing={"steps": 10**400}),
        change(seconds="long"),
        change(seconds=-1),
        change(seconds=True),
        change(seconds=10**400),
        change(accuracy_matrix=[[90.0, 20.0, None], [70.0, 80.0, 33.0], [None, None, None]]),
        change(accuracy_matrix=[[90.0, 20.0, None], [70.0, 80.0, 33.0], [-50.0, 20.0, 30.0]]),
        change(task_il_matrix=[[90.0, 20.0, None], [70.0, 80.0, 33.0], [50.0, 20.0, 101.0]]),
        change(untrained=[10.0, 15.0, -1]),
        change(untrained=[10.0, 15.0, 10**400]),
        change(environment={"device": "\ud800"}),
        change(environment={"device": ["cpu"]}),
        change(config={**CONFIG.to_dict(), "model": "\udcff"}),
        change(config={**CONFIG.to_dict(), "epochs": 10**400}),
        change(config={**CONFIG.to_dict(), "lr": 10**400}),
        lambda text: text.replace('"seconds": 12.5', '"seconds": Infinity'),
        lambda text: text.replace('"seconds": 12.5', '"seconds": NaN'),
        lambda text: text.replace('"timing"', '"times"'),
    ],
)
def test_damaged_json(tmp_path, damage):
    folder = save(result(), tmp_path)
    path = folder / "result.json"
    path.write_text(damage(path.read_text("utf-8")), "utf-8")
    with pytest.raises(HoldfastError, match=r"result\.json is not a readable result"):
        read(folder)
    with pytest.raises(HoldfastError):
        find(tmp_path, CONFIG)


@pytest.fixture
def patience():
    """Ends a test that waits."""

    def stop(_signal, _frame):
        raise TimeoutError("the reader waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("make", [fifo, device, Path.mkdir])
@pytest.mark.parametrize("name", ["result.json", "logits.safetensors", "weights.safetensors"])
def test_only_regular_files_are_read(tmp_path, make, name):
    folder = save(result(), tmp_path)
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(HoldfastError, match=f"{name} is not .*(regular file|directory)"):
        read(folder, tensors=True)


def test_a_file_of_any_size_is_not_read(tmp_path, monkeypatch):
    folder = save(result(), tmp_path)
    with (folder / "result.json").open("r+") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(HoldfastError, match="larger than 64 MiB"):
        read(folder)


def test_bytes_that_are_no_text(tmp_path):
    folder = save(result(), tmp_path)
    (folder / "result.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(HoldfastError, match="not a readable result"):
        read(folder)


@pytest.mark.parametrize("name", ["logits.safetensors", "weights.safetensors"])
def test_damaged_tensors(tmp_path, name):
    folder = save(result(), tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-5])
    with pytest.raises(HoldfastError, match=f"{name} is not readable"):
        read(folder, tensors=True)
    assert read(folder).accuracy == pytest.approx(80.0)  # the numbers are still there


def test_a_result_without_timing_can_be_shown(tmp_path, monkeypatch, capsys):
    """`run` of a finished run ended in a KeyError."""
    config = RunConfig.preset("rot-mnist", "er", tasks=3)
    save(replace(result(config), timing={}), tmp_path)
    monkeypatch.setattr("sys.argv", ["holdfast", "run", "rot-mnist", "er", "--tasks", "3", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "80.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"protocol": 99}, "of protocol 99; this version computes protocol"),
        ({"config": {**CONFIG.to_dict(), "lr": 9.0}}, "do not belong to its fingerprint"),
        ({"config": {**CONFIG.to_dict(), "warmth": 3}}, "warmth. A newer version may know them"),
    ],
)
def test_results_of_another_computation_or_version_are_refused(tmp_path, values, reason):
    """Only a report refused them: of two results with one config, `analyze` took the one of another protocol."""
    folder = save(result(), tmp_path)
    path = folder / "result.json"
    path.write_text(change(**values)(path.read_text("utf-8")), "utf-8")
    with pytest.raises(HoldfastError, match=reason):
        read(folder)


def test_find_goes_by_fingerprint(tmp_path):
    other = CONFIG.change(seed=4)
    save(result(), tmp_path)
    save(result(other, shift=-3.0), tmp_path)
    assert find(tmp_path, CONFIG).accuracy == pytest.approx(80.0)
    assert find(tmp_path, other).accuracy == pytest.approx(79.0)
    assert find(tmp_path, CONFIG.change(lr=0.5)) is None
    assert find(tmp_path / "nowhere", CONFIG) is None


def test_environment_is_plain_and_tells_the_versions():
    record = environment(torch.device("cpu"))
    assert json.loads(json.dumps(record)) == record
    assert record["torch"] == torch.__version__
    assert record["device_type"] == "cpu"
    assert record["threads"] == torch.get_num_threads()


def test_the_commit_is_that_of_the_files_or_says_that_they_differ(tmp_path, monkeypatch):
    package = tmp_path / "src" / "holdfast"
    package.mkdir(parents=True)
    module = package / "results.py"
    module.write_text("a = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setattr(results, "__file__", str(module))

    def commit():
        results._commit.cache_clear()
        return results._commit()

    try:
        assert commit() is None
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *command], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        assert commit() == head
        (tmp_path / "notes").write_text("what is elsewhere does not matter")
        assert commit() == head
        module.write_text("a = 2\n")
        assert commit() == f"{head}-dirty"
    finally:
        results._commit.cache_clear()
