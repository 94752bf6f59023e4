"""Leases and records of failures: files that several processes and hosts write and read."""

import json
import os
import socket

from holdfast.config import RunConfig
from holdfast.experiments import Results
from holdfast.sweep import agenda, leases

from .hunt import altered, damaged, fuzz, outcome

CONFIG = RunConfig.preset("seq-mnist", "er", buffer_size=200)
LEASE = {"pid": os.getpid(), "host": socket.gethostname(), "started": "123"}
FAILURE = {"error": "it broke", "trace": "", "config": CONFIG.to_dict(), "fingerprint": CONFIG.fingerprint}


@fuzz(damaged(json.dumps(LEASE).encode()) | altered(LEASE))
def test_leases(content, place):
    """A damaged lease is either taken or abandoned."""
    path = place / "lease"
    path.write_bytes(content)
    assert outcome(leases._is_abandoned, path) in (True, False)


@fuzz(damaged(json.dumps(FAILURE).encode()) | altered(FAILURE))
def test_records_of_failures(content, place):
    (place / "failed").mkdir(exist_ok=True)
    (place / "failed" / f"{CONFIG.fingerprint}.json").write_bytes(content)
    assert isinstance(outcome(agenda._recorded_error, place, CONFIG), str)


def test_an_agenda_goes_on_beside_damaged_leases(tmp_path):
    (tmp_path / ".leases").mkdir()
    lease = tmp_path / ".leases" / CONFIG.fingerprint
    lease.write_bytes(b"[" * 100_000)
    os.utime(lease, (0, 0))
    plan = agenda.Agenda([CONFIG], tmp_path, Results())
    assert next(iter(plan)) == CONFIG
    plan.close()
