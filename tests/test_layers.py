"""Packages are layers: each imports only what stands below it, wherever in a file and for whatever purpose it does."""

from __future__ import annotations

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parent.parent

LAYERS = """
graph_passes.errors
graph_passes.ir
graph_passes.analysis
graph_passes.passes
graph_passes.pass_manager
version
errors
common
network
schedules
view
describe
simulation
planning operators
frontend clusters
variables tracing
checkpoints
execution
measuring
dumps
front
trainer
automatic
transformation worker
__init__
models
joint
tools
"""
"""From the bottom up; those of one line don't import each other."""
NUMBERS = {name: number for number, line in enumerate(LAYERS.splitlines()) for name in line.split()}
FILES = [
    *ROOT.glob("dapple_tf/**/*.py"),
    *ROOT.glob("graph_passes/*/**/*.py"),
    *ROOT.glob("graph_passes/[!_]*.py"),
    *ROOT.glob("models/**/*.py"),
    *ROOT.glob("tools/**/*.py"),
]


def unit(module: str) -> str:
    """What a module belongs to: its package, or itself where it stands beside packages."""
    parts = module.removeprefix("dapple_tf.").split(".")
    return ".".join(parts[:2]) if parts[0] == "graph_passes" else parts[0]


@functools.cache
def imported(path: pathlib.Path) -> list[tuple[int, str]]:
    """Line and name of all that a file imports from this project, within functions and for types only, too."""
    imports = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module in ("dapple_tf", "graph_passes"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            if name == "dapple_tf":
                imports.append((node.lineno, "dapple_tf.__init__"))
            elif name.startswith(("dapple_tf.", "graph_passes.", ".")):
                imports.append((node.lineno, name))
    return imports


def test_joint_is_known_to_its_own_program_alone() -> None:
    """It gains nothing where it could be measured (docs/joint.md): nothing else is to depend on it."""
    names = {path: {unit(name) for _, name in imported(path)} for path in FILES}
    knowing = {path.relative_to(ROOT).as_posix() for path in FILES if "joint" in names[path]}
    assert {path for path in knowing if "dapple_tf/joint/" not in path} == set()


def test_imports_go_down() -> None:
    wrong, met = [], set()
    for path in FILES:
        own = unit(".".join(path.relative_to(ROOT).with_suffix("").parts))
        met.add(own)
        for line, name in imported(path):
            other = unit(name) if unit(name) in NUMBERS else "__init__"  # `dapple_tf.transform`, say, is of the front
            if other != own and NUMBERS[other] >= NUMBERS[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which isn't below {own}")
    assert wrong == []
    assert met == set(NUMBERS), "a package without a layer, or a layer without a package"
