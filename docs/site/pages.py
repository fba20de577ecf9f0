"""Lays out the pages of the site in build/docs, for the program that builds it (`make docs`).

    python docs/site/pages.py build/docs

The pages are the documents of docs/, README.md and CHANGELOG.md, which stand outside it, and one for each example
program and file of settings. Links lead to the same files as in the repository; those to files that are no part of the
site become plain text, and one to a file that doesn't exist is an error.
"""

from __future__ import annotations

import json
import pathlib
import posixpath
import re
import shutil
import sys

SITE = pathlib.Path(__file__).resolve().parent
DOCS = SITE.parent
ROOT = DOCS.parent

STYLE = "style.css"
"""The site's own style sheet."""
OUTSIDE = {"index.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}
"""Page -> the file outside docs/ that has its text."""
PROGRAMS = {
    f"{path.relative_to(DOCS).as_posix()}.md": path
    for folder in ("examples", "deploy")
    for path in sorted((DOCS / folder).iterdir())
    if path.is_file()
}
"""Page -> the program or file of settings that it shows."""
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".conf": "ini"}

_CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)`*$|`[^`]*`|\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<file>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)
_ADDRESS = re.compile(r"[a-z]+:")


class LinkError(Exception):
    """A document has a link to a file that doesn't exist."""


def sources() -> dict[str, pathlib.Path]:
    """All pages, by where they are on the site, each with the file of the repository that it shows."""
    documents = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return {**OUTSIDE, **documents, **PROGRAMS}


def lay_out(target: pathlib.Path) -> None:
    """Writes all pages, and the pictures and files that they have links to, to a folder, which is emptied first.

    Raises:
        LinkError: naming the document and the link.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns(SITE.name, "__pycache__"))
    for page, source in sources().items():
        text = source.read_text(encoding="utf-8")
        text = program_page(source.name, text) if page in PROGRAMS else linked(text, page, source)
        (target / page).write_text(text, encoding="utf-8")
    shutil.copy(SITE / STYLE, target)


def linked(text: str, page: str, source: pathlib.Path) -> str:
    """A document with links as they are between pages.

    Args:
        text: Markdown.
        page: where it is on the site, from the site's root.
        source: the file that its links start from.

    Raises:
        LinkError: naming the document and the link.
    """

    def between_pages(match: re.Match[str]) -> str:
        file = match["file"]
        if file is None or _ADDRESS.match(file):
            return match[0]
        path = (source.parent / file).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            raise LinkError(f"{source.relative_to(ROOT)} has a link to {file}, which doesn't exist")
        there = page_of(path)
        if there is None:
            return match["text"]
        return f"[{match['text']}]({posixpath.relpath(there, posixpath.dirname(page))}{match['anchor'] or ''})"

    return _CODE_OR_LINK.sub(between_pages, text)


def page_of(path: pathlib.Path) -> str | None:
    """Where on the site a file of the repository is, from the site's root; None if it is no part of the site."""
    for page, source in {**OUTSIDE, **PROGRAMS}.items():
        if path == source:
            return page
    inside = path.is_file() and path.is_relative_to(DOCS) and not path.is_relative_to(SITE)
    return path.relative_to(DOCS).as_posix() if inside else None


def program_page(name: str, text: str) -> str:
    """A page that shows a program or a file of settings; of a notebook its cells."""
    suffix = pathlib.PurePath(name).suffix
    if suffix != ".ipynb":
        return f"# {name}\n\n{_code(text, LANGUAGES.get(suffix, 'text'))}\n"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(_code(source, "python") if kind == "code" else source for kind, source in cells) + "\n"


def _code(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


if __name__ == "__main__":
    lay_out(pathlib.Path(sys.argv[1]).resolve())
