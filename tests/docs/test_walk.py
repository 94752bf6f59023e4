"""A newcomer's walk: the blocks of each page, typed as written, in order, in a fresh folder."""

import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import typer.main

import holdfast
from forked import ended, forked
from holdfast.cli import app, main

from .blocks import ELSEWHERE, PAGES, ROOT, Block, blocks, command_options

LANGUAGES = {"python", "sh", "text"}
WALKED = [
    page
    for page in PAGES
    if str(page.relative_to(ROOT)) not in ELSEWHERE
    and any(block.language in ("python", "sh") for block in blocks(page))
]
TIME = 600  # seconds a command may take in the slow walk
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"


def name(page):
    return str(page.relative_to(ROOT))


class Walk:
    """Types the blocks of a page into one Python session and one shell, in the current folder."""

    def __init__(self, page: Path, *, short: bool) -> None:
        self.page, self.short = page, short
        self.session: dict = {"__name__": "__main__"}
        self.printed = ""

    def go(self) -> None:
        for block in blocks(self.page):
            if not block.is_possible:
                pytest.skip(f"line {block.line} {block.how}")
            try:
                self.take(block)
            except Exception as error:
                error.add_note(f"{name(self.page)}, line {block.line}")
                raise

    def take(self, block: Block) -> None:
        text = block.shortened() if self.short else block.full()
        if block.how == "output":
            assert same_output(text, self.printed), f"the page says {text!r}, but it printed {self.printed!r}"
        elif text.startswith("--8<--"):
            return  # a file shown in full, which has tests of its own
        elif block.title:
            Path(block.title).write_text(text, "utf-8")
        elif block.language == "python":
            with warnings.catch_warnings():
                if block.how.startswith("needs"):  # what others say about themselves is not ours to mend
                    for said in (DeprecationWarning, FutureWarning):
                        warnings.simplefilter("ignore", said)
                    warnings.filterwarnings("ignore", ".*does not have many workers.*")
                self.printed = self.run_python(text, block.line)
        elif block.language == "sh":
            for line in commands(text):
                self.run_command(line, block)

    def run_python(self, text: str, line: int) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + text, name(self.page), "exec"), self.session)
        return printed.getvalue()

    def run_command(self, line: str, block: Block) -> None:
        words = shlex.split(line)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
            return
        if words[0] == "holdfast":
            parse(words[1:])
        if block.is_parsed_only:
            return
        if self.short and words[0] == "holdfast":  # in this process, which has everything imported
            call([name for word in words for name in expanded(word)])
        elif self.short and words[0] == "torchrun" and not torch.cuda.is_available():
            self.printed = ranks(words[1:])
        else:
            done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=TIME, check=False)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            self.printed = done.stdout


def call(words):
    """The command as the program's entry point carries it out."""
    before, sys.argv = sys.argv, words
    path = list(sys.path)
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv, sys.path[:] = before, path
    assert not end.value.code, " ".join(words)


def ranks(words):
    """What the ranks print that torchrun would start: here copies of this process, which have everything imported."""
    from torch.distributed.run import parse_args

    asked, said = parse_args(words), Path("said.md")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def begin(rank):
        warnings.resetwarnings()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked.nproc_per_node}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        with said.open("a") as sys.stdout:
            runpy.run_path(asked.training_script, run_name="__main__")

    numbers = [forked(partial(begin, rank)) for rank in range(int(asked.nproc_per_node))]
    assert ended(numbers) == [0] * len(numbers)
    return said.read_text("utf-8")


def expanded(word):
    """What a shell makes of a word with a star: the files of that name."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


def commands(text):
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def parse(words):
    """Parse a holdfast command as the program would, without running it."""
    group = typer.main.get_command(app)
    group.commands[words[0]].make_context(words[0], list(words[1:]))


def same_output(expected, printed):
    """Words exactly, numbers within a tenth (or half a unit): the last digits are those of a machine."""
    split = re.compile(r"(-?\d+\.?\d*)")
    ours, theirs = split.split(expected.strip()), split.split(printed.strip())
    if ours[::2] != theirs[::2]:
        return False
    pairs = [(float(a), float(b)) for a, b in zip(ours[1::2], theirs[1::2], strict=True)]
    return all(abs(a - b) <= max(0.5 * ("." not in expected), 0.1 * abs(a)) for a, b in pairs)


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """A fresh folder, `holdfast` on the path, and nothing of this process that a newcomer would not have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    before = dict(holdfast.REGULARIZERS._entries)
    modules = set(sys.modules)
    with torch.random.fork_rng():
        yield tmp_path
    holdfast.REGULARIZERS._entries.clear()
    holdfast.REGULARIZERS._entries.update(before)
    for module in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def prepared(walk):
    """The home page and the README begin with names that the reader has."""
    model = torch.nn.Linear(4, 3)
    walk.session |= {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "stream": [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(3)],
    }
    return walk


@pytest.mark.pages
@pytest.mark.parametrize("page", WALKED, ids=name)
def test_the_page_works_as_written_in_short(page, newcomer):
    prepared(Walk(page, short=True)).go()


