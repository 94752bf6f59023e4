"""Sweeps: nothing twice, nothing lost, nothing half; whatever fails, dies or is pulled away."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forked import ended, forked, trains_in_a_fork
from holdfast import checkpoint, results
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.experiments import Results, load_results
from holdfast.regularizers import REGULARIZERS
from holdfast.run_state import Checkpointer
from holdfast.sweep import Event, Job, ProcessRunner, forecast, local_runner, sweep
from holdfast.sweep.fleets import FleetRunner
from holdfast.sweep.leases import HEARTBEAT, SILENCE, Leases
from holdfast.sweep.runner import carry_out, checkpoint_path, failure, throttled
from holdfast.training import run
from holdfast.workload import expected_seconds


def tiny(seed: int = 0, **changes) -> RunConfig:
    return RunConfig.preset("rot-mnist", "mse", buffer_size=20, seed=seed, tasks=2, train_limit=300).change(**changes)


HOPELESS = tiny(lr=1e30)
GRID = [tiny(seed) for seed in range(4)]


def inline(configs, job, emit):
    """The simplest runner: one run after the other, here."""
    for config in configs:
        if config is None:
            time.sleep(0.05)
            emit(None)
            continue
        emit(Event("started", config))
        try:
            carry_out(config, job)
        except HoldfastError as error:
            emit(failure(config, error))
        else:
            emit(Event("done", config, 1.0))


def matrices(out: Path) -> dict[str, torch.Tensor]:
    return {stored.config.fingerprint: stored.result.matrix for stored in load_results(out)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[key].nan_to_num(-1.0), second[key].nan_to_num(-1.0)) for key in first
    )


def leftovers(out: Path) -> list[str]:
    """Whatever is in the folder beside results and failures."""
    found = [str(path.relative_to(out)) for path in (*out.glob(".*"), *out.glob(".*/*")) if path.name != ".leases"]
    return sorted(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The grid's results, from a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    summary = sweep(GRID, out, runner=inline)
    assert summary.done == GRID
    return matrices(out)


def test_results_are_those_of_single_runs(tmp_path, undisturbed):
    config = GRID[1]
    results.save(run(config), tmp_path)
    assert torch.equal(undisturbed[config.fingerprint].nan_to_num(), results.find(tmp_path, config).matrix.nan_to_num())


def test_finished_runs_are_skipped_and_nothing_is_left_behind(tmp_path, undisturbed):
    events = []
    first = sweep(GRID[:2], tmp_path, runner=inline, watch=events.append)
    assert [(event.kind, event.config) for event in events] == [
        (kind, config) for config in GRID[:2] for kind in ("started", "done")
    ]
    again = sweep([*GRID[:3], GRID[0]], tmp_path, runner=inline)
    assert (first.done, again.done, again.there) == (GRID[:2], GRID[2:3], GRID[:2])
    assert leftovers(tmp_path) == []


def test_results_elsewhere_count_as_there(tmp_path):
    sweep(GRID[:1], tmp_path / "a", runner=inline)
    summary = sweep(GRID[:1], tmp_path / "b", runner=inline, there=load_results(tmp_path / "a"))
    assert (summary.done, summary.there) == ([], GRID[:1])


def test_failure_is_recorded_and_tried_again(tmp_path):
    summary = sweep([HOPELESS, GRID[0]], tmp_path, runner=inline)
    assert summary.done == [GRID[0]]
    assert "no longer finite" in summary.failed[HOPELESS]
    record = json.loads((tmp_path / "failed" / f"{HOPELESS.fingerprint}.json").read_text())
    assert RunConfig.from_dict(record["config"]) == HOPELESS
    assert record["error"] == summary.failed[HOPELESS]
    assert load_results(tmp_path).skipped == []
    again = sweep([HOPELESS, GRID[0]], tmp_path, runner=inline)
    assert list(again.failed) == [HOPELESS]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("runner", [inline, ProcessRunner(1), FleetRunner(2)], ids=["inline", "processes", "fleet"])
@pytest.mark.usefixtures("quick_workers")
def test_a_run_that_diverged_is_told_from_one_that_failed_otherwise(tmp_path, runner):
    failed = {}

    def watch(event):
        if event.kind == "failed":
            failed[event.config] = event.diverged

    sweep([HOPELESS, tiny(model="resnet81")], tmp_path, runner=runner, device="cpu", watch=watch)
    assert failed == {HOPELESS: True, tiny(model="resnet81"): False}


def test_success_removes_the_record_of_a_failure(tmp_path):
    (tmp_path / "failed").mkdir()
    record = tmp_path / "failed" / f"{GRID[0].fingerprint}.json"
    record.write_text("{}")
    os.utime(record, (1, 1))
    assert sweep(GRID[:1], tmp_path, runner=inline).done == GRID[:1]
    assert not record.exists()


@pytest.mark.parametrize("ahead", [60, 9e6])
def test_a_record_of_a_failure_that_is_dated_ahead_does_not_block_the_run(tmp_path, ahead):
    (tmp_path / "failed").mkdir()
    record = tmp_path / "failed" / f"{GRID[0].fingerprint}.json"
    record.write_text("{}")
    os.utime(record, (time.time() + ahead,) * 2)
    assert sweep(GRID[:1], tmp_path, runner=inline).done == GRID[:1]
    assert not record.exists()


def test_damaged_result_is_told_and_not_overwritten(tmp_path):
    path = tmp_path / GRID[0].fingerprint / "result.json"
    path.parent.mkdir()
    path.write_text("{ half of i")
    summary = sweep(GRID[:1], tmp_path, runner=inline, there=load_results(tmp_path))
    assert (summary.done, summary.there) == ([], [])
    assert "move it away" in summary.failed[GRID[0]]
    assert path.read_text() == "{ half of i"


def test_interruption_keeps_what_is_finished(tmp_path, undisturbed):
    def press_ctrl_c(event):
        if event.kind == "started" and event.config == GRID[1]:
            raise KeyboardInterrupt

    summary = sweep(GRID, tmp_path, runner=inline, watch=press_ctrl_c)
    assert summary.interrupted
    assert (summary.done, summary.left) == (GRID[:1], 3)
    assert leftovers(tmp_path) == []
    sweep(GRID, tmp_path, runner=inline)
    assert same(matrices(tmp_path), undisturbed)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(HoldfastError, match="nothing can be written"):
        sweep(GRID, tmp_path / "out", runner=inline)


# --- leases


def test_leases_exclude_each_other(tmp_path):
    mine, theirs = Leases(tmp_path), Leases(tmp_path)
    assert mine.acquire(GRID[0])
    assert not theirs.acquire(GRID[0])
    assert theirs.acquire(GRID[1])
    mine.release(GRID[0])
    assert theirs.acquire(GRID[0])
    assert (mine.mine(), theirs.mine()) == ([], [GRID[1], GRID[0]])


def lease(folder: Path, config: RunConfig, text: str, age: float = 0.0) -> Path:
    path = folder / ".leases" / config.fingerprint
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age,) * 2)
    return path


def someone(pid: int, host: str | None = None, started: str | None = None) -> str:
    return json.dumps({"pid": pid, "host": host or socket.gethostname(), "started": started})


@pytest.mark.parametrize(
    ("text", "age", "abandoned"),
    [
        (someone(os.getpid()), 9e9, False),
        (someone(os.getpid(), started="1"), 0, True),  # the number belongs to a later process
        (someone(2**22 + 1), 0, True),
        (someone(1), 0, False),
        (someone(2**22 + 1, "elsewhere"), 0, False),
        (someone(2**22 + 1, "elsewhere"), SILENCE + 1, True),
        (someone(2**22 + 1, "elsewhere"), -60, False),  # clocks differ a little
        (someone(2**22 + 1, "elsewhere"), -SILENCE - 60, True),
        (someone(0), 0, True),
        (someone(-1), 0, True),
        ("", 0, False),  # about to be written
        ("", 60, True),
        ("", -9e6, True),
        ("[]", 60, True),
    ],
    ids=[
        *("alive", "renumbered", "dead", "first", "elsewhere", "silent", "little-ahead", "far-ahead"),
        *("group", "everybody", "empty", "still-empty", "empty-ahead", "foreign"),
    ],
)
def test_leases_of_the_dead_are_taken_over(tmp_path, text, age, abandoned):
    lease(tmp_path, GRID[0], text, age)
    assert Leases(tmp_path).acquire(GRID[0]) is abandoned


def test_run_that_another_sweep_finishes_between_look_and_lease(tmp_path, monkeypatch):
    acquire = Leases.acquire

    def finish_first(self, config):
        monkeypatch.undo()
        carry_out(config, Job(tmp_path, device="cpu"))
        return acquire(self, config)

    monkeypatch.setattr(Leases, "acquire", finish_first)
    summary = sweep(GRID[:1], tmp_path, runner=inline)
    assert (summary.done, summary.there) == ([], GRID[:1])
    assert leftovers(tmp_path) == []


def test_a_full_disk_ends_the_sweep_with_a_sentence(tmp_path, monkeypatch):
    """And without an empty lease, which would block the next sweep."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("holdfast.sweep.leases.signature", full)
    with pytest.raises(HoldfastError, match=r"cannot write to .*\.leases: No space left on device\. Make room"):
        sweep(GRID[:1], tmp_path, runner=inline)
    assert leftovers(tmp_path) == []


