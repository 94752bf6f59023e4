"""Chaos notices programs that do not survive it, and lets those pass that do."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from chaos.program import Program
from chaos.trouble import TROUBLES, Disk, Fault, Round
from holdfast.errors import HoldfastError

END = {"end": b"0123456789"}


def careful(place: Path) -> None:
    """Counts to ten: notes each number whole, and continues after the last one."""
    notes = place / "notes"
    done = notes.read_text("latin-1") if notes.exists() else ""
    if done != "0123456789"[: len(done)]:
        raise HoldfastError("the notes are damaged. Delete them.")
    for number in range(len(done), 10):
        time.sleep(0.01)
        done += str(number)
        _write(place / "notes", done)
    _write(place / "end", done)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(text)
        scratch.replace(path)
    except OSError as error:
        raise HoldfastError(f"{path} cannot be written: {error}") from None


def ending(place: Path) -> dict[str, bytes]:
    return {"end": (place / "end").read_bytes()} if (place / "end").exists() else {}


def rounds(act, tmp_path: Path, count: int = 50) -> Iterator[Round]:
    """Rounds with seeds 0, 1, ...; without a disk of their own, where files may only grow to some size."""
    tmp_path.mkdir(exist_ok=True)
    program = Program("toy", act, ending, lambda place: list(place.glob("notes")))
    disk = Disk(tmp_path / "disk")
    for seed in range(count):
        made = Round(program, END, 0.15, disk, Random(seed))
        made.go()
        yield made


@pytest.fixture(autouse=True)
def no_mount(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


def test_a_careful_program_survives_every_trouble(tmp_path):
    """Which troubles a round has depends on how fast the machine is: as many rounds as it takes to meet them all."""
    left = {*TROUBLES, "refused"}
    for done in rounds(careful, tmp_path):
        assert done.counts["equal"] == 1
        left -= done.counts.keys()
        if not left:
            return
    pytest.fail(f"never met: {left}")


def forgetful(place: Path) -> None:
    """Counts its own number of executions as progress."""
    _write(place / "end", "0123456789"[len(list(place.glob("notes"))) :])
    _write(place / "notes", "0")


def half(place: Path) -> None:
    """Writes its end digit by digit."""
    with suppress(OSError), (place / "end").open("wb", buffering=0) as file:
        for digit in b"0123456789":
            file.write(bytes([digit]))
            time.sleep(0.01)


def clumsy(place: Path) -> None:
    """Does not look whether its notes are whole."""
    if (place / "notes").exists():
        assert (place / "notes").read_text() == "0"
    _write(place / "notes", "0")
    time.sleep(0.1)
    _write(place / "end", "0123456789")


def clinging(place: Path) -> None:
    """Leaves a process behind."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    careful(place)


@pytest.mark.parametrize(
    ("act", "said"),
    [(forgetful, "differs"), (half, "differs"), (clumsy, "ended with 70"), (time.sleep, "ended with 70")],
)
def test_other_programs_do_not(tmp_path, act, said):
    with pytest.raises(Fault, match=said):
        list(rounds(act, tmp_path))  # the first fault ends it


@pytest.mark.parametrize(("act", "said"), [(clinging, "go on|hangs"), (lambda place: time.sleep(60), "hangs")])
def test_a_program_that_goes_on_is_ended(tmp_path, act, said, monkeypatch):
    monkeypatch.setattr("chaos.program.PATIENCE", 2)
    with pytest.raises(Fault, match=said):
        list(rounds(act, tmp_path, 6))


@pytest.mark.slow
def test_a_minute_of_it(tmp_path, monkeypatch):
    from chaos.__main__ import wreak

    monkeypatch.setattr("os.environ", os.environ.copy())
    assert wreak(tmp_path, 1.0, 0, ["run", "folder", "memory", "estimator"], None) == 0


def test_the_page_tells_of_a_time_without_faults():
    found = json.loads((Path(__file__).parents[1] / "docs" / "chaos.json").read_text("utf-8"))
    assert found["faults"] == []
    assert found["all"]["equal"] == found["all"]["rounds"]
    assert found["all"]["rounds"] >= 30
    assert set(TROUBLES) <= {name for name, count in found["all"].items() if count}
