"""README's commands exist and its links lead somewhere; test_install.py runs its examples and commands."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [line.split("#")[0].strip() for block in _blocks("sh") for line in block.splitlines()]
LINKS = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]


def test_there_are_examples_and_commands() -> None:
    assert _blocks("python")
    assert {"make train", "make test"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_make_target_exists(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE)
    assert command.split()[1] in targets


@pytest.mark.parametrize("link", LINKS)
def test_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).exists()