def test_signs_of_life(tmp_path):
    leases = Leases(tmp_path)
    leases.acquire(GRID[0])
    path = lease(tmp_path, GRID[0], someone(os.getpid()), age=1000)
    leases.renew()
    assert time.time() - path.stat().st_mtime > 900, "too early for another sign"
    leases._renewed -= 2 * HEARTBEAT
    leases.renew()
    assert time.time() - path.stat().st_mtime < 100


def test_lease_left_on_a_finished_run_is_removed(tmp_path):
    sweep(GRID[:1], tmp_path, runner=inline)
    lease(tmp_path, GRID[0], someone(2**22 + 1))
    sweep(GRID[:1], tmp_path, runner=inline)
    assert leftovers(tmp_path) == []


def test_scratch_of_a_killed_save_is_removed(tmp_path):
    (tmp_path / f".{GRID[0].fingerprint}-abc").mkdir(parents=True)
    (tmp_path / f".{GRID[0].fingerprint}-abc" / "result.json").write_text("{")
    (tmp_path / f".{GRID[1].fingerprint}-abc").mkdir()  # may be somebody's who is saving right now
    sweep(GRID[:1], tmp_path, runner=inline)
    assert leftovers(tmp_path) == [f".{GRID[1].fingerprint}-abc"]


# --- several processes


