"""Python code that a model runs as an operator: ``tf.py_function`` and ``tf.numpy_function``.

It lives in the process that traced the model. TensorFlow differentiates its last recorded run, which may belong to any
slice; here the code runs again for its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dapple_tf.errors import CaptureError
from graph_passes.ir.graph import LAYER_ATTR, GraphDef
from graph_passes.ir.tensorflow_private import code_of, python_function

_DIFFERENTIABLE = "EagerPyFunc"
_OPS = frozenset({_DIFFERENTIABLE, "PyFunc", "PyFuncStateless"})
_GRADIENT_TYPE = "_gradient_op_type"
_OWN_TYPE = "DapplePyFunction"


def own_gradients(graph: GraphDef) -> None:
    """Gives the calls of ``tf.py_function`` in a GraphDef the gradients of their own slice."""
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            if node.op == _DIFFERENTIABLE:
                node.attr[_GRADIENT_TYPE].s = _OWN_TYPE.encode()


def check_py_functions(graph: GraphDef, addresses: Sequence[str]) -> None:
    """Refuses Python code if devices are in other processes.

    Args:
        graph: a captured model.
        addresses: addresses of the workers; empty for devices of this process.

    Raises:
        CaptureError: the graph has Python code; the text names the layer.
    """
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes if addresses else ():
            if node.op in _OPS:
                layer = node.attr[LAYER_ATTR].s.decode() if LAYER_ATTR in node.attr else node.name
                raise CaptureError(
                    f"layer {layer!r} calls tf.py_function or tf.numpy_function: its Python code is in this process, "
                    f"but the devices are those of workers ({', '.join(addresses)}). Write it with TensorFlow's "
                    f"operations, move it into the input pipeline, or train on devices of this process"
                )


@tf.RegisterGradient(_OWN_TYPE)
def _differentiate(operation: Any, *gradients: Any) -> list[Any]:
    """Returns the gradients of a py_function's inputs, by a py_function that runs it again."""
    function = python_function(operation.get_attr("token").decode())
    outputs = [number for number, gradient in enumerate(gradients) if gradient is not None]
    sources = [number for number, tensor in enumerate(operation.inputs) if tensor.dtype.is_floating]
    count, dtypes = len(operation.inputs), [tensor.dtype for tensor in operation.outputs]

    def gradient(*tensors: Any) -> list[Any]:
        inputs, arriving = tensors[:count], tensors[count:]
        with tf.GradientTape() as tape:
            tape.watch([inputs[number] for number in sources])
            results = tf.nest.flatten(code_of(function)(*inputs))
            results = [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
        computed: list[Any] = tape.gradient(
            [results[number] for number in outputs],
            [inputs[number] for number in sources],
            output_gradients=list(arriving),
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return [tf.convert_to_tensor(each) for each in computed]

    arriving = [tf.convert_to_tensor(gradients[number]) for number in outputs]
    of_sources = tf.py_function(
        gradient, [*operation.inputs, *arriving], [operation.inputs[number].dtype for number in sources]
    )
    # TensorFlow forgets Python code with the graph that it was made in, unless something else refers to it.
    vars(function).setdefault("gradients", []).append(gradient)
    for number, result in zip(sources, of_sources, strict=True):
        result.set_shape(operation.inputs[number].shape)
    of_inputs = dict(zip(sources, of_sources, strict=True))
    return [of_inputs.get(number) for number in range(count)]
