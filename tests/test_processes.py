"""benchmarks/processes.py: what a layout means, and how its rate is counted."""

import argparse
import importlib.util
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "processes.py"


@pytest.fixture(scope="module")
def processes():
    specification = importlib.util.spec_from_file_location("processes", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["processes"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["processes"]


def test_a_layout_is_processes_times_runs(processes):
    layout = processes.Layout.parse("2x3")
    assert (layout.processes, layout.runs, str(layout)) == (2, 3, "2x3")
    for nonsense in ("2", "2x", "axb", "0x3", "1x2x3"):
        with pytest.raises(argparse.ArgumentTypeError):
            processes.Layout.parse(nonsense)


def test_the_rate_is_of_all_runs_that_were_asked(processes):
    """Three processes, of which two are asked; each makes ten steps a run and says so at the end."""
    mine, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
    asked = []

    def work(orders):
        runs, begin, end = orders.recv()
        asked.append((runs, end - begin))
        time.sleep(max(0.0, end - time.time()))
        orders.send(10 * runs)

    for each in theirs[:2]:
        threading.Thread(target=work, args=(each,), daemon=True).start()
    rate = processes.rate(processes.Layout(2, 3), list(mine), 0.5)
    assert asked == [(3, pytest.approx(0.5))] * 2
    assert 0 < rate <= 120  # 60 steps in half a second or, on a busy machine, in somewhat more
    assert not mine[2].poll()