def child(out: Path, grid: list[RunConfig]) -> int:
    """A sweep in a process of its own; its number."""

    def carry_out_all():
        summary = sweep(grid, out, runner=inline)
        (out / f"log-{os.getpid()}.md").write_text(json.dumps([config.seed for config in summary.done]))

    return forked(carry_out_all)


@trains_in_a_fork
def test_two_sweeps_share_a_folder(tmp_path, undisturbed):
    children = [child(tmp_path, GRID) for _ in range(2)]
    assert ended(children) == [0, 0]
    shares = [json.loads((tmp_path / f"log-{number}.md").read_text()) for number in children]
    assert sorted(shares[0] + shares[1]) == [0, 1, 2, 3]
    assert all(shares)
    assert same(matrices(tmp_path), undisturbed)
    assert leftovers(tmp_path) == []


def test_failure_in_another_sweep_is_not_tried_twice(tmp_path):
    """A second sweep waits for the first one's run, and takes its failure as it is."""
    lease(tmp_path, HOPELESS, someone(os.getpid()))
    looks = []

    def other(configs, job, emit):
        for config in configs:
            assert config is None
            looks.append(config)
            (tmp_path / "failed").mkdir()
            (tmp_path / "failed" / f"{HOPELESS.fingerprint}.json").write_text('{"error": "it diverged"}')

    assert sweep([HOPELESS], tmp_path, runner=other).failed == {HOPELESS: "it diverged"}
    assert looks == [None]


