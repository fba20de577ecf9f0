"""A model's own gradients (``tf.custom_gradient``; TensorFlow's ``swish`` has one, too) as graphs, and Python code's.

TensorFlow keeps them as Python functions over tensors of the graph in which they were traced. In a copy of that graph,
such as a stage's, they would mix tensors of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from dapple_tf.errors import CaptureError, reason
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.graph import CAPTURED_ATTR, LAYER_ATTR, OWN_GRADIENT_ATTR, GraphDef, Ref, all_nodes
from graph_passes.ir.tensorflow_bridge import function_body_name, make_constant
from graph_passes.ir.tensorflow_private import (
    code_of,
    custom_gradient,
    functions_of,
    python_function,
    registered_gradient,
)

_TYPE = "_gradient_op_type"
_OWN_TYPE = "DappleCustomGradient"
_PYTHON_FUNCTION = "EagerPyFunc"
_PYTHON_OPS = frozenset({_PYTHON_FUNCTION, "PyFunc", "PyFuncStateless"})
_PYTHON_TYPE = "DapplePyFunction"


@dataclasses.dataclass(frozen=True)
class CustomGradient:
    """A gradient that a model defines itself.

    Attributes:
        function: the library function whose body has the node; empty for the graph itself.
        node: name of the IdentityN that TensorFlow puts behind a computation with its own gradient.
        captured: tensors that the gradient needs, as nodes of the graph (or of the function) read them.
        dtypes: their dtypes.
        graph: the gradient.
    """

    function: str
    node: str
    captured: tuple[str, ...]
    dtypes: tuple[int, ...]
    graph: GraphDef


class Readings(Protocol):
    """A trace's record of the variables that layers read.

    Attributes:
        updates: (variable, value), in the order of assignments.
    """

    updates: list[tuple[Any, Any]]

    def watching(self) -> contextlib.AbstractContextManager[list[Any]]:
        """Yields a list of the values of trainable variables that are read inside the context, each once."""

    def again(self) -> Any:
        """Returns readings of the present values, as a context: even later; what layers assign there is lost."""


@contextlib.contextmanager
def gradients_of_variables(readings: Readings) -> Iterator[None]:
    """Gives custom gradients the variables that their functions read by themselves, inside the context.

    TensorFlow does so with its variables, for gradients that take ``variables``, such as those of
    ``tf.recompute_grad``. While a model is traced, tensors stand for variables, and go to the gradient in their place.
    """

    def decorated(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if kwargs:
                return original(function, args, kwargs)
            args = tf.nest.map_structure(tf.convert_to_tensor, args, expand_composites=True)
            before = len(readings.updates)
            with readings.watching() as values:
                result, differentiate = function(*args)
            assigned = {id(variable) for variable, _ in readings.updates[before:]}
            again = readings.again()
            signature = inspect.getfullargspec(differentiate)
            takes = "variables" in (*signature.args, *signature.kwonlyargs) or signature.varkw is not None
            if values and not takes:
                raise TypeError(
                    "a gradient of tf.custom_gradient must take variables=None and return their gradients, too: the "
                    "function reads trainable variables by itself"
                )

            def gradients(*arriving: Any) -> list[Any]:
                with again:
                    given = {"variables": list(values)} if values else {}
                    made = differentiate(*arriving, **given)
                for variable, _ in again.updates:
                    if id(variable) not in assigned:  # What the function has assigned, it may compute again.
                        raise ValueError(f"it assigns variable {variable.path!r}: assign it in the layer's call")
                of_arguments, of_variables = made if values else (made, [])
                return [*tf.nest.flatten(of_arguments), *of_variables]

            return original(lambda *_: (result, gradients), [*args, *values], {})

        return call

    with replaced(custom_gradient, "_graph_mode_decorator", decorated):
        yield


def custom_gradients(graph: Any) -> list[CustomGradient]:
    """Traces the custom gradients of operations of a ``tf.Graph`` and of the functions that it calls.

    Raises:
        CaptureError: one can't be traced.
    """
    gradients = list(_traced(graph, "", None))
    for name, function in functions_of(graph).items():
        if hasattr(function, "graph"):
            arguments = [arg.name for arg in function.cached_definition.signature.input_arg]
            gradients += _traced(function.graph, name, arguments)
    return gradients


def write_gradients(graph: GraphDef, gradients: Sequence[CustomGradient]) -> None:
    """Attaches gradients to the nodes of a GraphDef, which then also read the tensors that the gradients need."""
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    for gradient in gradients:
        node = next(node for node in bodies.get(gradient.function, graph.node) if node.name == gradient.node)
        waits = [text for text in node.input if text.startswith("^")]
        inputs = [text for text in node.input if not text.startswith("^")]
        del node.input[:]
        node.input.extend([*inputs, *gradient.captured, *waits])
        node.attr["T"].list.type.extend(gradient.dtypes)
        node.attr[_TYPE].s = _OWN_TYPE.encode()
        node.attr[CAPTURED_ATTR].i = len(gradient.captured)
        node.attr[OWN_GRADIENT_ATTR].s = gradient.graph.SerializeToString(deterministic=True)


def _traced(graph: Any, function: str, arguments: Sequence[str] | None) -> Iterator[CustomGradient]:
    for operation in graph.get_operations():
        told = operation.node_def.attr[_TYPE].s.decode() if _TYPE in operation.node_def.attr else ""
        if operation.type == "IdentityN" and told.startswith("CustomGradient-"):
            captured, gradient = _trace(graph, operation, registered_gradient(told))
            if arguments is not None and len(graph.inputs) > len(arguments):
                raise CaptureError(
                    f"the custom gradient of {operation.name!r}, in a loop or branch, needs a tensor from outside that "
                    f"the loop or branch itself doesn't: compute with it there, too"
                )
            names = tuple(_name(graph, tensor, arguments) for tensor in captured)
            dtypes = tuple(tensor.dtype.as_datatype_enum for tensor in captured)
            yield CustomGradient(function, operation.name, names, dtypes, gradient)


def _trace(graph: Any, operation: Any, differentiate: Any) -> tuple[Sequence[Any], GraphDef]:
    """Returns the tensors of a graph that an operation's gradient needs, and the gradient."""
    numbers = [number for number, output in enumerate(operation.outputs) if _is_differentiable(output)]
    given: list[int] = []  # the inputs that have gradients

    def gradients(*arriving: Any) -> list[Any]:
        of_outputs = dict(zip(numbers, arriving, strict=True))
        results = differentiate(operation, *(of_outputs.get(number) for number in range(len(operation.outputs))))
        given[:] = [number for number, result in enumerate(results) if result is not None]
        return [tf.convert_to_tensor(results[number]) for number in given]

    specs = [tf.TensorSpec(operation.outputs[number].shape, operation.outputs[number].dtype) for number in numbers]
    try:
        with graph.as_default():
            traced = tf.function(gradients, autograph=False).get_concrete_function(*specs)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise CaptureError(f"the custom gradient of {operation.name!r} can't be traced: {reason(error)}") from error
    body = traced.graph
    renaming = {tensor.op.name: f"gradient{number}" for tensor, number in zip(body.inputs, numbers, strict=False)}
    renaming |= {tensor.op.name: f"result{number}" for tensor, number in zip(body.outputs, given, strict=True)}
    captured: list[Any] = []
    constants: dict[str, Any] = {}
    for tensor, inner in zip(traced.captured_inputs, body.inputs[len(numbers) :], strict=True):
        if isinstance(tensor, tf.__internal__.EagerTensor):
            constants[inner.op.name] = tensor.numpy()
        else:
            renaming[inner.op.name] = f"captured{len(captured)}"
            captured.append(tensor)
    gradient: GraphDef = body.as_graph_def()
    for node in gradient.node:
        if node.name in constants:
            make_constant(node, constants[node.name])
    return captured, _without_placeholders(_renamed(gradient, renaming))


