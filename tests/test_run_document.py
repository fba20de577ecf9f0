"""Documents' examples run, and what they printed and drew is put back."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from dapple_tf.tools.evaluation.run_document import ExampleError, blocks, pictures, run

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENT = """# Example

```python
numbers = [1, 2]
print(sum(numbers))
```

```text
old
```

Words, and a block that isn't output:

```text
kept
```

```python
import pathlib
pathlib.Path("drawn.svg").write_text(str(numbers))
print("a\\n  b  ")
```
```text
```

![drawn](pictures/drawn.svg) and ![other](pictures/other.png)
"""


def test_outputs_follow_their_examples(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = run(DOCUMENT, "example.md")
    assert [block.text for block in blocks(document) if block.language == "text"] == ["3\n", "kept\n", "a\n  b\n"]
    assert run(document, "example.md") == document
    assert document.replace("3\n", "old\n", 1).replace("a\n  b\n", "") == DOCUMENT
    assert (tmp_path / "drawn.svg").read_text() == "[1, 2]"
    assert pictures(document) == ["drawn.svg", "other.png"]


def test_a_failing_example_is_named() -> None:
    document = DOCUMENT.replace("sum(numbers)", "numbers[7]")
    with pytest.raises(ExampleError, match=r"the example in example.md, line 4 failed: IndexError: list index"):
        run(document, "example.md")


def test_commands_run_in_processes_of_their_own() -> None:
    document = "```sh\npython -m calendar 2026 2  # shows\nmake nothing\n```\n```text\n```\n"
    assert "February 2026" in run(document, "example.md")
    with pytest.raises(ExampleError, match=r"`python -m tools.nothing` in example.md, line 2 failed with 1"):
        run("```sh\npython -m tools.nothing\n```\n", "example.md")


def test_commands_in_the_background_end_with_the_last_example(tmp_path: pathlib.Path) -> None:
    document = f"```sh\npython -m http.server 0 --directory={tmp_path} &\n```\n```python\nprint(__name__)\n```\n"
    running = set(pathlib.Path("/proc/self/task").glob("*/children"))
    before = [path.read_text() for path in running]
    assert run(document, "example.md") == document
    assert [path.read_text() for path in running] == before


@pytest.mark.thorough
def test_the_tool_rewrites(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "example.md"
    path.write_text(DOCUMENT, encoding="utf-8")
    command = [sys.executable, "-m", "tools.evaluation.run_document"]
    for flags, state in ([], "its outputs have changed"), (["--write"], "rewritten"), ([], "unchanged"):
        result = subprocess.run([*command, *flags, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout == f"{path}: 2 examples, 1 pictures made; {state}\n"
    assert (tmp_path / "pictures" / "drawn.svg").read_text() == "[1, 2]"