@trains_in_a_fork
def test_three_kills(tmp_path, undisturbed):
    draw = random.Random(0)
    for _ in range(3):
        number = child(tmp_path, GRID)
        time.sleep(draw.uniform(0.05, 0.6))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        assert load_results(tmp_path).skipped == []
    sweep(GRID, tmp_path, runner=inline)
    assert same(matrices(tmp_path), undisturbed)
    assert leftovers(tmp_path) == []


# --- runners

DEADLY = """
import os, signal
from holdfast.regularizers import REGULARIZERS

@REGULARIZERS.register("deadly", "ends the process")
def deadly(current, stored):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes(tmp_path, undisturbed, monkeypatch):
    """Runs, a failure, the death of a worker, and Ctrl-C, in one go: processes take seconds to start."""
    (tmp_path / "deadly_plugin.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(tmp_path)
    events = []

    def watch(event):
        events.append(event)
        if event.kind == "started" and event.config == GRID[3]:
            os.kill(os.getpid(), signal.SIGINT)

    deadly = tiny(method="deadly")
    grid = [HOPELESS, deadly, *GRID[:2], GRID[3]]
    summary = sweep(grid, tmp_path / "out", runner=ProcessRunner(1), plugins=["deadly_plugin"], watch=watch)
    assert summary.done == GRID[:2]
    assert "no longer finite" in summary.failed[HOPELESS]
    assert "ended by SIGKILL" in summary.failed[deadly]
    assert (summary.interrupted, summary.left) == (True, 1)
    assert any(event.kind == "moved" and 0 < event.fraction < 1 for event in events)
    assert multiprocessing.active_children() == []
    assert leftovers(tmp_path / "out") == []
    found = matrices(tmp_path / "out")
    assert same(found, {key: undisturbed[key] for key in found})


def test_fleet(tmp_path, undisturbed):
    """The runner for GPUs, on a CPU."""
    summary = sweep([HOPELESS, *GRID[:2]], tmp_path, runner=FleetRunner(2), device="cpu")
    assert sorted(config.seed for config in summary.done) == [0, 1]
    assert list(summary.failed) == [HOPELESS]
    found = matrices(tmp_path)
    assert same(found, {key: undisturbed[key] for key in found})


def test_an_error_beside_the_steps_of_a_fleet_is_the_failure_of_the_run_at_hand(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("holdfast.sweep.fleets._Size.stepped", broken)
    summary = sweep(GRID[:2], tmp_path, runner=FleetRunner(), device="cpu")
    assert summary.failed == dict.fromkeys(GRID[:2], "RuntimeError: CUDA error: out of memory")
    record = json.loads((tmp_path / "failed" / f"{GRID[0].fingerprint}.json").read_text())
    assert "in broken" in record["trace"]


def test_a_fleet_asks_again_where_another_sweep_has_the_next_run(tmp_path, monkeypatch):
    """Not after every step, and without an end of the runs that go on."""
    monkeypatch.setattr("holdfast.sweep.runner.POLL", 0.01)
    events, asked = [], []

    def configs():
        for config in (GRID[0], None, None, GRID[1]):
            asked.append(config)
            yield config

    FleetRunner(2)(configs(), Job(tmp_path, device="cpu"), events.append)
    assert asked == [GRID[0], None, None, GRID[1]]
    assert [event.config for event in events if event and event.kind == "done"] == GRID[:2]


@pytest.fixture
def fickle():
    """A regularizer that raises what no part of Holdfast would, after a while."""
    calls = []

    def fickle(current, stored):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of luck")
        return current.sum()

    REGULARIZERS.register("fickle", "fails at its third call")(fickle)
    yield "fickle"
    del REGULARIZERS._entries["fickle"]


def test_a_run_of_a_fleet_that_raises_anything_leaves_the_others_untouched(tmp_path, undisturbed, fickle):
    bad = tiny(method=fickle)
    summary = sweep([bad, *GRID[:2]], tmp_path, runner=FleetRunner(3), device="cpu")
    assert summary.failed == {bad: "RuntimeError: out of luck"}
    found = matrices(tmp_path)
    assert len(found) == 2
    assert same(found, {key: undisturbed[key] for key in found})


def test_a_result_of_a_fleet_that_cannot_be_saved_is_that_run_s_failure(tmp_path, monkeypatch):
    saved = []

    def save(result, out):
        saved.append(result.config)
        if len(saved) == 1:
            raise HoldfastError("no space left")
        return results.save(result, out)

    monkeypatch.setattr("holdfast.sweep.runner.results", SimpleNamespace(save=save))
    summary = sweep(GRID[:3], tmp_path, runner=FleetRunner(3), device="cpu")
    assert summary.failed == {saved[0]: "no space left"}
    assert set(summary.done) == set(saved[1:]) == set(GRID[:3]) - {saved[0]}
    assert summary.left == 0


def test_a_failure_that_cannot_be_recorded_is_told(tmp_path):
    (tmp_path / "failed").write_text("a file where the records belong")
    summary = sweep([HOPELESS, GRID[0]], tmp_path, runner=inline, device="cpu")
    assert "no longer finite" in summary.failed[HOPELESS]
    assert summary.done == [GRID[0]]


def test_a_sweep_waits_for_whoever_saves_without_a_lease(tmp_path, monkeypatch):
    """`holdfast run` takes no leases; a sweep that clears away scratch folders must not take the one it is writing."""
    sweeping = []
    write = results._write

    def slow(result, out):
        folder = write(result, out)
        sweeping.append(threading.Thread(target=sweep, args=([GRID[0]], out), kwargs={"runner": inline}))
        (out / f".{GRID[0].fingerprint}-scratch").mkdir()
        shutil.rmtree(folder)  # the result is not there yet
        sweeping[0].start()
        sweeping[0].join(0.5)
        assert (out / f".{GRID[0].fingerprint}-scratch").exists()
        return write(result, out)

    result = run(GRID[0], device="cpu")
    monkeypatch.setattr(results, "_write", slow)
    results.save(result, tmp_path)
    monkeypatch.setattr(results, "_write", write)
    sweeping[0].join()


# --- stopped and continued

LONG = [tiny(seed, train_limit=3000, batch_size=8) for seed in range(2)]
"""Runs that last until a worker has told of them twice."""
SHORT = [tiny(seed, train_limit=400, batch_size=8) for seed in range(2)]
"""Enough where every step is told."""


@pytest.fixture
def grid(request, monkeypatch):
    """What a test with a ProcessRunner, or with another one, sweeps."""
    if request.param == "processes":
        return LONG
    monkeypatch.setattr("holdfast.sweep.runner.REPORT", -1.0)
    return SHORT


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """What runs give that nothing happened to, by the grid's first run."""
    found = {}
    for grid in (LONG, SHORT):
        out = tmp_path_factory.mktemp("never stopped")
        sweep(grid, out, runner=inline)
        found[grid[0]] = matrices(out)
    return found


