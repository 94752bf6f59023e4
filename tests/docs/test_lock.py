"""requirements-dev.txt: the versions of constraints.txt, each with hashes."""

import re
import runpy

from .blocks import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "lock.py"))
LOCK = (ROOT / "requirements-dev.txt").read_text("utf-8")
PINS = SCRIPT["pins"]((ROOT / "constraints.txt").read_text("utf-8"))


def entries():
    """(name, version and marker) -> digests, as the lock file has them."""
    joined = LOCK.replace(" \\\n", " ")
    lines = [re.split(r"\s+--hash=sha256:", line) for line in joined.splitlines() if not line.startswith("#")]
    return {tuple(pin.split("==", 1)): digests for pin, *digests in lines}


def test_it_names_the_versions_of_the_constraints_and_no_others():
    assert list(entries()) == list(PINS.items()), "run `make lock`"


def test_every_version_has_hashes():
    for pin, digests in entries().items():
        assert digests, pin
        assert digests == sorted(set(digests)), pin
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests), pin


def test_nothing_in_it_says_where_it_was_made():
    assert not re.search(r"https?:|file:|/|\bindex-url\b", LOCK.replace("requirements-dev.txt", ""))


def test_it_is_as_the_script_writes_it():
    assert SCRIPT["render"](entries()) == LOCK


def test_the_constraints_pin_what_pyproject_asks_for():
    """Each dependency of the package and of its extras for development has a pin."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(p for extra in project["optional-dependencies"].values() for p in extra)]
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in PINS}
    for requirement in wanted:
        if requirement.startswith("holdfast["):
            continue  # extras made of others, which are looked at themselves
        assert re.split(r"[\[<>=!~ ]", requirement)[0].lower() in pinned, requirement
