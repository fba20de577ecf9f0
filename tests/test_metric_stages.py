"""The stage of each metric, and metrics of outputs that are made before the last stage."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import pair, pipeline
from program_text import read_program
from programs import METRIC, apply, compiled

from dapple_tf.frontend.batch import spec_of
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program
from graph_passes.passes.assign_stages import AssignStages

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X = RNG.normal(size=(9, 6)).astype("float32")
Y = [RNG.normal(size=(9, width)).astype("float32") for width in (5, 2)]


# ---- structure


@functools.cache
def metrics_by_hand() -> Program:
    """Two layers; ``early`` sums up the first one's tensor, ``both`` reads both, and ``mixed`` is updated in both."""
    text = """
        x[?, 2], early[], both[], mixed[]
        a/tanh = Tanh(x)
        a/sum = Sum(a/tanh, [0, 1])
        a/mixed = AddV2(mixed, a/sum)
        b/tanh = Tanh(a/tanh)
        b/sum = Sum(b/tanh, [0, 1])
        b/mixed = AddV2(a/mixed, b/sum)
        loss = L2Loss(b/tanh)
        h = Sum(a/tanh, [0, 1])
        y = Sum(b/tanh, [0, 1])
        product = Mul(h, y)
        early_sum = Sum(a/tanh, [0, 1])
        early_update = AddV2(early, early_sum)
        both_update = AddV2(both, product)
        mixed_update = Identity(b/mixed)
    """
    return read_program(text, metrics={name: f"{name}_update" for name in ("early", "both", "mixed")})


def test_a_metric_is_in_the_stage_of_what_it_reads_and_no_sum_over_a_slice_crosses_the_cut() -> None:
    program = apply(metrics_by_hand(), AssignStages(("a",)))
    stages = {
        name: program.node_stage[name]
        for name in ("early_update", "early_sum", "both_update", "h", "y", "a/mixed", "a/sum", "b/mixed")
    }
    assert stages == {"early_update": 0, "early_sum": 0} | dict.fromkeys(list(stages)[2:], 1)
    assert [boundary.ref for boundary in program.boundaries] == [Ref("a/tanh")]


def two_outputs() -> keras.Model:
    i = keras.Input((6,))
    d = layers.Dense(5, "tanh", name="d")(layers.Dense(6, "tanh")(i))
    metrics = [["mae"], ["mae"]]
    return compiled(i, [d, layers.Dense(2, name="e")(d)], loss=["mae", "mse"], metrics=metrics)


def test_all_of_a_metric_is_in_one_stage() -> None:
    """The count of a mean may depend on nothing that a stage has made, but counts the slices of one stage."""
    model = two_outputs()
    table, spec = VariableTable(model), spec_of(model, X, Y)
    build(model, table, spec)
    program = apply(capture(model, table, Mode.TRAIN, spec), AssignStages(("d",)))
    stages: dict[str | None, set[int]] = {}
    for variable in program.roles.variables:
        if variable.kind is METRIC and variable.update is not None:
            stages.setdefault(variable.metric, set()).add(program.node_stage[variable.update.node])
    assert sorted(map(tuple, stages.values())) == [(0,), (0,), (1,), (1,)]


# ---- numbers


def logs_of(model: Any, x: Any, y: Any, weights: Any) -> list[Any]:
    """What `fit`, `evaluate` and the methods for one batch say of metrics; the batches are uneven."""
    history = model.fit(x, y, sample_weight=weights, batch_size=5, shuffle=False, verbose=0, validation_data=(x, y))
    few = keras.tree.map_structure(lambda array: array[:5], (x, y))
    some = None if weights is None else [array[:5] for array in weights]
    one_batch = {"sample_weight": some, "return_dict": True}
    return [
        history.history,
        model.evaluate(x, y, sample_weight=weights, batch_size=5, verbose=0, return_dict=True),
        model.train_on_batch(*few, **one_batch),
        model.test_on_batch(*few, **one_batch),
    ]