@pytest.mark.slow
@pytest.mark.parametrize("page", WALKED, ids=name)
def test_the_page_works_as_written_in_full(page, newcomer):
    prepared(Walk(page, short=False)).go()


@pytest.mark.parametrize("page", [*PAGES, README, CONTRIBUTING], ids=name)
def test_every_block_says_what_it_is(page):
    """Nothing escapes the walk: a block is Python, a command or plain text, and every comment is understood."""
    text = page.read_text("utf-8")
    found = blocks(page)
    assert text.count("```") == 2 * len(found), "a block that the tests do not see"
    kinds = {block.language for block in found}
    assert kinds <= (LANGUAGES | {""} if page in (README, CONTRIBUTING) else LANGUAGES)
    for block in found:
        known = r'(always )?append "|replace "|only parse, \w|needs \w+$|output$'
        assert not block.how or re.match(known, block.how), block.how
    assert text.count("<!-- test:") == sum(bool(block.how) for block in found)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_a_page_that_is_executed_elsewhere_is(page, test):
    assert ROOT / page in PAGES
    assert all(f'"{part}"' in (ROOT / test).read_text("utf-8") for part in Path(page).parts), f"{test} reads the page"


def test_the_examples_of_the_readme_run(newcomer):
    """The second one, a complete run of half a minute, on two tasks of 640 images."""
    first, second = (block for block in blocks(README) if block.language == "python")
    walk = prepared(Walk(README, short=True))
    walk.run_python(first.text, first.line)
    shortened = second.text.replace("seed=0)", "seed=0, tasks=2, train_limit=640)")
    assert shortened != second.text
    walk.run_python(f"accuracy = {shortened}", second.line)
    assert 10 < walk.session["accuracy"] < 100


def test_the_commands_of_the_readme_are_right():
    """Each is parsed by the program itself; `make` knows its targets, and what it installs is on the path by then."""
    seen, made = 0, re.search(r"^VENV := (.*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[1]
    typed = [line for block in blocks(README) for line in commands(block.text) if block.language == ""]
    first = [
        next(n for n, line in enumerate(typed) if line.startswith(word)) for word in ("make", "source", "holdfast")
    ]
    assert first == sorted(first)
    for block in blocks(README):
        for line in commands(block.text) if block.language == "" else ():
            words = shlex.split(line, comments=True)
            seen += 1
            if words[0] == "source":
                assert words == ["source", f"{made}/bin/activate"]
            elif words[0] == "make":
                subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
            else:
                parse(words[1:])
    assert seen == 13


def test_the_example_of_contributing_runs(newcomer):
    """Saved as my_module.py, as the text says, checked and run on one task of 320 images."""
    regularizer, learner = (block for block in blocks(CONTRIBUTING) if block.language == "python")
    Path("my_module.py").write_text(f"{regularizer.text}\n{learner.text}", "utf-8")
    command = re.search(r"`(holdfast run [^`]*)`", CONTRIBUTING.read_text("utf-8"))[1]
    call(shlex.split(f"{command} --tasks 1 --set train_limit=320 --set regularizer.delta=0.5"))
    session: dict = {}
    exec("import holdfast.testing\nfrom my_module import huber\nholdfast.testing.check_regularizer(huber)", session)
    exec("from my_module import WeightedReplay\nholdfast.testing.check_learner(WeightedReplay)", session)
    call(shlex.split("holdfast run rot-mnist weighted-replay --plugin my_module --tasks 1 --set train_limit=320"))


def test_commands_in_running_text_exist():
    """`holdfast ...` between backticks names a command, and options it has."""
    options = command_options()
    for page in [*PAGES, README, CONTRIBUTING]:
        for line in re.findall(r"`holdfast ([^`]*)`", page.read_text("utf-8")):
            command, *words = line.split()
            assert command in options, f"{name(page)}: holdfast {line}"
            assert {word for word in words if word.startswith("--")} <= options[command], f"{name(page)}: {line}"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 100 %", "a 99.6 %", True),
        ("a 86 %", "a 80 %", True),
        ("a 86 %", "a 60 %", False),
        ("a 86 %", "b 86 %", False),
        ("1.5", "1.6", True),
        ("0.1", "0.3", False),
        ("True", "False", False),
        ("", "x", False),
    ],
)
def test_the_comparison_of_outputs_itself(expected, printed, same):
    assert same_output(expected, printed) is same


def test_a_wrong_page_is_noticed(tmp_path, newcomer):
    page = ROOT / "docs" / "no-such-page.md"
    walk = Walk(page, short=True)
    walk.printed = "3"
    with pytest.raises(AssertionError, match="but it printed"):
        walk.take(Block("text", "4\n", "output", None, 1))
    with pytest.raises(NameError):
        walk.take(Block("python", "nothing_of_that_name\n", "", None, 1))
    with pytest.raises(AssertionError):
        walk.take(Block("sh", "false\n", "", None, 1))
    with pytest.raises(Exception, match="--no-such-option"), warnings.catch_warnings():
        walk.take(Block("sh", "holdfast run a b --no-such-option\n", "only parse, of course", None, 1))
