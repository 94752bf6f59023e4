"""A process that is killed in the middle, and one that goes on where it was. A few seconds.

The second process ends with exactly the weights of a process that was never stopped.
"""

import os
import signal
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

import holdfast as hf

torch.set_num_threads(1)  # products this small are not worth sharing

STEPS, EVERY, KILLED_AT = 200, 20, 130


def minibatch(step):
    """What arrives at this step; in your case, from wherever your stream can be read again."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 10, generator=draw)
    return x, (x[:, 0] > 0).long() + 2 * (step > STEPS // 2)


def learn(path, killed_at=None):
    """Learn from where the checkpoint is, or from the start; returns a digest of the final weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    learner = hf.ConsistencyReplay(model, optimizer, buffer_size=64, regularizer="mse")
    start = learner.load(path)["step"] if path.exists() else 0
    print(f"begins at step {start}", flush=True)
    for step in range(start, STEPS):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)  # no warning, no last words
        learner.observe(*minibatch(step))
        if (step + 1) % EVERY == 0:
            learner.save(path, extra={"step": step + 1})
    weights = b"".join(part.detach().numpy().tobytes() for part in model.parameters())
    return sha256(weights).hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the process that will be killed
        learn(Path(sys.argv[1]), killed_at=KILLED_AT)
    with tempfile.TemporaryDirectory() as folder:
        stopped = Path(folder) / "stopped.safetensors"
        first = subprocess.run([sys.executable, __file__, stopped], check=False)
        print(f"killed by signal {-first.returncode} at step {KILLED_AT}")
        continued = learn(stopped)
        whole = learn(Path(folder) / "whole.safetensors")
    print(f"continued {continued}, never stopped {whole}: {'equal' if continued == whole else 'DIFFERENT'}")
    sys.exit(continued != whole)
