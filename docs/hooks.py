"""What mkdocs asks for while it builds the site: files that lie elsewhere, links that leave, comments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
OUTSIDE = re.compile(r"(\[[^\]]*\]\()((?:\.\./)+results/[^)]+\.svg)\)")


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, and the figures that were drawn of results: called by mkdocs once."""
    for figure in sorted((DOCS.parent / "results").rglob("*.svg")):
        files.append(File.generated(config, str(figure.relative_to(DOCS.parent)), abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page as it is built: called by mkdocs for every page."""
    # Where numbers come from, and how tests run a block, is for those who write.
    markdown = COMMENT.sub("", markdown)
    # Of a figure beside the results, the path is one folder shorter in the site than in the repository.
    markdown = OUTSIDE.sub(lambda match: f"{match[1]}{match[2].removeprefix('../')})", markdown)
    return without_links_outside(markdown, DOCS / page.file.src_uri)


def without_links_outside(markdown: str, path: Path) -> str:
    """Links to files of the repository that are no part of the site, such as results, become plain text."""

    def keep(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        return match[0] if target.is_relative_to(DOCS) else match[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)[^)]*\)", keep, markdown)
