"""Runs the examples of a document one after another, and puts what they printed and drew back into it.

    python -m tools.evaluation.run_document docs/tutorial.md            # runs it; says which outputs have changed
    python -m tools.evaluation.run_document --write docs/tutorial.md    # rewrites the outputs and pictures, too

Examples are blocks of the languages ``python`` (all in one process, as in a notebook) and ``sh`` (lines that begin with
``python -m``, ``dapple-`` or ``taskset``, each in a process; ``&`` at a line's end lets it run until the last example
has). They run in a folder of their own, with a cache of profiles of their own. A block of the language ``text`` right
behind an example is what it printed. Pictures that the document shows, such as ``![...](pictures/tutorial/x.svg)``, are
taken from ``tutorial/x.svg`` in that folder if the examples made them.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import app, flags

import dapple_tf

_WRITE = flags.DEFINE_boolean("write", False, "Rewrite the outputs in the document, and its pictures.")

_ROOT = pathlib.Path(dapple_tf.__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
_OURS = ("python -m ", "dapple-", "taskset ")
_PICTURE = re.compile(r"!\[[^\]]*\]\(pictures/([^)]+)\)")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: behind the fence.
        text: its lines.
        start: position in the document of its text.
        line: number of its first line.
    """

    language: str
    text: str
    start: int
    line: int


class ExampleError(Exception):
    """An example failed; the text says which."""


def blocks(document: str) -> Iterator[Block]:
    """Yields the fenced blocks of a document."""
    for match in _BLOCK.finditer(document):
        yield Block(match[1], match[2], match.start(2), document.count("\n", 0, match.start(2)) + 1)


def pictures(document: str) -> list[str]:
    """Returns the pictures that a document shows, by their paths in its folder ``pictures``."""
    return list(dict.fromkeys(_PICTURE.findall(document)))


def run(document: str, name: str) -> str:
    """Runs the examples of a document in the current folder.

    Args:
        document: its text.
        name: what it is called in error messages.

    Returns:
        The document with the outputs that there are now.

    Raises:
        ExampleError: an example failed.
    """
    space: dict[str, Any] = {"__name__": "__main__"}
    all_blocks = list(blocks(document))
    parts, position = [], 0
    printed = ""
    with contextlib.ExitStack() as background:
        for number, block in enumerate(all_blocks):
            where = f"{name}, line {block.line}"
            if block.language == "python":
                printed = _run_python(block, space, where)
            elif block.language == "sh":
                lines = [line for line in block.text.splitlines() if line.startswith(_OURS)]
                printed = "".join(_run_command(line, where, background) for line in lines)
            elif block.language == "text" and number and all_blocks[number - 1].language in ("python", "sh"):
                parts += [document[position : block.start], _shown(printed)]
                position = block.start + len(block.text)
    return "".join([*parts, document[position:]])


def _run_python(block: Block, space: dict[str, Any], where: str) -> str:
    out = io.StringIO()
    # Lines keep their numbers in tracebacks.
    source = "\n" * (block.line - 1) + block.text
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(source, where.partition(",")[0], "exec"), space)
        except Exception as error:
            raise ExampleError(f"the example in {where} failed: {type(error).__name__}: {error}") from error
    return out.getvalue()


def _run_command(line: str, where: str, background: contextlib.ExitStack) -> str:
    words = shlex.split(line, comments=True)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name, first in (("PYTHONPATH", str(_ROOT)), ("PATH", os.path.dirname(sys.executable))):
        variables[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
    if words[-1] == "&":
        process = subprocess.Popen(words[:-1], env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        background.enter_context(process)
        background.callback(process.terminate)
        assert process.stdout is not None
        process.stdout.readline()  # It serves.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        return ""
    result = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ExampleError(f"`{line}` in {where} failed with {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def _shown(printed: str) -> str:
    """Returns what was printed, as far as it belongs into a document: without what only a terminal shows."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in printed.replace("\b", "").splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def main(argv: Sequence[str]) -> None:
    """Runs the documents that the command names."""
    if len(argv) < 2:
        raise app.UsageError("name a document, such as docs/tutorial.md")
    for name in argv[1:]:
        path = pathlib.Path(name).resolve()
        if not path.is_file():
            raise app.UsageError(f"{name} isn't a file")
        document = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
            folder = pathlib.Path(scratch)
            os.environ["DAPPLE_CACHE"] = str(folder / ".cache")  # Profiles are measured now.
            try:
                changed = run(document, name)
            except ExampleError as error:
                raise SystemExit(str(error)) from error
            made = [picture for picture in pictures(document) if (folder / picture).is_file()]
            if _WRITE.value:
                path.write_text(changed, encoding="utf-8")
                for picture in made:
                    target = path.parent / "pictures" / picture
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(folder / picture, target)
        count = sum(block.language in ("python", "sh") for block in blocks(document))
        state = "rewritten" if _WRITE.value else "unchanged" if changed == document else "its outputs have changed"
        print(f"{name}: {count} examples, {len(made)} pictures made; {state}")


if __name__ == "__main__":
    app.run(main)
