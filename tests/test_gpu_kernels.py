"""Steps on GPUs, told without one: by the kernels that this TensorFlow has."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import Computed, values
from programs import BOOL, FLOAT, INT32, INT64
from step_programs import of_model

import dapple_tf as dapple
from dapple_tf.execution.gpu_check import check_kernels
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.models import gpt
from dapple_tf.tools import command, dump_graph
from dapple_tf.tools import plan as plan_tool
from graph_passes.analysis.device_kernels import ON_CPU, REFUSED, SHARED, TO_HOST, UNORDERED, UNPLACED, gpu_report
from graph_passes.ir.collectives import HINT_ATTR, SUM_OP
from graph_passes.ir.graph import COMPILED_ATTR, Builder, Graph, NodeDef, Ref, control_inputs, dtype_attr
from graph_passes.ir.kernels import knows_gpus
from graph_passes.ir.outline import call_node, outline
from graph_passes.ir.storage import merge_library, read
from graph_passes.ir.tensorflow_bridge import empty_graph

pytestmark = pytest.mark.skipif(not knows_gpus(), reason="this TensorFlow has no kernels for GPUs")
layers = keras.layers

GPUS = dapple.Cluster(
    tuple(
        dapple.Device(f"/job:worker/replica:0/task:{number // 2}/device:GPU:{number % 2}", number // 2, 2**34)
        for number in range(4)
    ),
    real=False,
)
"""Two workers with two GPUs each, which don't exist."""


def compiled(inputs: Any, outputs: Any, optimizer: Any = "adam", loss: Any = "mse") -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss)
    return model


def small_gpt() -> keras.Model:
    model = gpt.gpt_tiny(depth=1, sequence=8, vocabulary=16, width=8, dropout=0.1)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def convolutions(synchronized: bool = False) -> keras.Model:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(image)
    for number in range(2):
        y = layers.BatchNormalization(synchronized=synchronized, name=f"norm_{number}")(x)
        y = layers.Conv2D(4, 3, padding="same", name=f"conv_{number}")(layers.ReLU()(y))
        x = layers.Add(name=f"block_{number}")([x, y])
    pooled = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(image, layers.Dense(3, name="logits")(pooled), keras.optimizers.SGD(0.1, momentum=0.9), loss)


def recurrent(kind: type[layers.Layer]) -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="embedding")(words)
    return compiled(words, layers.Dense(1, name="logit")(kind(4, name="recurrent")(x)))


def routed() -> keras.Model:
    x = keras.Input((4,))
    h = layers.Dense(4, name="first")(x)
    h, best, positive = Computed(lambda t: (t * 1.0, tf.argmax(t, axis=-1), t > 0), name="route")(h)
    chosen = Computed(lambda t, b, p: tf.where(p, t, 0.0) * tf.one_hot(b, 4), name="chosen")(h, best, positive)
    return compiled(x, layers.Dense(1, name="last")(chosen))