def _renamed(graph: GraphDef, renaming: dict[str, str]) -> GraphDef:
    """Renames some nodes of a graph, and the others so that no name can be taken for these."""
    for node in graph.node:
        inputs = [_other(text, renaming) for text in node.input]
        del node.input[:]
        node.input.extend(inputs)
        node.name = _other(node.name, renaming)
        node.attr.pop("_class", None)
        node.device = ""
    return graph


def _without_placeholders(graph: GraphDef) -> GraphDef:
    """Returns a graph without its arguments, which would be imported, too, and in a function fed by nothing."""
    stripped = GraphDef(versions=graph.versions, library=graph.library)
    stripped.node.extend(node for node in graph.node if not node.name.startswith(("gradient", "captured")))
    return stripped


def _other(text: str, renaming: dict[str, str]) -> str:
    start = "^" if text.startswith("^") else ""
    name, colon, output = text.removeprefix("^").partition(":")
    return f"{start}{renaming.get(name, f'inner/{name}')}{colon}{output}"


def _name(graph: Any, tensor: Any, arguments: Sequence[str] | None) -> str:
    """Returns a tensor's name for nodes of its graph, or of a function with these arguments."""
    if arguments is None:
        return str(Ref.parse(tensor.name))
    for number, argument in enumerate(graph.inputs):
        if argument is tensor:
            return arguments[number]
    return function_body_name(tensor.op.node_def, tensor.value_index)


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


