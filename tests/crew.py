"""Processes that act as the ranks of a job. They stay for many tests: starting PyTorch takes longer than one."""

import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from forked import from_server

PATIENCE = 60
"""Seconds after which a rank counts as stuck; a test that gets there has failed."""


class Crew:
    """Up to `size` ranks. Use as a context manager."""

    def __init__(self, size: int) -> None:
        context = from_server()
        self.folder = tempfile.TemporaryDirectory()
        self.jobs = (Path(self.folder.name) / f"job{number}" for number in count())
        self.job, self.world = next(self.jobs), 0
        self.members = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def run(self, world, function, *args):
        """What `function(*args)` returns on each of `world` ranks, in order; it must be importable."""
        if world != self.world:
            self.job, self.world = next(self.jobs), world
        for rank, (_, pipe) in enumerate(self.members[:world]):
            pipe.send((str(self.job), rank, world, function, args))
        answers = [self._answer(pipe) for _, pipe in self.members[:world]]
        faults = [text for fault, text in answers if fault]
        if faults:
            self.disband()
            raise AssertionError("\n".join(faults))
        return [value for _, value in answers]

    def disband(self):
        """Have the next run begin a new job, because this one's ranks may be out of step."""
        self.world = 0

    @staticmethod
    def _answer(pipe):
        return pipe.recv() if pipe.poll(PATIENCE) else (True, "a rank is stuck")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, pipe in self.members:
            pipe.close()
            process.terminate()
            process.join()
        self.folder.cleanup()


def _serve(pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    current = None
    while True:
        try:
            job, rank, world, function, args = pipe.recv()
        except EOFError:
            sys.exit()
        try:
            if job != current:
                join(job, rank, world)
                current = job
            pipe.send((False, function(*args)))
        except Exception:
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))


def join(job, rank, world):
    """Leave the process group this process is in, if any, and join another that meets at the file `job`."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(job, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
