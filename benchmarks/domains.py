"""Three domains of text that lie on any machine, as tokens in one file: the data of benchmarks/language.py.

    python benchmarks/domains.py build/domains.npz

code: Python sources of installed packages. prose: licences, manuals and readmes in English. numbers: tables, logs and
drawings of which at least a quarter of the characters are digits. A tokenizer (byte-level BPE) is trained on the spot
on equal parts of the three. Texts are cut into samples of one length. Each file of the machine is either in the
training part or in the held-out part, and a text that lies there twice is taken once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("code", "prose", "numbers")
CODE = {".py"}
PROSE = {".md", ".rst", ".txt", ".license", ""}
NUMBERS = {".csv", ".tsv", ".dat", ".txt", ".log", ".arff", ".afm", ".zi", ".svg"}
WORDS = ("licen", "copying", "copyright", "readme", "metadata", "changelog", "notice", "news", "authors")
LONGEST, SHORTEST = 200_000, 1_000
"""Bytes of a file: no more than this is taken of one, and smaller ones are left out."""
HELD_OUT = 20
"""One file of so many is held out."""


def domain_of(path: Path, text: str) -> str | None:
    """The domain of a text, from the name of its file and from its share of digits and of letters."""
    suffix, name = path.suffix.lower(), path.name.lower()
    if suffix in CODE:
        return "code"
    digits = sum(character.isdigit() for character in text) / len(text)
    letters = sum(character.isalpha() or character in " ,.;'" for character in text) / len(text)
    ascii_share = sum(character.isascii() for character in text) / len(text)
    if suffix in NUMBERS and digits >= 0.25:
        return "numbers"
    readable = suffix in PROSE and (suffix != "" or any(word in name for word in WORDS))
    return "prose" if readable and digits < 0.05 and letters > 0.85 and ascii_share > 0.98 else None


def texts(roots: list[Path], seed: int = 0) -> Iterator[tuple[Path, str]]:
    """Text files below the roots in a random order, each content once."""
    files = sorted(
        {path for root in roots for path in root.rglob("*") if path.suffix.lower() in CODE | PROSE | NUMBERS}
    )
    random.Random(seed).shuffle(files)
    known: set[bytes] = set()
    for path in files:
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size < SHORTEST:
                continue
            with path.open("rb") as file:
                data = file.read(LONGEST)
        except OSError:
            continue
        if b"\0" in data or (digest := hashlib.sha256(data).digest()) in known:
            continue
        known.add(digest)
        yield path, data.decode("utf-8", errors="ignore")


def gather(roots: list[Path], most: int) -> dict[str, tuple[list[str], list[str]]]:
    """Texts to train on and held-out texts of each domain, `most` characters of the former."""
    found: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in NAMES}
    taken, count = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for path, text in texts(roots):
        domain = domain_of(path, text) if text else None
        if domain is None or taken[domain] >= most:
            if all(each >= most for each in taken.values()):
                break
            continue
        count[domain] += 1
        held_out = count[domain] % HELD_OUT == 0
        found[domain][held_out].append(text)
        taken[domain] += 0 if held_out else len(text)
    return found


def train_tokenizer(found: dict[str, tuple[list[str], list[str]]], vocabulary: int) -> Any:
    """A byte-level BPE from two million characters of the training part of each domain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        for train, _ in found.values():
            left = 2_000_000
            for text in train:
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def samples(tokenizer: Any, parts: list[str], length: int, seed: int) -> np.ndarray:
    """The texts one after the other, with <end> between them, cut into rows (count, length) in a random order."""
    end = tokenizer.token_to_id("<end>")
    tokens = [token for encoded in tokenizer.encode_batch(parts) for token in (*encoded.ids, end)]
    rows = np.array(tokens[: len(tokens) // length * length], dtype=np.uint16).reshape(-1, length)
    return np.random.default_rng(seed).permutation(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--roots", type=Path, nargs="+", help="folders to look in; default: this Python and /usr/share")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--train", type=int, default=12_800, help="the most samples of a domain to train on")
    parser.add_argument("--held-out", type=int, default=128, help="the most samples of a domain that are held out")
    arguments = parser.parse_args()
    paths = sysconfig.get_paths()
    roots = arguments.roots or [Path(paths["purelib"]), Path(paths["stdlib"]), Path("/usr/share")]
    found = gather([root for root in roots if root.is_dir()], most=arguments.train * arguments.length * 5)
    tokenizer = train_tokenizer(found, arguments.vocabulary)
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"vocabulary": tokenizer.get_vocab_size(), "length": arguments.length, "domains": {}}
    for name, (train, held_out) in found.items():
        rows = samples(tokenizer, train, arguments.length, seed=0)
        arrays[f"{name}_train"] = rows[: arguments.train]
        arrays[f"{name}_test"] = samples(tokenizer, held_out, arguments.length, seed=1)[: arguments.held_out]
        characters, tokens = sum(map(len, train)), rows.size
        about["domains"][name] = {
            "files": len(train),
            "held_out_files": len(held_out),
            "characters": characters,
            "characters_per_token": characters / max(1, tokens),
            "train_samples": len(arrays[f"{name}_train"]),
            "test_samples": len(arrays[f"{name}_test"]),
        }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, about=json.dumps(about), tokenizer=tokenizer.to_str(), **arrays)
    print(json.dumps(about, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
