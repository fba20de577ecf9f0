"""A pass of one's own: gradients cross the links between devices as bfloat16, half the bytes of float32.

    python docs/examples/bfloat16_gradients.py

Trains a small model on two devices with the pass and without it, and compares.
"""

import dataclasses
from typing import Any, ClassVar

import keras
import numpy as np
from tensorflow.core.framework.types_pb2 import DT_BFLOAT16, DT_FLOAT

import dapple_tf as dapple
from graph_passes.ir.graph import BYTES_ATTR, Builder, Ref, copied, dtype_attr, reroute
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Fact, Program


@dataclasses.dataclass(frozen=True)
class CompressGradients:
    """All-reduces float32 gradients as bfloat16: pack -> Cast -> all-reduce -> Cast -> apply."""

    name: ClassVar[str] = "compress_gradients"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)

    def run(self, program: Program) -> Program:
        """A complete step -> the same, which reduces half the bytes."""
        graph = copied(program.graph)
        builder = Builder(graph)
        narrow, wide = dtype_attr(DT_BFLOAT16), dtype_attr(DT_FLOAT)
        restored = {}
        for node in list(graph.node):
            if NodeKind.of(node) is NodeKind.ALL_REDUCE and node.attr["T"].type == DT_FLOAT:
                where = node.device
                vector, reduced = Ref.parse(node.input[0]), Ref(node.name)
                small = builder.add(f"{node.name}/small", "Cast", [vector], device=where, SrcT=wide, DstT=narrow)
                node.input[0] = str(small)
                node.attr["T"].CopyFrom(narrow)
                node.attr[BYTES_ATTR].i //= 2
                restored[reduced] = builder.add(
                    f"{node.name}/restored", "Cast", [reduced], device=where, SrcT=narrow, DstT=wide
                )
        reroute(graph, restored)
        return program.replace(graph=graph)


def trained(gradients: str, **options: Any) -> keras.Model:
    """A small model after two epochs on two devices."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 16)).astype("float32")
    plan = dapple.Plan.data_parallel(2, 16)
    with dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan, **options) as pipelined:
        history = pipelined.fit(x, x.sum(axis=1), batch_size=16, epochs=2, shuffle=False, verbose=0)
    print(f"{gradients} gradients: loss {history.history['loss'][-1]:.3f}")
    return model


if __name__ == "__main__":
    whole = trained("float32")
    compressed = trained("bfloat16", passes=[dapple.After("update", CompressGradients())])
    pairs = zip(whole.weights, compressed.weights, strict=True)
    apart = max(float(np.max(np.abs(a.numpy() - b.numpy()))) for a, b in pairs)
    print(f"weights differ by at most {apart:.1e}")