class Counting(layers.Layer):
    """Counts its calls in an int32."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(2,), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add([1, 1])
        return x


def counted() -> keras.Model:
    x = keras.Input((4,))
    return compiled(x, layers.Dense(2, name="last")(Counting(name="counting")(layers.Dense(3, name="first")(x))))


def plan(cut: str, devices: Sequence[Sequence[int]], schedule: str = "dapple_a", **options: Any) -> dapple.Plan:
    return dapple.Plan.manual([cut], devices, 2, 8, schedule, **{"jit_compile": False, **options})


TWO, FOUR, ONE_TO_TWO = [[0], [1]], [[0, 1], [2, 3]], [[0], [1, 2]]


# A model, its plan, and by part of the step the copies that wait until a GPU has run all that was queued before; nodes
# without a device, and operators of functions that run on the CPU. Numbers may only fall: write what is left of them.
STEPS: dict[str, tuple[Callable[[], keras.Model], dapple.Plan, Mapping[str, int]]] = {
    "recompute": (small_gpt, plan("embedding", TWO, "zero_bubble", recompute="boundary"), {}),
    "placed": (routed, dapple.Plan.by_operators(2, 8), {}),
    "lstm": (lambda: recurrent(layers.LSTM), plan("embedding", TWO), {"backward": 1}),
    "integer_state": (counted, plan("counting", ONE_TO_TWO), {"read": 1}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_on_gpus(name: str) -> None:
    """GPUs have kernels for all that they are to run, and variables of their own, and seldom wait for copies."""
    make, own, most = STEPS[name]
    report = gpu_report(of_model(make(), own, GPUS).graph)
    assert report.of(REFUSED, SHARED, UNORDERED) == {}
    counts = collections.Counter({kind: sum(report.of(kind).values()) for kind in (UNPLACED, ON_CPU)})
    for finding, count in report.counts.items():
        counts[finding.part] += count if finding.kind == TO_HOST else 0
    assert {part: count for part, count in counts.items() if count > most.get(part, 0)} == {}


def test_seeds_and_indices_from_hosts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (2, 8, 6), "int32")

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        words = keras.Input((6,), dtype="int32")
        x = layers.Dropout(0.5, seed=1, name="drop")(layers.Embedding(9, 4, name="embedding")(words))
        model = compiled(words, layers.Dropout(0.5, seed=2)(layers.Dense(1, name="last")(x)))
        own = plan("drop", ONE_TO_TWO, "zero_bubble", recompute="boundary")
        pipelined = dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), own)
        for batch in tokens:
            pipelined.train_on_batch(batch, batch[..., None] / 9)
        return values(pipelined.model)

    expected = trained()
    monkeypatch.setattr(StepPasses, "on_gpus", frozenset(range(2)))
    for own, other in zip(trained(), expected, strict=True):
        np.testing.assert_array_equal(own, other)


def two_slices(builder: Builder, gpu: str, dtype: int, sizes_dtype: int, device: str) -> None:
    value = builder.add("value", "Placeholder", device=device, dtype=dtype_attr(dtype))
    inputs = [value, builder.const([1, 1], sizes_dtype, device=gpu), builder.const(0, INT32, device=gpu)]
    kinds = {"T": dtype_attr(dtype), "Tlen": dtype_attr(sizes_dtype), "num_split": 2}
    builder.add("slices", "SplitV", inputs, device=device, **kinds)


def refused(builder: Builder, gpu: str, _: str) -> None:
    two_slices(builder, gpu, BOOL, INT32, gpu)


def on_the_cpu(builder: Builder, gpu: str, _: str) -> None:
    body = Builder(empty_graph())
    two_slices(body, "", BOOL, INT32, "")
    called(builder, gpu, body, [Ref("slices")])


def shared(builder: Builder, *gpus: str) -> None:
    for gpu in gpus:
        body = Builder(empty_graph())
        called(builder, gpu, body, [read(body, "calls", INT32, [2])])


def called(builder: Builder, gpu: str, body: Builder, results: Sequence[Ref]) -> None:
    arguments = [Ref(node.name) for node in body.graph.node if node.op == "Placeholder"]
    function = outline("function", Graph(body.graph), arguments, results)
    merge_library(builder.graph, [function])
    inputs = [builder.add("fed", "Placeholder", device=gpu, dtype=dtype_attr(BOOL)) for _ in arguments]
    builder.append(call_node("call", function, inputs, device=gpu))


def unplaced(builder: Builder, *gpus: str) -> None:
    for gpu in gpus:
        builder.add("reader", "Identity", [builder.const(1.0, FLOAT)], device=gpu, T=dtype_attr(FLOAT))


def waiting(builder: Builder, gpu: str, _: str) -> None:
    two_slices(builder, gpu, FLOAT, INT64, gpu)


DEFECTS = {
    refused: (REFUSED, {"SplitV(bool)": 1}),
    on_the_cpu: (ON_CPU, {"SplitV(bool)": 1}),
    shared: (SHARED, {"VarHandleOp(int32)": 1}),
    unplaced: (UNPLACED, {"Const(float32)": 1}),
    waiting: (TO_HOST, {"Const -> SplitV (int64)": 1}),
}


@pytest.mark.parametrize("make", DEFECTS)
def test_each_defect_is_found(make: Callable[..., None]) -> None:
    builder = Builder(empty_graph())
    make(builder, *GPUS.device_names[:2])
    kind, counts = DEFECTS[make]
    assert gpu_report(builder.graph).of(kind) == counts


# ---- NCCL


def hints(nodes: Iterable[NodeDef]) -> set[bytes]:
    return {node.attr[HINT_ATTR].s for node in nodes if node.op == SUM_OP}


def test_gradients_are_reduced_by_nccl_in_one_order_and_sums_inside_tasks_by_the_ring() -> None:
    """An order that a device's all-reduces lack is found."""
    own = plan("block_0", [[1, 2], [1, 2]], bucket_bytes=64)
    graph = of_model(convolutions(synchronized=True), own, GPUS).graph
    assert hints(graph.node) == {b"nccl"}
    assert hints(node for function in graph.library.function for node in function.node_def) == {b"auto"}
    assert gpu_report(graph).of(UNORDERED) == {}
    reductions = [node for node in graph.node if node.op == SUM_OP and node.device == GPUS.device_names[1]]
    last = reductions[-1]
    last.input.remove(next(f"^{name}" for name in control_inputs(last) if name in {node.name for node in reductions}))
    assert gpu_report(graph).of(UNORDERED)


