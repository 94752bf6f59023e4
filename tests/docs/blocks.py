"""The code blocks of a Markdown page, in order, and how a test is to run them.

A comment before a block says how a test shortens what would take long or cannot be done here:

    <!-- test: append "--tasks 2" -->                  to each line that is a holdfast command
    <!-- test: append "--tasks 2" to "holdfast run" -->  to each line that begins like that
    <!-- test: always append "--dry-run" -->           in the full walk too, where it would take hours
    <!-- test: replace "old" "new" -->                 everywhere in the block; {root} is the repository
    <!-- test: only parse, REASON -->                  commands are parsed, not run
    <!-- test: needs NAME -->                          run only where the package NAME is installed
    <!-- test: output -->                              the block is what the block before it prints

Numbers in output are compared with a tolerance of a tenth, words exactly.
"""

import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"docs/recipes/avalanche.md": "tests/integrations/test_avalanche.py"}
"""Pages that need what is not installed here, and the tests that execute them."""
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in ("contributing.md", "changelog.md"))
FENCE = re.compile(
    r"(?:<!-- test: (?P<how>.*?) -->\n)?^```(?P<language>\w*)[ ]*(?P<options>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: `how` is the text of its test comment, `title` the file it is to be saved as."""

    language: str
    text: str
    how: str
    title: str | None
    line: int

    def shortened(self) -> str:
        """The text as the quick walk runs it."""
        words = shlex.split(self.how.removeprefix("always "))
        if words[:1] == ["append"]:
            start = words[3] if words[2:3] == ["to"] else "holdfast "
            return "".join(
                line.rstrip("\n") + f" {words[1]}\n" if line.startswith(start) and _takes(line, words[1]) else line
                for line in self.text.splitlines(keepends=True)
            )
        return self.full()

    def full(self) -> str:
        """The text as the full walk runs it: as it is, except for where the repository lies."""
        if self.how.startswith("always "):
            return self.shortened()
        words = shlex.split(self.how)
        if words[:1] == ["replace"]:
            assert words[1] in self.text, f"{words[1]!r} is not in the block"
            return self.text.replace(words[1], words[2].format(root=ROOT))
        return self.text

    @property
    def is_possible(self) -> bool:
        words = self.how.split()
        return words[:1] != ["needs"] or find_spec(words[1]) is not None

    @property
    def is_parsed_only(self) -> bool:
        return self.how.startswith("only parse")


def _takes(line: str, options: str) -> bool:
    """Whether the command in `line` has all these options: `holdfast list` has no --tasks."""
    command = line.split()[1]
    return all(option in command_options()[command] for option in options.split() if option.startswith("--"))


def command_options() -> dict[str, set[str]]:
    """The options of every command."""
    import typer.main

    from holdfast.cli import app

    commands = typer.main.get_command(app).commands
    return {name: {opt for p in c.params for opt in [*p.opts, *p.secondary_opts]} for name, c in commands.items()}


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page; a block that includes a file has none of its own."""
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["language"], match["text"], match["how"] or "", title[1] if title else None, line))
    return found
