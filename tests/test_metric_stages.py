"""The stage of each metric, and metrics of outputs that are made before the last stage."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from equivalence import pair, pipeline
from models_for_tests import assert_close
from program_text import read_program
from programs import apply

from graph_passes.ir.graph import Ref
from graph_passes.passes.assign_stages import AssignStages

layers, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X = RNG.normal(size=(9, 6)).astype("float32")
Y = [RNG.normal(size=(9, width)).astype("float32") for width in (5, 2)]


# ---- structure


def test_a_metric_is_in_the_stage_of_what_it_reads_and_no_sum_over_a_slice_crosses_the_cut() -> None:
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
    by_hand = read_program(text, metrics={name: f"{name}_update" for name in ("early", "both", "mixed")})
    program = apply(by_hand, AssignStages(("a",)))
    first = {"early_update", "early_sum"}
    later = {"both_update", "h", "y", "a/mixed", "a/sum", "b/mixed"}
    assert {program.node_stage[name] for name in first} == {0}
    assert {program.node_stage[name] for name in later} == {1}
    assert [boundary.ref for boundary in program.boundaries] == [Ref("a/tanh")]


# ---- numbers


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


def test_three_stages_with_outputs_and_metrics_of_all_kinds() -> None:
    """Layers of two stages update the same metrics; others read outputs of several stages, or keep a maximum.

    An early output's loss was halved with two early replicas and doubled with two late ones; so were sums of metrics.
    """

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
            weighted_metrics={"a": ["mse"]},
            metrics={
                "a": [Largest("peak")],
                "b": [keras.metrics.AUC(name="auc"), "mae"],
                "c": ["accuracy", "cosine_similarity", keras.metrics.R2Score()],
            },
        )
        return model

    y = {"a": RNG.normal(size=(9, 6)), "b": RNG.integers(0, 2, size=(9, 6)), "c": np.eye(3)[RNG.integers(0, 3, size=9)]}
    weights = {name: RNG.uniform(0.1, 3, size=9).astype("float32") for name in y}
    own, plain = pair(build)
    plain.run_eagerly = False  # Operator by operator Keras weighs the losses of outputs with other numbers of samples.
    pipelined = pipeline(own, ["a", "b"], [2, 1, 2], 2, 5)
    options = {"sample_weight": weights, "batch_size": 5, "verbose": 0}
    logs = [
        [model.fit(X, y, shuffle=False, **options).history, model.evaluate(X, y, return_dict=True, **options)]
        for model in (pipelined, plain)
    ]
    assert_close(*logs, 2e-5)
