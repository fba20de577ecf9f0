"""Breaks the code in small ways, one at a time, and reports which changes the tests notice.

    python -m tools.evaluation.mutants --json=mutants.json                # 600 mutants
    python -m tools.evaluation.mutants --json=mutants.json --share=0.1    # a tenth of each group

Mutants are drawn with a fixed seed. Each is tried in a forked child of a process that has imported TensorFlow but none
of our packages: the child compiles the changed module in place of the file, and runs the test files nearest to it by
imports, then those that draw plans, until the first test fails. Processes started by tests have the unchanged code. An
interrupted run can be resumed: mutants in the JSON file aren't tried again.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUPS = {
    "passes, schedules, simulation": (("graph_passes", "dapple_tf/schedules", "dapple_tf/simulation"), 300),
    "planning": (("dapple_tf/planning",), 60),
    "execution": (("dapple_tf/execution",), 60),
    "frontend": (("dapple_tf/frontend",), 60),
    "checkpoints": (("dapple_tf/checkpoints",), 60),
    "clusters": (("dapple_tf/clusters", "dapple_tf/network"), 60),
}
"""Packages of each group, and its number of mutants."""

_DRAWS = ("tests/test_random_plans.py", "tests/test_plan_record.py")
"""Tests of everything together, which are near to no module."""

_PAIRS = (
    "Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, In NotIn, NotIn In, Is IsNot, IsNot Is, And Or, Or And, "
    "Add Sub, Sub Add, Mult FloorDiv, FloorDiv Mult, Div Mult, Mod FloorDiv, BitOr BitAnd, BitAnd BitOr"
)
_SWAPPED: dict[type[ast.AST], Any] = {
    getattr(ast, one): getattr(ast, other) for one, other in (pair.split() for pair in _PAIRS.split(", "))
}
"""Operators, and their replacements."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: path relative to the repository.
        line: its line.
        before: the replaced code.
        after: the replacement.
        tree: the whole changed module.
    """

    file: str
    line: int
    before: str
    after: str
    tree: ast.Module = dataclasses.field(repr=False, compare=False)

    @property
    def key(self) -> str:
        """Identifies it among all mutants."""
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all replacements of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield ast.Compare(node.left, [_SWAPPED[type(op)]()], node.comparators)
        case ast.BinOp() if type(node.op) in _SWAPPED:
            yield ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(_SWAPPED[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If() | ast.While():
            yield type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.IfExp():
            yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Call(args=[first, second, *others]) if not any(
            isinstance(arg, ast.Starred) for arg in (first, second)
        ):
            yield ast.Call(node.func, [second, first, *others], node.keywords)


def replacements(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, ast.AST]]:
    """Yields (parent, field, index in it, node, its replacement): no annotations, decorators or error texts."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or isinstance(tree, (ast.Raise, ast.JoinedStr)):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST):
                yield from ((tree, field, index, node, new) for new in changes(node))
                yield from replacements(node)


def mutant(path: pathlib.Path, number: int) -> Mutant:
    """Returns the mutant with this number of all `replacements` in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parent, field, index, old, new = next(itertools.islice(replacements(tree), number, None))
    before, after = (" ".join(ast.unparse(node).split())[:120] for node in (old, new))
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    ast.copy_location(new, old)
    ast.fix_missing_locations(tree)
    return Mutant(str(path.relative_to(ROOT)), getattr(old, "lineno", 0), before, after, tree)


def draw(count: int, seed: int, folders: Sequence[str]) -> list[Mutant]:
    """Draws mutants of all files in folders, with a seed."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    numbers = [(path, number) for path, tree in trees.items() for number, _ in enumerate(replacements(tree))]
    return [mutant(*drawn) for drawn in random.Random(seed).sample(numbers, min(count, len(numbers)))]


# ---- which tests


def module_name(file: str) -> str:
    """Returns ``a/b.py`` -> ``a.b``; a package is its folder."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").removeprefix("tests.")


def imported_by(files: Sequence[str]) -> dict[str, set[str]]:
    """Returns module -> the modules that import it, anywhere in their files."""
    names = {module_name(file) for file in files}
    users: dict[str, set[str]] = collections.defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                read = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                read = [name for name in inner if name in names] or [node.module]
            else:
                continue
            for name in read:
                users[name].add(module_name(file))
    return users


def nearest_tests(module: str, users: dict[str, set[str]], limit: int) -> list[str]:
    """Returns test files that import a module, directly or indirectly, in the fewest steps; its own comes first."""
    steps, todo = {module: 0}, collections.deque([module])
    while todo:
        name = todo.popleft()
        for user in sorted(users.get(name, ())):
            if user not in steps:
                steps[user] = steps[name] + 1
                todo.append(user)
    tests = [name for name in steps if name.startswith("test_")]
    own = module.rpartition(".")[2]
    nearest = sorted(tests, key=lambda name: (own not in name, steps[name], name))[:limit]
    return [f"tests/{name}.py" for name in nearest]


# ---- a try


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a changed module in place of its file."""

    def __init__(self, change: Mutant) -> None:
        self._change = change
        self._name = module_name(change.file)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        file = ROOT / self._change.file
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=folders)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self._change.tree, str(ROOT / self._change.file), "exec"), module.__dict__)