def checkpoints(out: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in out.glob(".checkpoints/*")}


def watcher(act):
    """A watch that calls `act` once, when a run is under way; and where each run was first seen."""
    began, acted = {}, []

    def watch(event):
        if event.kind == "moved":
            began.setdefault(event.config, event.fraction)
            if event.fraction > 0.1 and not acted:
                acted.append(event.config)
                act()

    return watch, began, acted


def press(number=signal.SIGINT):
    return lambda: os.kill(os.getpid(), number)


def one_after_the_other(configs, job, emit):
    """As `inline`, and tells where runs are."""
    for config in configs:
        carry_out(config, job, throttled(emit))
        emit(Event("done", config, 1.0))


@pytest.mark.parametrize(
    ("runner", "number", "grid"),
    [
        (lambda: ProcessRunner(1), signal.SIGINT, "processes"),
        (lambda: FleetRunner(2), signal.SIGTERM, "fleet"),
    ],
    ids=["processes", "fleet"],
    indirect=["grid"],
)
@pytest.mark.usefixtures("quick_workers")
def test_runs_that_were_stopped_continue_and_give_what_they_would_have_given(
    tmp_path, never_stopped, runner, number, grid
):
    watch, _, stopped = watcher(press(number))
    summary = sweep(grid, tmp_path, runner=runner(), device="cpu", watch=watch)
    assert (summary.interrupted, summary.left, summary.done) == (True, 2, [])
    assert stopped[0].fingerprint in checkpoints(tmp_path)
    assert load_results(tmp_path).skipped == []  # nothing there is taken for a result
    assert multiprocessing.active_children() == []
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    watch, began, _ = watcher(lambda: None)
    assert sorted(sweep(grid, tmp_path, runner=runner(), device="cpu", watch=watch).done, key=str) == grid
    assert began[stopped[0]] > 0.1
    assert same(matrices(tmp_path), never_stopped[grid[0]])
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("runner", "grid"), [(ProcessRunner, "processes"), (FleetRunner, "fleet")], indirect=["grid"])
@pytest.mark.usefixtures("quick_workers")
def test_a_sweep_stops_when_its_time_is_up_and_continues(tmp_path, never_stopped, runner, grid, monkeypatch, caplog):
    moved = []
    monkeypatch.setattr("holdfast.sweep.grid._passed", lambda until: until is not None and bool(moved))

    def watch(event):
        if event.kind == "moved" and event.fraction > 0.1:
            moved.append(event.config)

    summary = sweep(grid, tmp_path, runner=runner(2), device="cpu", watch=watch, until=0.0)
    assert (summary.out_of_time, summary.interrupted, summary.left, summary.done) == (True, False, 2, [])
    assert caplog.messages == ["time is up: every run writes its state."]
    assert moved[0].fingerprint in checkpoints(tmp_path)
    assert multiprocessing.active_children() == []
    summary = sweep(grid, tmp_path, runner=FleetRunner(2), device="cpu")  # whoever wrote the states
    assert (sorted(summary.done, key=str), summary.out_of_time) == (grid, False)
    assert same(matrices(tmp_path), never_stopped[grid[0]])


