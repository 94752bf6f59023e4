"""Runs that take turns on one device, and what each of them gave."""

from holdfast import results
from holdfast.sweep.fleets import FleetRunner
from holdfast.sweep.runner import Job


def run_fleet(configs, out, *, size=None, until=None, device="cpu", watch=None):
    """{config: its result, or the message of its error}; `watch` is given the runner and every event."""
    found, runner = {}, FleetRunner(size, until)

    def emit(event):
        if event is not None:
            if event.kind == "done":
                found[event.config] = results.read(out / event.config.fingerprint, tensors=True)
            elif event.kind == "failed":
                found[event.config] = event.error
            if watch:
                watch(runner, event)

    runner(iter(configs), Job(out, device=device), emit)
    return found
