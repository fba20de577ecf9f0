"""TensorFlow's collective operations as nodes of a step's top level."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Builder, Ref, dtype_attr
from graph_passes.ir.replica_sums import SUM_OP

HINT_ATTR = "communication_hint"
RING, NCCL = "auto", "nccl"
"""Who adds up: TensorFlow by a ring of copies, which need no order; NCCL by kernels, which wait for each other."""


def all_reduce(
    builder: Builder,
    name: str,
    vector: Ref,
    dtype: int,
    keys: tuple[int, int, int],
    *,
    device: str,
    control: Iterable[str] = (),
    **attrs: Any,
) -> Ref:
    """Adds one member of an all-reduce; returns the sum over all members, or the largest or smallest.

    Args:
        builder: adds the node.
        name: the node's name.
        vector: the member's part.
        dtype: its dtype.
        keys: number of members, key of these members, and number of this all-reduce among theirs.
        device: the member's device.
        control: nodes that it waits for.
        **attrs: further attributes; ``merge_op`` is ``"Add"``, and `HINT_ATTR` is `RING`, if they aren't among them.
    """
    numbers = [builder.const(value, types_pb2.DT_INT32, device=device) for value in keys]
    return builder.add(
        name,
        SUM_OP,
        [vector, *numbers],
        control=control,
        device=device,
        T=dtype_attr(dtype),
        final_op="Id",
        # No timeout: TensorFlow would start a thread for each, which sleeps until it is over in any case.
        timeout_seconds=0.0,
        Nordering_token=0,
        max_subdivs_per_device=-1,
        **{"merge_op": "Add", HINT_ATTR: RING, **attrs},
    )