@pytest.mark.parametrize("runner", [ProcessRunner, FleetRunner])
@pytest.mark.usefixtures("quick_workers")
def test_whoever_takes_the_news_is_not_interrupted(tmp_path, runner):
    """An exception in the middle of an update of a database, as a study has one, would leave it half written."""
    taken = []

    def watch(event):
        if event.kind == "moved" and not taken:
            press()()
            time.sleep(0.1)
            taken.append(event)

    assert sweep(LONG[:1], tmp_path, runner=runner(1), device="cpu", watch=watch).interrupted
    assert len(taken) == 1
    assert checkpoints(tmp_path) == {LONG[0].fingerprint}


FIRST_WORKER = """
import signal
from multiprocessing import get_context


def tell():
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))


if __name__ == "__main__":  # the worker needs nothing of it
    from holdfast.sweep.processes import _start

    process = get_context("spawn").Process(target=tell)
    _start(process)
    process.join()
    tell()
"""


def test_ctrl_c_never_reaches_a_worker_not_even_the_first_while_it_imports(tmp_path):
    """In a process of its own: Python starts a helper before the first worker, and that would unblock the signal."""
    (tmp_path / "first.py").write_text(FIRST_WORKER)
    done = subprocess.run([sys.executable, tmp_path / "first.py"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]  # in the worker, and afterwards in the process that started it


@pytest.mark.parametrize("grid", ["this process"], indirect=True)
def test_a_run_in_this_process_is_stopped_after_a_whole_step(tmp_path, never_stopped, grid):
    """Whatever carries out the runs, and although the sweep itself waits for Ctrl-C."""

    def watch(event):
        if event.kind == "moved" and event.fraction > 0.1:
            press()()

    assert sweep(grid, tmp_path, runner=one_after_the_other, device="cpu", watch=watch).interrupted
    assert checkpoints(tmp_path) == {grid[0].fingerprint}
    assert sweep(grid, tmp_path, runner=one_after_the_other, device="cpu").done == grid
    assert same(matrices(tmp_path), never_stopped[grid[0]])
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_continues_from_the_last_checkpoint(tmp_path, never_stopped):
    watch, _, _ = watcher(lambda: [process.kill() for process in multiprocessing.active_children()])
    runner = ProcessRunner(1)
    summary = sweep(LONG[:1], tmp_path, runner=runner, device="cpu", watch=watch, checkpoint_every=0.0)
    assert "ended by SIGKILL" in summary.failed[LONG[0]]
    watch, began, _ = watcher(lambda: None)
    assert sweep(LONG[:1], tmp_path, runner=runner, device="cpu", watch=watch).done == LONG[:1]
    assert began[LONG[0]] > 0.1
    assert same(matrices(tmp_path), {LONG[0].fingerprint: never_stopped[LONG[0]][LONG[0].fingerprint]})
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "damage"), [("inline", "cut"), ("fleet", "another device"), ("inline", "another version")]
)
def test_a_checkpoint_that_cannot_be_used_starts_the_run_anew(tmp_path, undisturbed, damage, kind, caplog):
    path = checkpoint_path(tmp_path, GRID[0])
    device = "cuda" if damage == "another device" else "cpu"
    checkpoint.write(path, "run", {}, Checkpointer(path, GRID[0], torch.device(device)).about)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    if damage == "another version":
        path.write_bytes(path.read_bytes().replace(b'\\"version\\": ', b'\\"version\\":9'))
    runner = {"inline": inline, "fleet": FleetRunner(1)}[kind]
    assert sweep(GRID[:1], tmp_path, runner=runner, device="cpu").done == GRID[:1]
    assert "starts anew: its checkpoint cannot be used" in caplog.text
    assert same(matrices(tmp_path), {GRID[0].fingerprint: undisturbed[GRID[0].fingerprint]})
    assert leftovers(tmp_path) == []


