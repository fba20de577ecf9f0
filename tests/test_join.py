"""The step of a single device with one micro-batch is one function."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from equivalence import assert_same_training, assert_same_variables, pair, pipeline, use_float64
from programs import layout, staged, two_layers, two_stages, unchanged, updated
from step_programs import of_model

import dapple_tf as dapple
from graph_passes.errors import PassError
from graph_passes.ir.graph import NodeDef
from graph_passes.ir.program import Layout, Program
from graph_passes.passes.join import Join

BATCH = 6


def model(
    optimizer: keras.optimizers.Optimizer | None = None,
    dropout: float = 0.2,
    normalization: type[keras.layers.Layer] = keras.layers.BatchNormalization,
) -> keras.Model:
    """With all that a step assigns: slots, moving averages, a seed and metrics."""
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", name="first"),
            normalization(name="norm"),
            keras.layers.Dropout(dropout, seed=2, name="dropout"),
            keras.layers.Dense(3, name="last"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer or keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return made


def batch(samples: int = BATCH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(samples, 4)), draw.integers(0, 3, samples)


def calls(program: Program) -> list[NodeDef]:
    return [node for node in program.graph.node if node.op.endswith("PartitionedCall")]


def joined(**options: object) -> Program:
    keras.utils.set_random_seed(1)
    trained = model()
    trained(batch()[0])
    trained.optimizer.build(trained.trainable_variables)
    plan = dapple.Plan.manual([], [[0]], 1, BATCH, **options)
    return of_model(trained, plan, dapple.Cluster.local(1, kind="cpu"))


def test_metrics_stay_outside_of_what_xla_compiles() -> None:
    program = joined(jit_compile=True)
    by_name = {node.name: node for node in calls(program)}
    assert len(by_name) == 2 and "joined" in by_name
    (metrics,) = (name for name in by_name if name != "joined")
    assert "metrics" in metrics
    functions = {f.signature.name: f for f in program.graph.library.function}
    (compiled,) = (f for f in functions.values() if f.attr["_XlaMustCompile"].b and "joined" in f.signature.name)
    assert not [node.op for node in compiled.node_def if node.op == "VarHandleOp"]


@pytest.mark.parametrize(
    ("program", "cut", "text"),
    [
        (two_stages(), layout([1, 1], 4), "a step's tasks are on 2 devices; only those of one"),
        (staged(two_layers()), layout([1], 4, 2), "a step has 2 micro-batches"),
    ],
)
def test_several_devices_and_micro_batches_are_refused(program: Program, cut: Layout, text: str) -> None:
    program = updated(program, cut)
    with unchanged(program), pytest.raises(PassError, match=text):
        Join().run(program)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
}
"""One that needs all gradients before it updates anything has computations between the backward and the update."""


@pytest.mark.parametrize(("optimizer", "cuts", "jit_compile"), [("clipped", ("norm",), False), ("adam", (), True)])
def test_it_trains_as_plain_keras(optimizer: str, cuts: tuple[str, ...], jit_compile: bool) -> None:
    use_float64()
    # XLA draws other random numbers.
    own, plain = pair(lambda: model(OPTIMIZERS[optimizer](), dropout=0.0 if jit_compile else 0.2))
    plan = dapple.Plan.manual(cuts, [[0]] * (len(cuts) + 1), 1, BATCH, jit_compile=jit_compile)
    pipelined = dapple.transform(own, dapple.Cluster.local(1, kind="cpu"), plan)
    assert_same_training(pipelined, plain, [(*batch(), None), (*batch(4, 1), None), (*batch(6, 2), None)])


def test_traced_steps_run_stage_functions_one_by_one_and_train_as_well() -> None:
    use_float64()
    traced, plain = pair(model)
    pipelined = pipeline(traced, (), (1,), 1, BATCH)
    for seed in range(3):
        x, y = batch(seed=seed)
        plain.train_on_batch(x, y)
        if seed == 1:
            pipelined.trace_step(x, y)
        else:
            pipelined.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(traced, plain, 1e-10)
    step = pipelined.profile_step(*batch()).step
    assert {str(task) for task in step.tasks} == {"0F0", "0B0"}
    assert "apply" in {span.kind for span in step.timeline.spans}
