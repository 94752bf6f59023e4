"""Files that once made a reader fail are read again: each is read rightly or refused in words.

`corpus/KIND/` holds them, found by mutating sound files at random. A new one is added when a reader is found to fail:
save the file there, under any name, before mending the reader.
"""

import json
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError

from .hunt import altered, damaged, fuzz
from .readers import READERS

CORPUS = Path(__file__).with_name("corpus")
KEPT = sorted(path for path in CORPUS.glob("*/*"))
NEW = ("buffer", "estimator", "settings", "queue")
"""Kinds whose damage no other file of these tests tries."""


@pytest.mark.parametrize("kind", READERS)
def test_a_sound_file_is_read(kind, tmp_path):
    """Else a reader that refuses everything would pass."""
    assert not isinstance(READERS[kind].outcome(READERS[kind].sound, tmp_path), HoldfastError)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_failed(path, tmp_path):
    READERS[path.parent.name].outcome(path.read_bytes(), tmp_path)


def test_there_is_something_to_replay():
    assert {path.parent.name for path in KEPT} <= READERS.keys()
    assert len(KEPT) > 20


@pytest.mark.parametrize("kind", NEW)
def test_damage(kind, tmp_path):
    reader = READERS[kind]
    strategy = damaged(reader.sound)
    if kind == "settings":
        strategy |= altered(json.loads(reader.sound))

    @fuzz(strategy, examples=40)
    def check(content, place):
        reader.outcome(content, place)

    check(40, tmp_path)
