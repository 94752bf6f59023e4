"""The same grid on a Ray cluster: a real one of two nodes, one of which is killed."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, UsageError
from holdfast.experiments import load_results
from holdfast.sweep import Job, sweep
from holdfast.sweep import remote as remote_module
from holdfast.sweep.cluster import RayRunner
from holdfast.sweep.leases import HEARTBEAT
from holdfast.sweep.remote import Remote
from test_sweep import GRID, HOPELESS, checkpoints, inline, leftovers, matrices, same, tiny

pytest.importorskip("ray", reason="Ray is not installed: pip install 'holdfast[cluster]'")

# Ray's own imports and sockets warn.
pytestmark = pytest.mark.filterwarnings("default")


def test_unreachable_address_is_told_at_once(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(HoldfastError, match=rf"the Ray cluster at {address} cannot be reached: Connection refused"):
            sweep(GRID, tmp_path, runner=RayRunner(address), device="cpu")
    assert time.monotonic() - began < 15
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("address", ["somewhere", "host:port", "ray://host"])
def test_address_that_is_none(tmp_path, address):
    with pytest.raises(UsageError, match=r"--address must be host:port, ray://host:port or auto"):
        sweep(GRID, tmp_path, runner=RayRunner(address), device="cpu")


def test_no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"install the extra 'cluster' \(pip install 'holdfast\[cluster\]'\)"):
        RayRunner()


class FakeRay:
    """As far as connecting goes: like the real one, it answers SIGTERM by ending the program."""

    def __init__(self, terminated=False):
        self.terminated = terminated

    def is_initialized(self):
        return False

    def init(self, **options):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if self.terminated:
            os.kill(os.getpid(), signal.SIGTERM)

    def shutdown(self):
        pass


def test_sigterm_stops_the_sweep_and_not_the_program():
    """Ray's own handler ended it with exit code 15, and nothing was said."""
    runner, before = RayRunner(), signal.getsignal(signal.SIGTERM)
    try:
        runner.ray = FakeRay()
        with runner._connected():
            assert signal.getsignal(signal.SIGTERM) == before
        runner.ray = FakeRay(terminated=True)
        with pytest.raises(KeyboardInterrupt), runner._connected():
            pass
    finally:
        signal.signal(signal.SIGTERM, before)


def test_results_behind_an_address(tmp_path):
    sweep(GRID[:1], tmp_path / "node", runner=inline)
    (stored,) = load_results(tmp_path / "node")
    url = (tmp_path / "shared").as_uri()
    Remote(url).save(stored.path.parent)
    assert {path.name for path in (tmp_path / "shared" / GRID[0].fingerprint).iterdir()} == {
        "result.json",
        "logits.safetensors",
        "weights.safetensors",
    }
    Remote(url, tmp_path / "mirror").fetch()
    assert same(matrices(tmp_path / "mirror"), matrices(tmp_path / "node"))


@pytest.mark.parametrize("key", ["..", "../../outside", "0123456789abcde", "0123456789ABCDEF", "C:", ".hidden"])
def test_a_key_of_the_store_does_not_decide_where_we_write(tmp_path, monkeypatch, key):
    """Stores of objects take any name for a key."""
    remote = Remote((tmp_path / "shared").as_uri(), tmp_path / "some" / "where" / "mirror")
    listed = [f"{remote._root}/{key}/result.json", f"{remote._root}/0123456789abcdef/result.json"]
    monkeypatch.setattr(remote._files, "glob", lambda pattern: listed, raising=False)
    monkeypatch.setattr(remote._files, "cat_file", lambda path: b"{}", raising=False)
    remote.fetch()
    (written,) = tmp_path.rglob("result.json")
    assert written == remote.folder / "0123456789abcdef" / "result.json"


