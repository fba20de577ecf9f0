"""The README's examples run, its commands exist and its links lead somewhere."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [line.split("#")[0].strip() for block in _blocks("sh") for line in block.splitlines()]
LINKS = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(_blocks("python")), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DAPPLE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


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
