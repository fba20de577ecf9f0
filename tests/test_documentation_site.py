"""The documentation's site has every document and public name; links lead to the same files as in the repository."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import dapple_tf

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"


def _pages() -> Any:
    spec = importlib.util.spec_from_file_location("pages", DOCS / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _pages()


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(inner)


def test_navigation_has_each_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(_leaves(settings["nav"])) == sorted(pages.sources())


def test_reference_has_each_public_name_once() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    names = Counter(name for text in texts for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))
    assert not [name for name, count in names.items() if count > 1]
    assert {f"dapple_tf.{name}" for name in dapple_tf.__all__} <= set(names)


def test_all_pages_are_laid_out(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "docs"
    (target / "old").mkdir(parents=True)
    pages.lay_out(target)
    assert set(pages.sources()) == {path.relative_to(target).as_posix() for path in target.rglob("*.md")}
    assert (target / "style.css").exists() and (target / "pictures" / "what_if.png").exists()
    assert not (target / "site").exists() and not (target / "old").exists()


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/tools.md)", "[a](tools.md)"),
        ("README.md", "index.md", "[a](docs/architecture.md#the-passes)", "[a](architecture.md#the-passes)"),
        ("README.md", "index.md", "![a](docs/pictures/what_if.png)", "![a](pictures/what_if.png)"),
        ("README.md", "index.md", "[`[a]`](docs/results/README.md)", "[`[a]`](results/README.md)"),
        ("README.md", "index.md", "[a](docs/examples), [b](CHANGELOG.md)", "a, [b](changelog.md)"),
        ("docs/zoo.md", "zoo.md", "[a](../README.md) [b](../tools/train.py)", "[a](index.md) b"),
        ("docs/cluster.md", "cluster.md", "[a](deploy/ssh.sh)", "[a](deploy/ssh.sh.md)"),
        ("docs/results/speed.md", "results/speed.md", "[a](../cluster.md)", "[a](../cluster.md)"),
        ("docs/zoo.md", "zoo.md", "[a](https://doi.org/1) [b](#models)", "[a](https://doi.org/1) [b](#models)"),
        ("docs/zoo.md", "zoo.md", "`[a](b)`\n```py\n[a](b)\n```", "`[a](b)`\n```py\n[a](b)\n```"),
    ],
)
def test_links_lead_to_the_same_files(source: str, page: str, text: str, expected: str) -> None:
    assert pages.linked(text, page, ROOT / source) == expected


def test_link_to_nothing_is_an_error() -> None:
    with pytest.raises(pages.LinkError, match=r"^docs/zoo.md has a link to pictures/none.png, which doesn't exist$"):
        pages.linked("![a](pictures/none.png)", "zoo.md", DOCS / "zoo.md")


def test_program_is_shown_as_code() -> None:
    assert pages.program_page("a.sh", "ls\n") == "# a.sh\n\n````bash\nls\n````\n"
    notebook = (
        '{"cells": [{"cell_type": "markdown", "source": ["# A\\n", "b"]}, {"cell_type": "code", "source": ["c"]}]}'
    )
    assert pages.program_page("a.ipynb", notebook) == "# A\nb\n\n````python\nc\n````\n"


@pytest.mark.parametrize("page", [page for page, source in pages.sources().items() if source.suffix == ".md"])
def test_lists_are_lists_on_the_site(page: str) -> None:
    """The site's Markdown is stricter than others, and shows as text what it doesn't take for a part of a list."""
    text = pages.sources()[page].read_text(encoding="utf-8")
    text = re.sub(r"^( *)```.*?^ *```$", r"\1code", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        first, *others = block.strip("\n").split("\n")
        assert not re.match(r" {1,3}\S", first), f"indent what belongs to a list by four spaces: {first}"
        if not re.match(r"([*-]|\d+\.) ", first):
            items = [line for line in others if re.match(r" {0,3}([*-]|\d+\.) ", line)]
            assert not items, f"leave a line free before a list: {items[0]}"