def test_half_an_upload_is_no_result(tmp_path, monkeypatch):
    sweep(GRID[:1], tmp_path / "node", runner=inline)
    (stored,) = load_results(tmp_path / "node")
    remote = Remote((tmp_path / "shared").as_uri(), tmp_path / "mirror")
    put, sent = remote._files.put_file, []

    def break_off(source, target):
        if sent:
            raise OSError("connection lost")
        sent.append(target)
        put(source, target)

    monkeypatch.setattr(remote._files, "put_file", break_off, raising=False)
    with pytest.raises(OSError, match="connection lost"):
        remote.save(stored.path.parent)
    remote.fetch()
    assert sent
    assert matrices(tmp_path / "mirror") == {}


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """Makes ways to one folder behind an address, each as another sweep has it."""
    monkeypatch.setattr(remote_module, "SETTLING", 0.01)
    return lambda name: Remote((tmp_path / "shared").as_uri(), tmp_path / name)


def test_one_sweep_at_a_time_behind_an_address(tmp_path, shared):
    first, second = RayRunner(remote=shared("first")), RayRunner(remote=shared("second"))
    job = Job(tmp_path / "second")
    with first.remote.reserved():
        for _ in range(2):
            with pytest.raises(HoldfastError, match=rf"shared is in use by another sweep, process {os.getpid()} on "):
                second(iter([]), job, print)
        first.remote.renew()
    with second.remote.reserved():
        pass
    assert [path for path in (tmp_path / "shared").iterdir() if path.is_file()] == []


def test_results_that_came_in_meanwhile_are_fetched_once_it_is_reserved(tmp_path, shared):
    sweep(GRID[:1], tmp_path / "node", runner=inline)
    (stored,) = load_results(tmp_path / "node")
    late = shared("late")
    late.fetch()
    shared("other").save(stored.path.parent)
    with late.reserved():
        assert same(matrices(tmp_path / "late"), matrices(tmp_path / "node"))


@pytest.mark.parametrize(
    ("change", "over"),
    [
        ({}, False),
        ({"started": "1"}, True),
        ({"pid": 2**40}, True),
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "pid": 2**40, "silent": 500}, False),
        ({"host": "elsewhere", "silent": 700}, True),
        ({"time": "yesterday"}, True),
        (None, True),
    ],
)
def test_a_sweep_that_is_gone_makes_room(tmp_path, shared, change, over):
    remote = shared("mirror")
    with remote.reserved():
        pass
    lease = json.loads(shared("other")._signature())
    lease["time"] -= (change or {}).get("silent", 0)
    lease |= change or {}
    (tmp_path / "shared" / ".sweep.json").write_text("{" if change is None else json.dumps(lease))
    with nullcontext() if over else pytest.raises(HoldfastError, match="in use by another sweep"), remote.reserved():
        assert json.loads((tmp_path / "shared" / ".sweep.json").read_text())["sweep"] != lease["sweep"]
    assert (tmp_path / "shared" / ".sweep.json").exists() == (not over)


def test_a_sweep_that_lost_its_place_stops(tmp_path, shared):
    """Two that begin in the same moment may both write; who wrote last has it."""
    first, theirs = shared("first"), shared("second")._signature()
    with first.reserved():
        (tmp_path / "shared" / ".sweep.json").write_text(theirs)
        first.renew()  # too early for another look
        first.signed -= 2 * HEARTBEAT
        with pytest.raises(HoldfastError, match="in use by another sweep"):
            first.renew()
    assert (tmp_path / "shared" / ".sweep.json").read_text() == theirs


def test_address_of_a_kind_nobody_knows():
    with pytest.raises(UsageError, match=r"nosuch://place cannot be used for results"):
        Remote("nosuch://place")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with one processor each, which find modules in the folder `cluster.plugins`."""
    from ray.cluster_utils import Cluster

    plugins = tmp_path_factory.mktemp("plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(plugins), prepend=os.pathsep)
        yield from _two_nodes(Cluster, plugins)


def _two_nodes(Cluster, plugins):
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.plugins, made.second = plugins, made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.mark.slow
def test_two_nodes_and_an_address_for_results(tmp_path, cluster):
    sweep(GRID[:2], tmp_path / "here", runner=inline)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    remote = Remote((tmp_path / "shared").as_uri(), mirror)
    runner = RayRunner(cluster.address, device="cpu", remote=remote)
    summary = sweep([HOPELESS, *GRID[:2]], mirror, runner=runner)
    assert sorted(config.seed for config in summary.done) == [0, 1]
    assert "no longer finite" in summary.failed[HOPELESS]
    assert same(matrices(mirror), matrices(tmp_path / "here"))
    assert same(matrices(tmp_path / "shared"), matrices(tmp_path / "here"))


BOOKKEEPER = """
from pathlib import Path
import ray
from holdfast.sweep import runner

