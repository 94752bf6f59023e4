"""A job that learns from a stream and may be stopped at any time: checkpoint, metrics, alert. A few seconds.

`python production_job.py FOLDER` is the job; start it again as often as you like. It continues from the checkpoint in
the folder, appends to metrics.jsonl, and writes to alerts.jsonl when it forgets what an earlier month was like. Without
a folder, this file starts the job, kills it, starts it again, and compares with a job that was never stopped.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import holdfast as hf

torch.set_num_threads(1)  # products this small are not worth sharing
warnings.simplefilter("ignore", hf.ForgettingWarning)  # `alert` tells instead

MONTH, MONTHS, EVERY = 200, 3, 25  # steps a month; months; steps between checkpoints
CENTRES = 0.7 * torch.randn(2 * MONTHS, 20, generator=torch.Generator().manual_seed(0))


def samples(month, seed, count):
    """Two new kinds of samples each month; in your case, from wherever your stream can be read again."""
    draw = torch.Generator().manual_seed(seed)
    y = 2 * month + torch.randint(2, (count,), generator=draw)
    return CENTRES[y] + torch.randn(count, 20, generator=draw), y


def append(path, row):
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def forget_after(path, step):
    """Remove the rows that a killed job wrote after its last checkpoint: it will write them again."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step), "utf-8")
    scratch.replace(path)


def job(folder, killed_at=None):
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, metrics, alerts = (folder / name for name in ("checkpoint", "metrics.jsonl", "alerts.jsonl"))

    def alert(reading):  # call your pager here
        append(alerts, {"step": reading.step, "slice": reading.slice, "points lost": round(reading.drop, 1)})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2 * MONTHS))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=40, beta=0.2)
    monitor = hf.ForgettingMonitor(model, drop=5.0, every=EVERY, on_drop=alert)
    start = 0
    if checkpoint.exists():
        saved = learner.load(checkpoint)
        start = saved["step"]
        for month in range(start // MONTH):
            monitor.add(f"month {month}", *samples(month, seed=-1 - month, count=500))
        monitor.load_dict(saved["monitor"])
    for path in (metrics, alerts):
        forget_after(path, start)
    print(f"begins at step {start}", flush=True)
    for step in range(start + 1, MONTH * MONTHS + 1):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)  # no warning, no last words
        month = (step - 1) // MONTH
        losses = learner.observe(*samples(month, seed=step, count=32))
        monitor.observe()
        if step % MONTH == 0:  # from now on, see whether this month is remembered
            monitor.add(f"month {month}", *samples(month, seed=-1 - month, count=500))
        if step % EVERY == 0:
            append(metrics, {"step": step, "loss": losses.total.item(), **monitor.values()})
            learner.save(checkpoint, extra={"step": step, "monitor": monitor.to_dict()})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(Path(sys.argv[1]), *map(int, sys.argv[2:]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        stopped, whole = Path(folder) / "stopped", Path(folder) / "whole"
        first = subprocess.run([sys.executable, __file__, stopped, "333"], check=False)
        print(f"killed by signal {-first.returncode} at step 333")
        job(stopped)
        job(whole)
        print((stopped / "alerts.jsonl").read_text("utf-8").strip())
        names = ("metrics.jsonl", "alerts.jsonl")
        equal = all((stopped / name).read_bytes() == (whole / name).read_bytes() for name in names)
    print(f"what it wrote and what a job writes that is never stopped: {'equal' if equal else 'DIFFERENT'}")
    sys.exit(not equal)
