"""The wheel: it holds what the program needs, and works where the repository is not."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_readme_names_the_wheel_and_every_extra():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"dist/{PROJECT['name']}-{PROJECT['version']}-py3-none-any.whl" in readme
    text = re.search(r"Extras bring what is optional.*?\n\n", readme, re.DOTALL)[0]
    for extra in PROJECT["optional-dependencies"].keys() - {"dev", "docs", "friends"}:
        assert f"`{extra}`" in text, extra


def test_an_extra_is_added_to_an_installed_holdfast_without_an_index():
    """As the pages say: Holdfast is on no index, and pip must not look for it there."""
    add = [sys.executable, "-m", "pip", "install", "--no-index", "--dry-run", "--disable-pip-version-check"]
    done = subprocess.run([*add, "holdfast[sklearn]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"already satisfied: scikit-learn.*\(from holdfast\[sklearn\]\)", done.stdout)


def test_pages_that_add_an_extra_say_how_holdfast_itself_is_installed():
    place = "start.md#in-your-own-project"
    assert "## In your own project" in (ROOT / "docs" / "start.md").read_text("utf-8")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "pip install 'holdfast[" in page.read_text("utf-8")]
    assert len(pages) > 5
    assert [page.name for page in pages if page.name != "start.md" and place not in page.read_text("utf-8")] == []


@pytest.mark.slow
def test_a_wheel_works_in_a_fresh_environment(tmp_path):
    """What it depends on is lent by this environment; nothing else of it, and nothing of the repository."""
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), "."]
    assert f"{' '.join(build[:4])} --disable-pip-version-check --no-deps" in (ROOT / "Makefile").read_text("utf-8")
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    inside = ZipFile(wheel).namelist()
    for file in ("presets.toml", "speeds.json", "py.typed", "data/files/mnist/LICENSE.md"):
        assert f"holdfast/{file}" in inside
    assert not [name for name in inside if not name.startswith(("holdfast/", "holdfast-"))]

    home = tmp_path / "fresh"
    venv.create(home, with_pip=True)
    python, command = home / "bin" / "python", home / "bin" / "holdfast"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(home)})
    Path(packages, "lent.pth").write_text(sysconfig.get_path("purelib"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [python, "-c", "import holdfast; print(holdfast.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(home)
    demo = [command, "demo", "--tasks", "2", "--train-limit", "300"]
    done = subprocess.run(demo, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "figure: holdfast-demo/accuracy-over-tasks.png" in done.stdout
    assert (tmp_path / "holdfast-demo" / "accuracy-over-tasks.png").exists()