@tf.RegisterGradient(_OWN_TYPE)
def _differentiate(operation: Any, *gradients: Any) -> list[Any]:
    """Returns the gradients of an IdentityN's inputs, in the graph in which the gradient is being made."""
    graph = GraphDef.FromString(operation.node_def.attr[OWN_GRADIENT_ATTR].s)
    results = [int(node.name.removeprefix("result")) for node in graph.node if node.name.startswith("result")]
    first = len(operation.outputs) - int(operation.node_def.attr[CAPTURED_ATTR].i)
    given = {f"gradient{number}": gradient for number, gradient in enumerate(gradients[:first])}
    given |= {f"captured{number}": tensor for number, tensor in enumerate(operation.inputs[first:])}
    read = {text.partition(":")[0] for node in graph.node for text in node.input}
    # In the gradient of a loop, the loop's own tensors come from another graph; Identity captures them.
    there = {name: tf.identity(tensor) for name, tensor in given.items() if {name, f"^{name}"} & read}
    inputs = {text: tensor for name, tensor in there.items() for text in {name, f"^{name}"} & read}
    wanted = [f"result{number}:0" for number in results]
    of_inputs = dict(zip(results, tf.graph_util.import_graph_def(graph, inputs, wanted, name="custom"), strict=True))
    return [of_inputs.get(number) for number in range(len(operation.inputs))]


# ---- Python code that a model runs as an operator: tf.py_function and tf.numpy_function

# It lives in the process that traced the model. TensorFlow differentiates its last recorded run, which may belong to
# any slice; here the code runs again for its gradient.


def own_gradients(graph: GraphDef) -> None:
    """Gives the calls of ``tf.py_function`` in a GraphDef the gradients of their own slice."""
    for node in all_nodes(graph):
        if node.op == _PYTHON_FUNCTION:
            node.attr[_TYPE].s = _PYTHON_TYPE.encode()


def check_py_functions(graph: GraphDef, addresses: Sequence[str]) -> None:
    """Refuses Python code if devices are in other processes.

    Args:
        graph: a captured model.
        addresses: addresses of the workers; empty for devices of this process.

    Raises:
        CaptureError: the graph has Python code; the text names the layer.
    """
    for node in all_nodes(graph) if addresses else ():
        if node.op in _PYTHON_OPS:
            layer = node.attr[LAYER_ATTR].s.decode() if LAYER_ATTR in node.attr else node.name
            raise CaptureError(
                f"layer {layer!r} calls tf.py_function or tf.numpy_function: its Python code is in this process, but "
                f"the devices are those of workers ({', '.join(addresses)}). Write it with TensorFlow's operations, "
                f"move it into the input pipeline, or train on devices of this process"
            )


@tf.RegisterGradient(_PYTHON_TYPE)
def _differentiate_python(operation: Any, *gradients: Any) -> list[Any]:
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
