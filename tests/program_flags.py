"""The flags of this package's programs, without a process for each."""

from __future__ import annotations

import ast
import importlib
import pathlib

from absl import flags

from dapple_tf.tools import command

ROOT = pathlib.Path(__file__).parents[1]
INSTALLED = {name: f"tools.{module}" for module, name in command.CONSOLE.items()} | {
    "dapple-worker": "dapple_tf.worker"
}
"""Console command -> the module that it runs."""


def source_of(module: str) -> pathlib.Path:
    """The file of a module of this repository, which may not be there."""
    shipped = module.startswith(("dapple_tf.tools.", "dapple_tf.models."))  # folders of a checkout's top level
    path = module.removeprefix("dapple_tf.") if shipped else module
    return ROOT / pathlib.Path(*path.split(".")).with_suffix(".py")


def imported(module: str) -> str:
    """The name that a program is imported by, of the one that a checkout runs it by."""
    return f"dapple_tf.{module}" if module.startswith("tools.") else module


def flags_of(module: str) -> flags.FlagValues:
    """A program's own flags; those of one that adds to absl's are made anew, as two of these may have the same."""
    path = source_of(module)
    source = path.read_text(encoding="utf-8")
    if "FLAGS = flags.FlagValues()" in source:
        own_flags: flags.FlagValues = importlib.import_module(imported(module)).FLAGS
        return own_flags
    values = flags.FlagValues()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("flags.DEFINE_"):
            node.keywords.append(ast.keyword("flag_values", ast.Name("values", ast.Load())))
            expression = ast.fix_missing_locations(ast.Expression(node))
            eval(compile(expression, str(path), "eval"), {"flags": flags, "values": values})
    return values