real_run = runner.run

def run(config, **rest):
    with Path({log!r}).open("a") as log:
        log.write(f"{{config.seed}} {{ray.get_runtime_context().get_node_id()}}\\n")
    return real_run(config, **rest)

runner.run = run
"""


@pytest.mark.slow
def test_runs_on_a_cluster_that_were_stopped_continue(tmp_path, cluster):
    """No checkpoint is due for an hour, so the one that is there was written because of Ctrl-C."""
    log, out, grid = tmp_path / "log", tmp_path / "out", [tiny(train_limit=20_000, batch_size=8)]
    log.touch()
    (cluster.plugins / "bookkeeper.py").write_text(BOOKKEEPER.format(log=str(log)))
    runner = RayRunner(cluster.address, device="cpu")

    def interrupted(configs, job, emit):
        def watch(event):
            emit(event)
            if event is None and log.read_text():
                time.sleep(1)  # it has begun its first steps
                os.kill(os.getpid(), signal.SIGINT)

        runner(configs, job, watch)

    summary = sweep(grid, out, runner=interrupted, plugins=["bookkeeper"], checkpoint_every=3600.0)
    assert (summary.interrupted, summary.left) == (True, 1)
    assert checkpoints(out) == {grid[0].fingerprint}
    assert sweep(grid, out, runner=runner).done == grid
    assert leftovers(out) == []
    sweep(grid, tmp_path / "alone", runner=inline)
    assert same(matrices(out), matrices(tmp_path / "alone"))


@pytest.mark.slow
def test_killed_node_costs_its_runs_a_restart_and_nothing_else(tmp_path, cluster):
    """The second node is killed as soon as it has begun a run."""
    log = tmp_path / "log"
    log.touch()
    (cluster.plugins / "bookkeeper.py").write_text(BOOKKEEPER.format(log=str(log)))
    grid = [tiny(seed, train_limit=20_000, tasks=3) for seed in range(6)]
    doomed = cluster.second.node_id
    runner = RayRunner(cluster.address, device="cpu")

    def kill_its_node(configs, job, emit):
        def watch(event):
            if event is None and cluster.second is not None and doomed in log.read_text():
                cluster.remove_node(cluster.second, allow_graceful=False)
                cluster.second = None
            emit(event)

        runner(configs, job, watch)

    summary = sweep(grid, tmp_path / "out", runner=kill_its_node, plugins=["bookkeeper"])
    assert summary.failed == {}
    assert cluster.second is None
    starts = [line.split() for line in log.read_text().splitlines()]
    lost = [seed for seed, node in starts if node == doomed]
    assert len(lost) == 1
    assert sorted(seed for seed, _ in starts) == sorted([*"012345", *lost])  # a restart, and nothing else
    assert sorted(config.seed for config in summary.done) == list(range(6))
    assert leftovers(tmp_path / "out") == []
    sweep(grid[:2], tmp_path / "alone", runner=inline)
    alone, found = matrices(tmp_path / "alone"), matrices(tmp_path / "out")
    assert len(found) == 6
    assert same({key: found[key] for key in alone}, alone)


@pytest.mark.slow
def test_folder_that_the_nodes_do_not_share(tmp_path, cluster, monkeypatch):
    """As far as the sweep can see: the result it was promised is not where it looks."""
    runner = RayRunner(cluster.address, device="cpu")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "result.json" and exists(path))
    summary = sweep(GRID[:1], tmp_path, runner=runner)
    assert "Choose a folder that all nodes share" in summary.failed[GRID[0]]
