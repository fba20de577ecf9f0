"""Programs as text: the inverse of `graph_passes.ir.text.graph_text`, with shorter forms for what tests write by hand.

    x[?, 2], w[2, 3], n int32[?]                  leaves of the batch begin with ?, others are parameters; float64
    a/matmul = MatMul(x, w)                       a node of layer ``a``; dtypes and numbers of inputs follow from its op
    a/sum = Sum(a/matmul, [0], keep_dims=True)    numbers are constants, whole ones int32
    loss = L2Loss(a/sum)                          what is called so is the loss

``weight``, ``number`` and ``samples``, a slice's scalars, are there already.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry

from graph_passes.ir.graph import LAYER_ATTR, POSITION_ATTR, Builder, Ref, dtype_attr, shape_attr
from graph_passes.ir.program import LayerCall, Program, Roles, Slice, Variable, VariableKind
from graph_passes.ir.tensorflow_bridge import empty_graph

INT32, DOUBLE = types_pb2.DT_INT32, types_pb2.DT_DOUBLE
_DECLARED = re.compile(r"([^\s,\[\]]+)(?: (\w+))?\[(.*?)\]")
_NODE = re.compile(r"(\S+) = (\w+)\((.*?)\)(?: (\w+)\[(.*)\]| \S.*?)??((?: \^\S+)*)$")
_ARGUMENT = re.compile(r"\[[^\]]*\]|[^,\s]+")


def read_program(
    text: str,
    *,
    outputs: Sequence[str] = (),
    states: Mapping[str, str | None] | None = None,
    metrics: Mapping[str, str] | None = None,
    model_end: int | None = None,
) -> Program:
    """Reads a flat program.

    Args:
        text: its nodes, see the module.
        outputs: the model's outputs.
        states, metrics: what isn't a parameter, and by which tensor it is updated.
        model_end: number of nodes of the model; by default after the last layer.
    """
    reader = _Reader()
    for line in text.strip().splitlines():
        reader.read(line.strip())
    return reader.program(outputs, states or {}, metrics or {}, model_end)


class _Reader:
    """A graph that grows line by line."""

    def __init__(self) -> None:
        self.builder = Builder(empty_graph())
        self.dtypes: dict[Ref, int] = {}
        self.shapes: dict[str, tuple[Any, ...]] = {}
        self.layers: dict[str, list[int]] = {}
        self.slice = Slice(*map(self.placeholder, Slice._fields, (DOUBLE, INT32, INT32), [()] * 3))

    def placeholder(self, name: str, dtype: int, shape: Sequence[int | None]) -> Ref:
        ref = self.builder.add(name, "Placeholder", dtype=dtype_attr(dtype), shape=shape_attr(shape))
        self.dtypes[ref] = dtype
        return ref

    def declare(self, name: str, dtype: str | None, sizes: str) -> None:
        if name not in Slice._fields:
            self.shapes[name] = tuple(None if size == "?" else int(size) for size in re.findall(r"[?\d]+", sizes))
            self.placeholder(name, _dtype(dtype or "float64"), self.shapes[name])

    def read(self, line: str) -> None:
        if (node := _NODE.match(line)) is None:
            for declared in _DECLARED.finditer(line):
                self.declare(*declared.groups())
            return
        name, op, arguments, dtype, sizes, control = node.groups()
        start = len(self.builder.graph.node)
        if op == "Placeholder":
            self.declare(name, dtype, sizes)
        elif op == "Const":
            self.constant(line.partition("() ")[2])
        else:
            texts = _ARGUMENT.findall(arguments)
            attrs = dict(text.split("=") for text in texts if "=" in text)
            inputs = [self.argument(text) for text in texts if "=" not in text]
            self.add(name, op, inputs, attrs, [each.lstrip("^") for each in control.split()])
        parts = name.split("/")
        for depth in range(1, len(parts)):
            self.layers.setdefault("/".join(parts[:depth]), [start, 0])[1] = len(self.builder.graph.node)

    def argument(self, text: str) -> Ref:
        return self.constant(text) if text[0] in "[-0123456789" else Ref.parse(text)

    def constant(self, text: str) -> Ref:
        dtype = DOUBLE if "." in text else INT32
        ref = self.builder.const(ast.literal_eval(text), dtype)
        self.dtypes[ref] = dtype
        return ref

    def add(self, name: str, op: str, inputs: list[Ref], given: dict[str, str], control: list[str]) -> None:
        """Adds a node, with the attributes that its op derives from its inputs."""
        definition, rest = op_def_registry.get(op), list(inputs)
        types = {attr.name for attr in definition.attr if attr.type == "type"}
        kinds = {key: _dtype(value) for key, value in given.items() if key in types}
        attrs: dict[str, Any] = {key: ast.literal_eval(value) for key, value in given.items() if key not in types}
        for arg in definition.input_arg:
            count = 1 + len(inputs) - len(definition.input_arg) if arg.number_attr else 1
            own, rest = rest[:count], rest[count:]
            if arg.number_attr:
                attrs[arg.number_attr] = count
            if arg.type_attr:
                kinds.setdefault(arg.type_attr, self.dtypes[own[0]])
        for attr in definition.attr:
            if attr.name in types and attr.HasField("default_value"):
                kinds.setdefault(attr.name, attr.default_value.type)
        attrs |= {key: dtype_attr(value) for key, value in kinds.items()}
        ref = self.builder.add(name, op, inputs, control=control, **attrs)
        outputs = [out for out in definition.output_arg for _ in range(attrs.get(out.number_attr, 1))]
        for index, out in enumerate(outputs):
            self.dtypes[Ref(ref.node, index)] = kinds[out.type_attr] if out.type_attr else out.type

    def program(
        self, outputs: Sequence[str], states: Mapping[str, str | None], metrics: Mapping[str, str], end: int | None
    ) -> Program:
        graph = self.builder.graph
        updates = {name: None if by is None else Ref.parse(by) for name, by in {**states, **metrics}.items()}
        kind = dict.fromkeys(states, VariableKind.STATE) | dict.fromkeys(metrics, VariableKind.METRIC)
        calls = [LayerCall(path, start, stop) for path, (start, stop) in self.layers.items()]
        for position, node in enumerate(graph.node):
            node.attr[POSITION_ATTR].i = position
            for call in calls:
                if call.start <= position < call.stop:
                    node.attr[LAYER_ATTR].s = call.path.encode()
        leaves = [name for name, shape in self.shapes.items() if shape[:1] == (None,)]
        variables = []
        for name in (each for each in self.shapes if each not in leaves):
            role, value = kind.get(name, VariableKind.PARAMETER), Ref(name)
            variables.append(Variable(name, self.dtypes[value], self.shapes[name], role, value, updates.get(name)))
        examples = tuple((None, *(16 if size is None else size for size in self.shapes[name][1:])) for name in leaves)
        loss = Ref("loss") if any(node.name == "loss" for node in graph.node) else None
        stop = max((call.stop for call in calls), default=0) if end is None else end
        inputs, results = tuple(map(Ref, leaves)), tuple(map(Ref.parse, outputs))
        roles = Roles(inputs, tuple(variables), self.slice, (), results, loss, tuple(calls), stop, examples)
        return Program(graph, roles)


def _dtype(name: str) -> int:
    return int(tf.dtypes.as_dtype(name).as_datatype_enum)