def test_the_checkpoint_of_a_run_that_is_finished_is_removed(tmp_path):
    """Its sweep was killed between saving the result and removing the checkpoint."""
    sweep(GRID[:1], tmp_path, runner=inline)
    checkpoint.write(checkpoint_path(tmp_path, GRID[0]), "run", {})
    checkpoint.write(checkpoint_path(tmp_path, GRID[1]), "run", {})
    sweep(GRID[:1], tmp_path, runner=inline)
    assert checkpoints(tmp_path) == {GRID[1].fingerprint}


def test_a_result_that_cannot_be_saved_leaves_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.sweep.runner.results", SimpleNamespace(save=lambda *_: 1 / 0))
    summary = sweep(GRID[:1], tmp_path, runner=FleetRunner(1), device="cpu", checkpoint_every=0.0)
    assert not summary.done
    assert checkpoints(tmp_path) == {GRID[0].fingerprint}


@pytest.mark.slow
def test_a_worker_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    """Pressed a second time, or after a minute, Ctrl-C ends the runs at once."""
    (tmp_path / "stubborn_plugin.py").write_text(STUBBORN.replace("OUT", str(tmp_path / "out")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("holdfast.sweep.runner.GRACE", 0.5)
    pressed = []

    def watch(event):
        if (tmp_path / "out" / "reached.md").exists() and not pressed:
            pressed.append(1)
            press()()

    grid = [tiny(method="stubborn", train_limit=None)]
    runner, out = ProcessRunner(1), tmp_path / "out"
    summary = sweep(grid, out, runner=_talkative(runner), plugins=["stubborn_plugin"], watch=watch, device="cpu")
    assert (summary.interrupted, summary.left) == (True, 1)
    assert multiprocessing.active_children() == []


STUBBORN = """
import time
from pathlib import Path
from holdfast.regularizers import REGULARIZERS

@REGULARIZERS.register("stubborn", "takes its time")
def stubborn(current, stored):
    Path("OUT/reached.md").touch()
    time.sleep(60)
    return (current - stored).square().mean()
"""


def _talkative(runner):
    """The same, with a sign of life as an event."""

    def carry(configs, job, emit):
        seen = []

        def tell(event):
            seen[:] = [event.config] if event else seen
            emit(event or Event("moved", seen[0], 0.0) if seen else event)

        runner(configs, job, tell)

    return carry


def test_choice_of_runner():
    assert isinstance(local_runner("cpu", 3), ProcessRunner)
    assert local_runner("cpu", 3).jobs == 3


def test_runs_at_once_have_a_core_for_each_of_their_threads(monkeypatch):
    """A ResNet has as many threads in a sweep as in `holdfast run`: the same run must be the same arithmetic."""
    monkeypatch.setattr("holdfast.sweep.processes.cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    room, deep = ProcessRunner()._has_room, tiny(model="resnet18")
    assert room([])
    assert room([deep])
    assert not room([deep, deep])
    assert room([tiny()] * 7)
    assert not room([tiny()] * 8)
    assert room([tiny(model="only a plugin has it")])
    assert ProcessRunner(3)._has_room([deep] * 2)
    assert not ProcessRunner(3)._has_room([tiny()] * 3)


SWEEP = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_sweep import GRID
from holdfast.sweep import ProcessRunner, sweep

if __name__ == "__main__":
    print("ready", flush=True)
    sweep(GRID, Path({out!r}), runner=ProcessRunner(2), device="cpu")
"""


@pytest.mark.slow
def test_twenty_kills_of_processes(tmp_path, undisturbed):
    """The sweep is killed, not its workers: those must end by themselves."""
    out = tmp_path / "out"
    script = tmp_path / "script.py"
    script.write_text(SWEEP.format(tests=str(Path(__file__).parent), out=str(out)))
    draw = random.Random(0)
    for _ in range(20):
        process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(draw.uniform(0.5, 7.0))
        workers = _children(process.pid)
        process.kill()
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 60  # the time a worker has to finish its step
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
        assert load_results(out).skipped == []
    sweep(GRID, out, runner=ProcessRunner(2), device="cpu")
    assert same(matrices(out), undisturbed)
    assert leftovers(out) == []


def _children(number: int) -> list[str]:
    return Path(f"/proc/{number}/task/{number}/children").read_text().split()


# --- forecasts


def test_forecasts(tmp_path):
    for seed, seconds in enumerate((10.0, 20.0, 60.0)):
        result = results.RunResult(
            GRID[seed], *(torch.zeros(2, 2),) * 2, torch.zeros(2), seconds, environment={"device_type": "cpu"}
        )
        results.save(result, tmp_path)
    there = load_results(tmp_path)
    same_settings, same_method, same_benchmark = tiny(9), tiny(lr=0.5), tiny(method="er")
    wanted = [same_settings, same_method, same_benchmark]
    assert forecast(wanted, there, jobs=1, device="cpu") == (60.0, [], 0)
    assert forecast(wanted, there, jobs=2, device="cpu").seconds == 30.0
    assert forecast(wanted, there, jobs=9, device="cpu").seconds == 20.0  # no run is split
    unlike = tiny(tasks=3)
    guess = expected_seconds(unlike, "cpu")
    assert forecast([unlike, same_method], there, jobs=1, device="cpu") == (20.0 + guess, [], 1)
    guesses = [expected_seconds(config, "cuda") for config in wanted]  # what a CPU took says nothing
    assert forecast(wanted, there, jobs=1, device="cuda") == (sum(guesses), [], 3)
    stranger = tiny(benchmark="elsewhere")
    assert forecast([stranger, same_method], there, jobs=1, device="cpu") == (20.0, [stranger], 0)
    assert forecast([], Results(), jobs=1, device="cpu") == (0.0, [], 0)


@pytest.mark.parametrize("runner", [lambda: ProcessRunner(1), lambda: FleetRunner(2)], ids=["processes", "fleet"])
@pytest.mark.usefixtures("quick_workers")
def test_a_run_is_abandoned_on_request_and_the_next_one_is_not(tmp_path, runner):
    """Neither a result nor a checkpoint is left of it, and its worker goes on."""
    long, short = tiny(tasks=10, train_limit=2000), GRID[0]
    events = []

    def emit(event):
        events.append(event)
        return event is not None and event.kind == "moved" and event.row is not None and event.config == long

    runner()(iter([long, short]), Job(tmp_path, device="cpu", checkpoint_every=0.0), emit)
    ends = {event.config: event.kind for event in events if event and event.kind not in ("started", "moved")}
    assert ends == {long: "abandoned", short: "done"}
    assert results.find(tmp_path, long) is None
    assert not list((tmp_path / ".checkpoints").glob("*"))
    rows = [event.row for event in events if event and event.row and event.config == short]
    found = results.find(tmp_path, short).matrix
    assert rows == [tuple(found[task, : task + 1].tolist()) for task in range(2)]