def outcome(change: Mutant | None, tests: Sequence[str], seconds: float) -> dict[str, str]:
    """Returns a mutant's outcome: ``survived``, ``killed`` (by a test or a crash), ``not tested``, ``out of time``.

    Args:
        change: the mutant; None is the unchanged code.
        tests: test files, or single tests, relative to the repository.
        seconds: limit.
    """
    folder = tempfile.mkdtemp(prefix="mutants_")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_tests(change, tests, folder, writer)
    os.close(writer)
    in_time = bool(select.select([reader], [], [], seconds)[0])
    said = os.read(reader, 1 << 16).decode() if in_time else ""
    os.close(reader)
    _end(child)
    shutil.rmtree(folder, ignore_errors=True)
    if not in_time:
        return {"outcome": "out of time", "by": ""}
    ended: dict[str, str] = json.loads(said) if said else {"outcome": "killed", "by": "a crash"}
    return ended


def _run_tests(change: Mutant | None, tests: Sequence[str], folder: str, writer: int) -> None:
    """Runs the tests in the child; doesn't return."""
    import pytest

    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    if change is not None:
        sys.meta_path.insert(0, _Changed(change))
    failed: list[str] = []

    def note(report: Any) -> None:
        failed.extend([report.nodeid] if report.failed else [])

    noted = types.SimpleNamespace(pytest_runtest_logreport=note)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/tests"]
    options.append(f"--rootdir={ROOT}")
    try:
        code = int(pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[noted]))
    except BaseException:
        code = -1
    ended = {0: "survived", 5: "not tested"}.get(code, "killed")
    by = failed[0] if failed else "" if code in (0, 5) else "import"
    os.write(writer, json.dumps({"outcome": ended, "by": by}).encode())
    os._exit(0)


def _end(child: int) -> None:
    """Ends a child and all processes that it has started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(arguments: Sequence[str]) -> None:
    """Tries mutants one after the other, and writes their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="JSON file of outcomes.")
    parser.add_argument("--share", type=float, default=1.0, help="Share of each group's mutants, above 0.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the drawn mutants.")
    parser.add_argument("--files", type=int, default=12, help="Maximum number of test files for a mutant.")
    parser.add_argument("--seconds", type=float, default=300.0, help="Maximum seconds for a mutant.")
    options = parser.parse_args(arguments)
    outcomes: dict[str, dict[str, Any]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    folders = ("graph_passes", "dapple_tf", "tools", "models", "tests")
    files = [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    users = imported_by(files)
    import keras  # noqa: F401  What takes long; none of our packages is imported before a mutant is in place.

    @functools.cache
    def pass_unchanged(*tests: str) -> bool:
        return outcome(None, tests, options.seconds)["outcome"] == "survived"

    groups = {
        name: draw(count, options.seed, packages)[: math.ceil(options.share * count)]
        for name, (packages, count) in GROUPS.items()
    }
    for number, change in enumerate(itertools.chain.from_iterable(groups.values()), start=1):
        if change.key in outcomes:
            continue
        started = time.monotonic()
        tests = [*dict.fromkeys((*nearest_tests(module_name(change.file), users, options.files), *_DRAWS))]
        ended = outcome(change, tests, options.seconds)
        if "::" in ended["by"] and not pass_unchanged(ended["by"]):
            ended["outcome"] = "a test that fails anyway"
        if ended["outcome"] == "out of time" and pass_unchanged(*tests):
            ended = {"outcome": "killed", "by": "time"}
        outcomes[change.key] = {**ended, "seconds": round(time.monotonic() - started, 1), "tests": tests}
        options.json.write_text(json.dumps(outcomes, indent=2) + "\n")
        print(f"{number:4d} {ended['outcome']:10s} {change.key} ({ended['by']})", flush=True)
    for name, mutants in groups.items():
        print(f"{name}: {dict(collections.Counter(outcomes[each.key]['outcome'] for each in mutants))}")


if __name__ == "__main__":
    main(sys.argv[1:])
