"""Measured links: that there are some, in range; their values are the machine's."""

from __future__ import annotations

import dataclasses
import math

import pytest

import dapple_tf as dapple
from dapple_tf.clusters.session import session_config
from dapple_tf.describe.cluster import ClusterError, Device, Link, Server
from dapple_tf.measuring.links import _line_of, _network_cards, _pairs, measure_links


@pytest.mark.slow
def test_links_of_logical_devices() -> None:
    cluster = dapple.Cluster.local(3, kind="cpu")
    measured = measure_links(cluster, repeats=3)
    assert measured.devices == cluster.devices and measured.real
    for name in ("intra_bandwidth", "intra_latency", "reduce_bandwidth", "reduce_latency"):
        value = getattr(measured, name)
        assert value is not None and 0 < value < math.inf, name
    assert measured.inter_bandwidth is None and measured.inter_latency is None
    assert measured.link(0, 2).seconds(1e6) > 0
    assert 1 <= measured.capacity(0) <= 3
    assert cluster.intra_bandwidth is None  # The given one is as it was.


def test_one_device_has_no_links() -> None:
    measured = measure_links(dapple.Cluster.local(1, kind="cpu"), repeats=1)
    assert measured.intra_bandwidth is None and measured.reduce_bandwidth is None
    assert measured.capacity(0) == 1


def test_capacity_can_be_left_out() -> None:
    measured = measure_links(dapple.Cluster.local(2, kind="cpu"), repeats=1, capacity=False)
    assert measured.servers == ()
    assert measured.intra_bandwidth is not None


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


def test_a_line_through_two_sizes() -> None:
    bandwidth, latency = _line_of((250, 1250), (2e-6, 6e-6))  # 1,000 and 5,000 bytes
    assert bandwidth == pytest.approx(1e9)
    assert latency == pytest.approx(1e-6)
    bandwidth, latency = _line_of((250, 1250), (2e-6, 1e-6))
    assert math.isfinite(bandwidth) and latency > 0


def test_what_cannot_be_measured() -> None:
    cluster = dapple.Cluster.local(2, kind="cpu")
    with pytest.raises(ClusterError, match="a description without real devices"):
        measure_links(dataclasses.replace(cluster, real=False))
    with pytest.raises(ClusterError, match="messages of 8 and 8 bytes"):
        measure_links(cluster, small=8, large=8)