def assert_same_logs(build: Any, cuts: list[str], devices: list[list[int]], micro_batches: int, *data: Any) -> Any:
    """Logs of a pipelined model and a plain one; returns the models."""
    own, plain = pair(build)
    plain.run_eagerly = False  # Operator by operator Keras weighs the losses of outputs with other numbers of samples.
    pipelined = pipeline(own, cuts, [len(replicas) for replicas in devices], micro_batches, 5)
    for ours, theirs in zip(logs_of(pipelined, *data), logs_of(plain, *data), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    return pipelined, plain


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "micro_batches", "weighted"),
    [([[0, 1], [2]], 1, False), ([[0], [1, 2]], 2, True), ([[0, 1], [2, 3]], 2, False)],
)
def test_an_output_of_an_early_stage_with_replicas(
    devices: list[list[int]], micro_batches: int, weighted: bool
) -> None:
    """Its loss was halved with two early replicas and doubled with two late ones; so were sums of metrics.

    What was multiplied by the weight of the early stage's slice was averaged over slices as a loss is, and added up
    over the slices of the last stage.
    """

    def build() -> keras.Model:
        model = two_outputs()
        model.compile("adam", loss=["mae", "mse"], metrics=[["mae"], ["mae"]], weighted_metrics=[["mse"], ["mse"]])
        return model

    weights = [RNG.uniform(0.1, 3, size=9).astype("float32") for _ in range(2)] if weighted else None
    pipelined, plain = assert_same_logs(build, ["d"], devices, micro_batches, X, Y, weights)
    for ours, theirs in zip(pipelined.predict(X, verbose=0), plain.predict(X, verbose=0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Largest(keras.metrics.Metric):
    """No sum: its value passes from replica to replica."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any = None, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(y_true if y_pred is None else y_pred)))

    def result(self) -> Any:
        return self.value + 0


class Watched(layers.Layer):
    """Updates metrics, perhaps those of another such layer, too."""

    def __init__(self, name: str, *metrics: keras.metrics.Metric) -> None:
        super().__init__(name=name)
        self.watching = list(metrics) or [keras.metrics.Mean("seen"), keras.metrics.Mean("scalar"), Largest("top")]

    def call(self, x: Any) -> Any:
        self.watching[0].update_state(x)
        self.watching[1].update_state(ops.mean(x * x))
        self.watching[2].update_state(x)
        return 1.5 * x


class Crossed(keras.Model):
    """Metrics that read outputs of several stages."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.products, self.sums = keras.metrics.Mean("products"), keras.metrics.Sum("sums")
        self.means = keras.metrics.Mean("means")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        super().compute_metrics(x, y, y_pred, sample_weight)
        self.products.update_state(ops.sum(y_pred["a"], -1) * ops.sum(y_pred["c"], -1) ** 2)
        self.sums.update_state(ops.sum(y_pred["a"] * x) + ops.sum(y_pred["b"][:, 0] * y_pred["c"][:, 0]))
        self.means.update_state(ops.mean(y_pred["a"]) + ops.mean(y_pred["c"]))
        return self.get_metrics_result()


@pytest.mark.thorough
@pytest.mark.slow
def test_three_stages_with_outputs_and_metrics_of_all_kinds() -> None:
    """Layers of two stages update the same metrics; others read outputs of several stages, or keep a maximum."""

    def build() -> keras.Model:
        first = Watched("first")
        i = keras.Input((6,))
        a = layers.Dense(6, "tanh", name="a")(first(i))
        b = layers.Dense(6, "sigmoid", name="b")(Watched("second", *first.watching)(a))
        c = layers.Dense(3, "softmax", name="c")(b)
        model = Crossed(i, {"a": a, "b": b, "c": c})
        model.compile(
            keras.optimizers.SGD(0.1),
            loss={"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mae", "c": "categorical_crossentropy"},
            metrics={
                "a": [Largest("peak")],
                "b": [keras.metrics.AUC(name="auc"), "mae"],
                "c": ["accuracy", "cosine_similarity", keras.metrics.R2Score()],
            },
        )
        return model

    y = {"a": RNG.normal(size=(9, 6)), "b": RNG.integers(0, 2, size=(9, 6)), "c": np.eye(3)[RNG.integers(0, 3, size=9)]}
    assert_same_logs(build, ["a", "b"], [[0, 1], [2], [3, 4]], 2, X, y, None)
