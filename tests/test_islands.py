"""More devices behind slow links never make a placement slower."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from op_graphs import Builder, chain_network, nasnet_like, topology
from placements import simulate_placement

from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.islands import largest_island, on_island
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.split_graph import apply_splits


def servers(*sizes: int, slower: float = 1e-2) -> Topology:
    """Devices of several servers, with links between these that are so much slower than those inside."""
    whole = topology(sum(sizes))
    server = np.repeat(np.arange(len(sizes)), sizes)
    between = server[:, None] != server[None, :]
    return dataclasses.replace(whole, bandwidth=np.where(between, slower * 12e9, whole.bandwidth))


@pytest.mark.parametrize(
    ("links", "island"),
    [
        (servers(2, 2), (0, 1)),
        (servers(1, 3), (1, 2, 3)),
        (servers(2, 2, slower=0.6), (0, 1, 2, 3)),
        (topology(3), (0, 1, 2)),
        (topology(1), (0,)),
        (topology(3, bandwidth=np.inf), (0, 1, 2)),
    ],
)
def test_the_largest_island(links: Topology, island: tuple[int, ...]) -> None:
    assert largest_island(links) == island


def test_operators_that_are_pinned_elsewhere_cant_move_to_an_island() -> None:
    builder = Builder(4, pins={"w": 3})
    builder.add("Read", 1.0, 8.0, group="w")
    assert on_island(builder.graph(), servers(2, 2), (0, 1)) is None
    own = on_island(builder.graph(), servers(2, 2), (2, 3))
    assert own is not None
    assert own[0].pinned.tolist() == [1]
    assert own[1].names == ("/device:GPU:2", "/device:GPU:3")


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "cells"])
def test_a_second_server_behind_a_slow_link_isnt_slower_than_the_first_alone(kind: str) -> None:
    def graph(devices: int) -> OpGraph:
        return chain_network(devices, layers=4) if kind == "chain" else nasnet_like(devices, cells=1)

    alone, both = fd_dps(graph(2), topology(2), effort=0.5), fd_dps(graph(4), servers(2, 2))
    assert both.seconds <= alone.seconds
    assert len(both.peak_bytes) == 4
    split = apply_splits(graph(4), both.splits)
    number = {name: index for index, name in enumerate(split.names)}
    devices = np.array([both.devices[name] for name in split.names])
    order = np.array([number[name] for name in both.order])
    assert simulate_placement(split, servers(2, 2), devices, order).seconds == both.seconds
