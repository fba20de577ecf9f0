"""What an operator's time depends on: its type, attributes, and the shapes and dtypes of its inputs and outputs.

Names don't matter, so that measurements of one graph serve others: "we collect the historical execution time of an
operator on a given device to predict the execution time of the operator on the same type of device" (FD-DPS, section 3,
on constructing O').
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import NodeDef, dtype_name
from graph_passes.ir.resource_use import called_functions
from graph_passes.ir.tensorflow_bridge import FunctionDefLibrary, dtype_size, op_def, output_dtypes, takes_functions

_IRRELEVANT = frozenset(
    # Names of variables and tables, random seeds, configurations of calls, and hints.
    {"shared_name", "container", "seed", "seed2", "config", "config_proto", "executor_type", "parallel_iterations"}
    | {"grad_a", "grad_b", "grad_x", "grad_y"}
)
_ATTR_TYPES = frozenset({"int", "bool", "float", "string", "list(int)"})
_QUOTED = "/:.,->+*()_"
"""Characters of attributes' values that stay as they are in a signature's text."""
_TENSOR = re.compile(r"(\w+)\[([\d,?]*|\*)\]")


class TensorType(NamedTuple):
    """A tensor's dtype, as `dtype_name` spells it, and its shape: None for an unknown rank or dimension."""

    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def elements(self) -> int:
        """Number of elements; an unknown dimension counts as 1."""
        return math.prod(1 if size is None else size for size in self.shape or ())

    @property
    def bytes(self) -> int:
        """Size in memory; 0 for resources, variants and strings."""
        return self.elements * _size(self.dtype)

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"


class OpSignature(NamedTuple):
    """What an operator's time depends on.

    As text: ``MatMul transpose_a=false transpose_b=true | float32[64,8],float32[4,8] | float32[64,4]``.

    Attributes:
        op: TensorFlow's op type.
        attrs: (name, value) of the attributes that matter, by name.
        inputs: the tensors that it reads.
        outputs: the tensors that it makes.
    """

    op: str
    attrs: tuple[tuple[str, str], ...]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    def __str__(self) -> str:
        head = " ".join([self.op, *(f"{key}={urllib.parse.quote(text, _QUOTED)}" for key, text in self.attrs)])
        return " | ".join([head, *(",".join(map(str, side)) for side in (self.inputs, self.outputs))])

    @classmethod
    def parse(cls, text: str) -> OpSignature:
        """Reads the text of `str`.

        Raises:
            ValueError: it isn't one.
        """
        parts = text.split(" | ")
        words = parts[0].split(" ")
        pairs = [word.partition("=") for word in words[1:]]
        if len(parts) != 3 or not words[0].isidentifier() or any(not equals for _, equals, _ in pairs):
            raise ValueError(f"{text!r} isn't an operator's signature: op attr=value ... | inputs | outputs")
        attrs = tuple((key, urllib.parse.unquote(value)) for key, _, value in pairs)
        return cls(words[0], attrs, _tensors(parts[1]), _tensors(parts[2]))

    def attr(self, name: str) -> str:
        """Returns an attribute; the empty string for a missing one."""
        return next((text for key, text in self.attrs if key == name), "")

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of integers."""
        return tuple(int(part) for part in self.attr(name).split(":") if part)


def _tensors(text: str) -> tuple[TensorType, ...]:
    tensors = []
    position = 0
    while position < len(text):
        match = _TENSOR.match(text, position)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise ValueError(f"{text!r} isn't a list of tensors such as float32[64,8],int32[]")
        dtype, dims = match.groups()
        sizes = None if dims == "*" else tuple(None if size == "?" else int(size) for size in dims.split(",") if size)
        tensors.append(TensorType(dtype, sizes))
        position = match.end() + 1
    return tuple(tensors)


@functools.cache
def _size(dtype: str) -> int:
    number = next((number for number in types_pb2.DataType.values() if number and dtype_name(number) == dtype), None)
    return 0 if number is None else dtype_size(number)


@functools.cache
def _dtype_name(dtype: int) -> str:
    return dtype_name(dtype % 100)  # From 100 on they are references to variables.


def signature(
    node: NodeDef, inputs: Sequence[TensorType], outputs: Sequence[TensorType], functions: str = ""
) -> OpSignature:
    """Returns the signature of a node of a graph.

    Args:
        node: a primitive op.
        inputs: the tensors that it reads.
        outputs: the tensors that it makes.
        functions: identifies the functions that it runs; empty if it runs none.

    Raises:
        PassError: TensorFlow doesn't know the op.
    """
    attributes = []
    attrs = node.attr
    for name, default, text in _relevant(node.op):
        attributes.append((name, text(attrs[name]) if name in attrs else default))
    if functions:
        attributes.append(("functions", functions))
    return OpSignature(node.op, tuple(attributes), tuple(inputs), tuple(outputs))


class Fingerprints:
    """Identifies functions of a library by what they compute, whatever their names.

    Args:
        library: the functions.
    """

    def __init__(self, library: FunctionDefLibrary) -> None:
        self._functions = {function.signature.name: function for function in library.function}
        self._found: dict[str, str] = {}

    def of(self, node: NodeDef) -> str:
        """Returns a hash of the functions that a node runs; empty if it runs none."""
        if not takes_functions(node.op):
            return ""
        return _hash([self._function(name) for name in called_functions(node, self._functions)])

    def _function(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = ""  # for functions that call themselves
            lines = []
            for node in self._functions[name].node_def:
                attrs = [f"{key}={text(node.attr[key])}" for key, _, text in _relevant(node.op) if key in node.attr]
                value = (
                    node.attr["value"].tensor.SerializeToString(deterministic=True).hex() if node.op == "Const" else ""
                )
                lines.append(" ".join([node.op, *attrs, value, self.of(node)]))
            self._found[name] = _hash(sorted(lines))
        return self._found[name]


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def _relevant(op: str) -> tuple[tuple[str, str, Callable[[Any], str]], ...]:
    """Returns the attributes that an op's time may depend on besides dtypes: (name, default as text, its printer)."""
    attributes = []
    definition = op_def(op)
    counts = {arg.number_attr for side in (definition.input_arg, definition.output_arg) for arg in side}
    for attr in sorted(definition.attr, key=lambda attr: attr.name):
        if attr.type in _ATTR_TYPES and attr.name not in _IRRELEVANT | counts and not attr.name.startswith("_"):
            spell = _SPELLED[attr.type]
            attributes.append((attr.name, spell(attr.default_value), spell))
    return tuple(attributes)


_SPELLED: Mapping[str, Callable[[Any], str]] = {
    "int": lambda value: str(value.i),
    "bool": lambda value: "true" if value.b else "false",
    "float": lambda value: f"{np.float32(value.f):.6g}",
    "string": lambda value: value.s.decode(errors="replace"),
    "list(int)": lambda value: ":".join(map(str, value.list.i)),
}


def output_dtype_names(node: NodeDef) -> list[str]:
    """Returns each output's dtype as `dtype_name` spells it."""
    return [_dtype_name(dtype) for dtype in output_dtypes(node)]
