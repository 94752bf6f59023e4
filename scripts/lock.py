"""constraints.txt -> requirements-dev.txt: the same versions, with the SHA-256 of every file that is that version.

`make lock` runs it in an environment of its own, with pip-tools, which asks whatever package indexes pip is configured
for; no file is downloaded. A file that only lies on this machine, such as a build of torch without GPU, counts as well.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements-dev.txt"
HEADER = """\
# Made by `make lock` from constraints.txt: every version with the SHA-256 of each of its files. To install just these:
#     pip install --no-deps --require-hashes -r requirements-dev.txt
# torch has two kinds of files: those of the public index, and the builds without GPU that PyTorch publishes apart,
# of which only the one for Python 3.11 on Linux (x86-64) is listed. --no-deps, because the former would want CUDA
# libraries that nothing here needs.
"""


def pins(text: str) -> dict[str, str]:
    """Name -> version, with the marker behind it where there is one, as constraints.txt spells them."""
    lines = (line.strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def render(hashes: dict[tuple[str, str], list[str]]) -> str:
    """The lock file, in the order of constraints.txt."""
    entries = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in found)])
        for (name, version), found in hashes.items()
    ]
    return HEADER + "\n".join(entries) + "\n"


def find_hashes(wanted: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """The digests of all files of each version, whatever platform they are for."""
    from piptools.repositories import PyPIRepository

    shelf = PyPIRepository([], cache_dir=str(ROOT / "build" / "lock-cache"))
    found = {}
    with shelf.allow_all_wheels():
        for number, (name, pin) in enumerate(wanted.items(), start=1):
            version = pin.partition(";")[0].strip()
            candidates = [c for c in shelf.find_all_candidates(name) if c.version.public == version]
            digests = sorted({digest for candidate in candidates if (digest := _digest(candidate.link))})
            if not digests:
                sys.exit(f"{name} {version}: no file with a hash was found. Is the version right?")
            found[name, pin] = digests
            print(f"{number}/{len(wanted)} {name} {version}: {len(digests)} files", file=sys.stderr)
    return found


def _digest(link: Any) -> str | None:
    if link.is_file:
        return hashlib.sha256(Path(link.file_path).read_bytes()).hexdigest()
    return str(link.hash) if link.hash_name == "sha256" else None


if __name__ == "__main__":
    LOCK.write_text(render(find_hashes(pins(CONSTRAINTS.read_text("utf-8")))), "utf-8")
