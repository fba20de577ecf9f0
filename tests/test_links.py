"""Measured links: that there are some, in range; their values are the machine's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.clusters.session import session_config
from dapple_tf.describe.cluster import ClusterError, Device, Link, Server
from dapple_tf.measuring import links
from dapple_tf.measuring.links import _line, _network_cards, _pairs, all_reduces, measure_links


def test_links_of_logical_devices() -> None:
    cluster = dapple.Cluster.local(3, kind="cpu")
    measured = measure_links(cluster, repeats=3)
    assert measured.devices == cluster.devices and measured.real
    for name in ("intra_bandwidth", "intra_latency"):
        value = getattr(measured, name)
        assert value is not None and 0 < value < math.inf, name
    assert list(measured.reductions.links) == ["inside"]
    assert all(0 < value < math.inf for value in measured.reductions.links["inside"])
    assert measured.reductions.error is not None
    assert measured.inter_bandwidth is None and measured.inter_latency is None
    assert measured.link(0, 2).seconds(1e6) > 0
    assert 1 <= measured.capacity(0) <= 3
    assert cluster.intra_bandwidth is None  # The given one is as it was.


def test_pairs_cover_each_server_and_neighbours() -> None:
    devices = [Device(f"/job:w/replica:0/task:{server}/device:GPU:{i}", server) for server in range(3) for i in (0, 1)]
    assert _pairs(dapple.Cluster(devices)) == {"intra": [(0, 1), (2, 3), (4, 5)], "inter": [(0, 2), (2, 4)]}


def test_each_server_has_the_best_of_its_links() -> None:
    slow, fast = Link(1e9, 2e-5), Link(5e9, 1e-5)
    between = {(0, 1): slow, (0, 2): slow, (0, 3): slow, (1, 2): fast, (1, 3): fast, (2, 3): fast}
    cards = _network_cards([Server(capacity=2.0), Server(), Server(), Server()], between)
    assert cards[0] == Server(inter_bandwidth=1e9, inter_latency=2e-5, capacity=2.0)
    assert cards[1:] == [Server(inter_bandwidth=5e9, inter_latency=1e-5)] * 3
    # With these cards every link comes out as it was measured.
    for (one, other), link in between.items():
        assert min(cards[one].inter_bandwidth or 0, cards[other].inter_bandwidth or 0) == link.bandwidth


def test_what_is_timed_is_not_optimized_away() -> None:
    # TensorFlow's rewriting drops what only control edges lead from: links came out a million times too fast.
    for cluster in (dapple.Cluster.local(2, kind="cpu"), dapple.Cluster.of_servers(["a:1"], devices_per_server=1)):
        assert session_config(cluster).graph_options.rewrite_options.disable_meta_optimizer


def test_a_line_through_several_sizes_is_as_far_from_small_ones_as_from_large_ones() -> None:
    sizes = [250, 2500, 25_000]  # 1,000, 10,000 and 100,000 bytes
    start, rate, error = _line(sizes, [1e-3 + 4 * size * 1e-8 for size in sizes])
    assert (start, rate) == (pytest.approx(1e-3), pytest.approx(1e-8))
    assert error == pytest.approx(0, abs=1e-9)
    # A start below nothing, or a rate: the other one alone.
    start, rate, _ = _line([250, 2500], [1e-6, 1e-4])
    assert start == 0 and rate > 0
    start, rate, error = _line([250, 2500], [2e-3, 1e-3])
    assert rate == 0 and 1e-3 < start < 2e-3 and error > 0.1


def pairs_of_devices(count: int) -> dapple.Cluster:
    """Local devices, as if two each were in a server."""
    cluster = dapple.Cluster.local(count, kind="cpu")
    devices = (dataclasses.replace(device, server=number // 2) for number, device in enumerate(cluster.devices))
    return dataclasses.replace(cluster, devices=tuple(devices))


def test_all_reduces_can_be_timed_as_steps_make_them() -> None:
    with all_reduces(pairs_of_devices(4), range(4), [64, 3], by_server=True) as run:
        assert 0 < run() < 60


def test_all_reduces_of_several_servers_are_measured_flat_and_hierarchical() -> None:
    measured = measure_links(pairs_of_devices(3), repeats=1, capacity=False)
    assert set(measured.reductions.links) == {"ring", "inside", "between", "exchange"}
    again = dapple.Cluster.from_json(measured.to_json())
    assert again.reductions == measured.reductions


def test_clocks_wait_for_one_element_and_everything_measured_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole vectors were copied to the host that reads the clock, and sums computed by the client, all while timed."""
    graphs: list[tf.Graph] = []
    ticks = itertools.count(1.0)

    @contextlib.contextmanager
    def opened(_: Any, graph: tf.Graph) -> Iterator[Any]:
        graphs.append(graph)
        yield SimpleNamespace(run=lambda fetches, _: tf.nest.map_structure(lambda _: next(ticks), fetches))

    monkeypatch.setattr(links, "open_session", opened)
    monkeypatch.setattr(links, "connected", lambda _: contextlib.nullcontext())
    name = "/job:worker/replica:0/task:%d/device:GPU:%d"
    measure_links(dapple.Cluster([Device(name % divmod(n, 2), n // 2) for n in range(4)]), repeats=1)
    assert len(graphs) > 8
    for op in itertools.chain.from_iterable(graph.get_operations() for graph in graphs):
        assert op.device or op.type in ("Placeholder", "Const"), op.name
        if "device:GPU" not in op.device:
            from_gpus = [tensor for tensor in op.inputs if "device:GPU" in tensor.device]
            assert all(tensor.op.type == "StridedSlice" for tensor in from_gpus), op.name


def test_what_cannot_be_measured() -> None:
    cluster = dapple.Cluster.local(2, kind="cpu")
    with pytest.raises(ClusterError, match="a description without real devices"):
        measure_links(dataclasses.replace(cluster, real=False))
    with pytest.raises(ClusterError, match="messages of 4096 and 8 bytes"):
        measure_links(cluster, large=8)
