"""Names for the variables of a model and its optimizer, and the variables for these names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import seeds_of
from dapple_tf.frontend.initialization import value_of
from dapple_tf.frontend.step_logs import StepLogs
from graph_passes.ir.graph import Names, Ref, dtype_attr, make_node, shape_attr
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.tensorflow_bridge import empty_graph


def read_tensor(variable: keras.Variable) -> tf.Tensor:
    """Returns the value of a variable that has one, by a single operation: Keras makes several."""
    own = variable.value
    return tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype)


def read_value(variable: keras.Variable) -> np.ndarray:
    """Returns the value of a variable that has one."""
    return np.asarray(read_tensor(variable).numpy())


def placeholders_of(variables: Mapping[str, keras.Variable]) -> list[tf.Tensor]:
    """Makes a placeholder for each variable, all at once: one by one they take a tenth of a trace."""
    graph = empty_graph()
    for name, variable in variables.items():
        dtype = tf.as_dtype(variable.dtype).as_datatype_enum
        attrs = {"dtype": dtype_attr(dtype), "shape": shape_attr(variable.shape)}
        graph.node.append(make_node(f"variable/{name}", "Placeholder", attrs=attrs))
    tensors = [f"{node.name}:0" for node in graph.node]
    return list(tf.graph_util.import_graph_def(graph, return_elements=tensors, name=""))


def assign_value(variable: keras.Variable, value: np.ndarray) -> None:
    """Assigns a value of the right shape to a variable that has one, by a single operation, too."""
    own = variable.value
    tf.raw_ops.AssignVariableOp(resource=own.handle, value=tf.constant(value, own.dtype))


class VariableTable:
    """The Keras variables of a model and its optimizer by names that are unique and legal for TensorFlow's nodes.

    Attributes:
        keras_variables: name -> Keras variable.
        logs: "train" or "test" -> logs of the model's own step, see `own_steps.py`.
        applied_by: the optimizer's method that steps call; the model's own step may call another than Keras' own.
        outputs: key of batches' structure -> structure of a prediction's outputs, with 0 for each array.
        batch_logs: ("train" or "test", number of a log) -> the variable for its sum over the slices of one batch.
    """

    def __init__(self, model: keras.Model) -> None:
        self._names = Names()
        self.logs: dict[str, StepLogs] = {}
        self.applied_by = "apply_gradients"
        self.outputs: dict[str, Any] = {}
        self.batch_logs: dict[tuple[str, int], keras.Variable] = {}
        self.keras_variables: dict[str, keras.Variable] = {}
        self._kinds: dict[str, VariableKind] = {}
        self._name_of: dict[int, str] = {}
        metrics = {id(variable) for variable in model.metrics_variables}
        trainable = {id(variable) for variable in model.trainable_variables}
        for variable in [*model.variables, *seeds_of(model)]:
            if id(variable) not in metrics:
                kind = VariableKind.PARAMETER if id(variable) in trainable else VariableKind.STATE
                self.add(variable, kind)

    def add(self, variable: keras.Variable, kind: VariableKind, prefix: str = "") -> str:
        """Adds a variable, once; returns its name."""
        if id(variable) not in self._name_of:
            name = self._names.fresh(
                prefix + (re.sub(r"[^A-Za-z0-9_./-]", "_", variable.path).strip("/_") or "variable")
            )
            self._name_of[id(variable)] = name
            self.keras_variables[name] = variable
            self._kinds[name] = kind
        return self._name_of[id(variable)]

    def add_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Adds slots, counters and hyperparameters."""
        for variable in optimizer.variables:
            self.add(variable, VariableKind.OPTIMIZER, "optimizer/")

    def knows(self, variable: keras.Variable) -> bool:
        """Whether the variable is in the table."""
        return id(variable) in self._name_of

    def name_of(self, variable: keras.Variable) -> str:
        """Returns the name of a variable.

        Raises:
            KeyError: it isn't in the table.
        """
        return self._name_of[id(variable)]

    def describe(self, name: str, value: Ref | None = None, update: Ref | None = None) -> Variable:
        """Returns the variable as passes see it."""
        variable = self.keras_variables[name]
        dtype = tf.dtypes.as_dtype(keras.backend.standardize_dtype(variable.dtype)).as_datatype_enum
        return Variable(name, dtype, tuple(variable.shape), self._kinds[name], value, update)

    def kind_of(self, name: str) -> VariableKind:
        """Returns what a variable is for."""
        return self._kinds[name]

    def value(self, name: str) -> np.ndarray:
        """Returns the Keras value of a variable; if it has none yet, its initial value."""
        return value_of(self.keras_variables[name])