# ---- what users are told


class CountingSGD(keras.optimizers.SGD):
    """Counts its updates in an int32."""

    def build(self, variables: Sequence[keras.Variable]) -> None:
        super().build(variables)
        self.updates = self.add_variable(shape=(), dtype="int32", name="updates")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.updates.assign_add(1)
        super().update_step(gradient, variable, learning_rate)


def test_what_gpus_have_no_kernel_for_is_told() -> None:
    builder = Builder(empty_graph())
    refused(builder, *GPUS.device_names[:2])
    with pytest.raises(dapple.DappleError) as told:
        check_kernels(builder.graph)
    assert str(told.value) == (
        "node 'slices' is to run SplitV on /job:worker/replica:0/task:0/device:GPU:0, for which TensorFlow has no GPU "
        "kernel of bool: cast to one of float32, float64, int32, complex64, bfloat16, complex128, float16 before, or "
        "run it on processors"
    )


def test_variables_that_gpus_would_share_are_told_before_a_step() -> None:
    """The session refuses the graph; no GPU is needed for that."""
    x = keras.Input((4,))
    model = compiled(x, layers.Dense(2)(x), CountingSGD())
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(2)]
    cluster = dapple.Cluster(tuple(dapple.Device(name, 0) for name in names))
    pipelined = dapple.transform(model, cluster, dapple.Plan.data_parallel(2, 4))
    with pytest.raises(dapple.DappleError, match=r"'optimizer/.*updates' is int32, .* once for all GPUs of a process"):
        pipelined.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))


def test_the_tools_print_the_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a cluster that doesn't exist, with stages compiled as in training."""
    own = plan("counting", ONE_TO_TWO, jit_compile=None)
    monkeypatch.setattr(plan_tool, "find", lambda: (own, None, GPUS))
    model = f"--model={__name__}:counted"
    assert command.run(plan_tool.main, plan_tool.FLAGS, [model, "--check", "--global_batch_size=8"]) == 0
    GPUS.save(tmp_path / "cluster.json")
    own.save(tmp_path / "plan.json")
    places = [f"--{name}={tmp_path / name}.json" for name in ("cluster", "plan")]
    arguments = [model, *places, f"--output_dir={tmp_path / 'dump'}"]
    assert command.run(dump_graph.main, dump_graph.FLAGS, arguments) == 0
    report = (tmp_path / "dump/train/gpus.txt").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert report in printed
    assert printed.count("GPU to host  read") == 2
    last = max((tmp_path / "dump/train").glob("*_update.pbtxt"))
    assert COMPILED_ATTR in last.read_text(encoding="utf-8")
