"""A program of a user that is killed again and again while it learns.

`learn` is the program. The processes that carry it out are forked and killed at a random moment of a random step, so
often; the last one is left to finish.
"""

import os
import random
import signal
import time

import torch
from safetensors.torch import save_file

import holdfast as hf
from forked import forked
from holdfast.augment import CropFlip, Normalize
from holdfast.rng import generator
from stories.digits import digits

STEPS, BATCH, EVERY, AHEAD = 240, 16, 4, 6


def build(storage):
    """A learner with all that a checkpoint must hold: BatchNorm, dropout, random views, momentum, a buffer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(784, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 10),
    )
    descent = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    view = CropFlip(Normalize(), generator(0, "augment"))
    return hf.ConsistencyReplay(model, descent, buffer_size=100, augment=view, storage=storage)


def learn(folder, storage, after_step=lambda: None):
    """Learn from a stream of digits; continue where the last checkpoint was."""
    checkpoint = folder / "learner.safetensors"
    learner, train = build(folder / "buffer" if storage == "folder" else storage), digits().train
    position = learner.load(checkpoint)["position"] if checkpoint.exists() else 0
    for step in range(position, STEPS):
        minibatch = slice(step * BATCH, (step + 1) * BATCH)
        learner.observe(train.images[minibatch], train.labels[minibatch])
        if (step + 1) % EVERY == 0:
            learner.save(checkpoint, {"position": step + 1})
        after_step()
    return learner


def result(learner):
    """All that learning left: weights, and what the buffer holds."""
    stored = learner.buffer.contents()
    return {**learner.model.state_dict(), "x": stored.x, "y": stored.y, "logits": stored.logits}


def live(folder, storage, report, leave):
    """A child: tells of every step, waits for leave to go on, and keeps the result if it comes to the end."""
    learner = learn(folder, storage, lambda: (os.write(report, b"."), os.read(leave, 1)))
    save_file({name: value.contiguous() for name, value in result(learner).items()}, folder / "result.safetensors")


def killed(folder, storage, kills, seed):
    """Let the program be killed so often, and finish the next time."""
    chance = random.Random(seed)
    for kill in range(kills + 1):
        told, report = os.pipe()
        leave, give = os.pipe()

        def carry_out(report=report, leave=leave, give=give):
            os.close(give)
            live(folder, storage, report, leave)

        child = forked(carry_out)
        os.close(report)
        os.close(leave)
        if kill < kills:
            steps = chance.randint(0, STEPS // kills - 1 - AHEAD)
            os.write(give, b"." * (steps + AHEAD))  # it cannot end before it is killed
            for _ in range(steps):
                assert os.read(told, 1), "it ended by itself"
            time.sleep(chance.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
        os.close(give)
        _, status = os.waitpid(child, 0)
        os.close(told)
        assert status == (signal.SIGKILL if kill < kills else 0), status
