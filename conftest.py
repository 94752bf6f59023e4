"""For all tests: one thread, so that several test processes on a small machine do not spin on each other's cores."""

import gc
import os
import signal
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

import torch

torch.set_num_threads(1)
gc.disable()  # until all is collected: while modules are imported and tests are made, next to nothing is garbage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore Ctrl-C, and tests press it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What is imported stays, hundreds of thousands of objects: the collector need not go through them ever again."""
    gc.freeze()
    gc.enable()


# Doctests import every module; one that is about a package which is not installed cannot be.
INTEGRATIONS = {"lightning": "lightning.py", "transformers": "transformers"}
collect_ignore = [f"src/holdfast/integrations/{path}" for name, path in INTEGRATIONS.items() if find_spec(name) is None]
