"""Kernels of operators on kinds of devices, by TensorFlow's registry: no such device need be there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

from tensorflow.core.framework import kernel_def_pb2, op_def_pb2, types_pb2

from graph_passes.ir.graph import AttrValue, NodeDef
from graph_passes.ir.tensorflow_bridge import (
    attribute,
    input_dtypes,
    op_def,
    output_dtypes,
    takes_functions,
    tensor_count,
)
from graph_passes.ir.tensorflow_private import registered_kernels

KernelDef: TypeAlias = kernel_def_pb2.KernelDef

CPU, GPU = "CPU", "GPU"
"""Kinds of devices, as TensorFlow names them."""
_ANY_KIND = "DEFAULT"
PASSED = frozenset({"Placeholder", "_Arg", "_Retval"})
"""Operators without computation: tensors that are fed, or passed to functions and back."""
ON_HOST = frozenset({types_pb2.DT_STRING, types_pb2.DT_RESOURCE})
"""Dtypes in the host's memory, on all devices."""


def host_of(device: str) -> str:
    """Returns the name of the first CPU of a device's process."""
    return f"{device.rpartition('/')[0]}/device:CPU:0"


def knows_gpus() -> bool:
    """Returns whether this TensorFlow has kernels for GPUs: only then does its registry tell what GPUs can compute."""
    return any(kernel.device_type == GPU for kernel in _registered("MatMul", GPU))


def kernel_of(node: NodeDef, kind: str) -> KernelDef | None:
    """Returns the kernel that TensorFlow takes for a node on a kind of device; None if it has none there."""
    return _chosen(node.op, kind, *(_dtypes(attribute(node, name)) for name in _constrained(node.op, kind)))


def kernel_dtypes(op: str, kind: str, name: str) -> list[int]:
    """Returns the dtypes of an operator's attribute that have kernels on a kind of device."""
    kernels = _registered(op, kind)
    own = (own for kernel in kernels for own in kernel.constraint if own.name == name)
    return sorted({dtype for constraint in own for dtype in constraint.allowed_values.list.type})


@functools.cache
def _registered(op: str, kind: str) -> tuple[KernelDef, ...]:
    """Returns an operator's kernels for a kind of device, specific ones first."""
    kernels = [kernel for kernel in registered_kernels(op).kernel if not kernel.label]
    return tuple(kernel for wanted in (kind, _ANY_KIND) for kernel in kernels if kernel.device_type == wanted)


@functools.cache
def _constrained(op: str, kind: str) -> tuple[str, ...]:
    """Returns the attributes that decide between an operator's kernels."""
    return tuple(dict.fromkeys(own.name for kernel in _registered(op, kind) for own in kernel.constraint))


def _dtypes(value: AttrValue) -> frozenset[int]:
    return frozenset(value.list.type or (value.type,))


@functools.cache
def _chosen(op: str, kind: str, *dtypes: frozenset[int]) -> KernelDef | None:
    by_name = dict(zip(_constrained(op, kind), dtypes, strict=True))
    for kernel in _registered(op, kind):
        if all(by_name[own.name] <= set(own.allowed_values.list.type) for own in kernel.constraint):
            return kernel
    return None


def inputs_on_host(node: NodeDef, kind: str) -> list[bool]:
    """Returns for each input of a node whether it is read from the host's memory on a kind of device."""
    return _on_host(node, kind, op_def(node.op).input_arg, input_dtypes(node))


def outputs_on_host(node: NodeDef, kind: str) -> list[bool]:
    """Returns for each output of a node whether it is made in the host's memory on a kind of device."""
    return _on_host(node, kind, op_def(node.op).output_arg, output_dtypes(node))


def _on_host(node: NodeDef, kind: str, args: Sequence[op_def_pb2.OpDef.ArgDef], dtypes: Sequence[int]) -> list[bool]:
    """Follows `memory_types.cc`: int32 is there where functions take and return it."""
    if kind == CPU:
        return [True] * len(dtypes)
    kernel = kernel_of(node, kind)
    names = () if kernel is None else kernel.host_memory_arg
    there = ON_HOST | {types_pb2.DT_INT32} if node.op in PASSED or takes_functions(node.op) else ON_HOST
    tensors = [arg.name for arg in args for _ in range(tensor_count(arg, node))]
    return [name in names or dtype in there for name, dtype in zip(tensors, dtypes, strict=True)]
