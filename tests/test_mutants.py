"""Small changes of code, and whether tests notice them."""

from __future__ import annotations

import ast
import pathlib
import textwrap

import pytest

from dapple_tf.tools.evaluation import mutants

CODE = """
def size(count: int = 3, name: str | None = None) -> int:
    if count < 2 and not name:
        raise ValueError("at least " + "2")
    return max(count, 4)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A repository with a module, another that imports it, and a test."""
    files = {
        "few_sizes/__init__.py": "",
        "few_sizes/sizes.py": CODE,
        "few_sizes/user.py": "from few_sizes.sizes import size",
        "tests/test_sizes.py": "from few_sizes.sizes import size\n\ndef test_it():\n    assert size(5) == 5\n",
        "tests/test_other.py": "from few_sizes import user\n\ndef test_it():\n    assert user.size(1, 'a') == 4\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Most of the children's time is for plugins.
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_is_changed_and_what_is_not(folder: pathlib.Path) -> None:
    """Annotations and texts of errors aren't: no test should notice."""
    drawn = mutants.draw(100, 0, ["few_sizes"])
    assert {(each.line, each.before, each.after) for each in drawn} == {
        (2, "3", "4"),
        (3, "count < 2 and (not name)", "count < 2 or not name"),
        (3, "count < 2", "count <= 2"),
        (3, "2", "3"),
        (3, "not name", "name"),
        (3, *(" ".join(f"if {test}: raise ValueError('at least ' + '2')".split()) for test in BOTH)),
        (5, "return max(count, 4)", "return None"),
        (5, "max(count, 4)", "max(4, count)"),
        (5, "4", "5"),
    }
    first, again = ([each.key for each in mutants.draw(4, 7, ["few_sizes"])] for _ in range(2))
    assert first == again


BOTH = ("count < 2 and (not name)", "not (count < 2 and (not name))")


def test_the_nearest_tests_come_first(folder: pathlib.Path) -> None:
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.py"))]
    users = mutants.imported_by(files)
    assert mutants.nearest_tests("few_sizes.sizes", users, 5) == ["tests/test_sizes.py", "tests/test_other.py"]
    assert mutants.nearest_tests("few_sizes.user", users, 5) == ["tests/test_other.py"]


def test_a_mutant_is_killed_by_the_first_test_that_fails_and_the_code_itself_survives(folder: pathlib.Path) -> None:
    files = ["tests/test_sizes.py", "tests/test_other.py"]
    changed = ast.parse(textwrap.dedent(CODE.replace("max(count, 4)", "max(count, 5)")))
    result = mutants.outcome(mutants.Mutant("few_sizes/sizes.py", 5, "4", "5", changed), files, 600.0)
    assert result["outcome"] == "killed" and result["by"].endswith("test_other.py::test_it")
    assert mutants.outcome(None, files, 600.0)["outcome"] == "survived"
