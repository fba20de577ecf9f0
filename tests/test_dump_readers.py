"""Those who read graphs read dumps: TensorFlow itself, TensorBoard's graph plugin and Netron."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping

import keras
import pytest
import tensorflow as tf
from google.protobuf import text_format

import dapple_tf as dapple
from dapple_tf.dumps.dump import dump_model
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.text import readable

layers = keras.layers

STEP = "train/09_update"
NETRON_TIMEOUT = 60.0


def model() -> keras.Model:
    """With what graphs are hardest to read by: loops and functions with gradients of their own, rows of gradients."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 3, mask_zero=True, name="embedding")(tokens)
    x = layers.LSTM(3, return_sequences=True, name="lstm")(x)
    x = layers.Dropout(0.2, name="dropout")(layers.BatchNormalization(name="norm")(x))
    made = keras.Model(tokens, layers.Dense(6, activation="gelu", name="logits")(x), name="reader")
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A dump of a step with replicas and split backwards."""
    folder = tmp_path_factory.mktemp("dump")
    plan = dapple.Plan.manual(["lstm"], [[0, 1], [2]], 2, 8, "zb_h1")
    dump_model(folder, model(), dapple.Cluster.local(3, kind="cpu"), plan)
    return folder


@functools.cache
def graphs(folder: pathlib.Path) -> dict[str, GraphDef]:
    """The graphs that were written as text."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): text_format.Parse(path.read_text(), GraphDef())
        for path in sorted(folder.rglob("*.pbtxt"))
    }


def check_import(graph: GraphDef) -> None:
    """TensorFlow takes a graph, with its functions."""
    assert graph.versions.producer > 0
    own = GraphDef.FromString(graph.SerializeToString())  # It is given default attributes.
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(own, name="")
    assert len(scope.get_operations()) == len(graph.node)


@pytest.mark.thorough
@pytest.mark.slow
def test_tensorflow_imports_every_graph(dumped: pathlib.Path) -> None:
    by_name = graphs(dumped)
    assert len(by_name) == 10 + 2 * 3
    for graph in by_name.values():
        assert len({node.name for node in graph.node}) == len(graph.node)
        check_import(graph)
    assert len(by_name[STEP].library.function) > 20
    assert any(node.op in ("While", "StatelessWhile") for node in by_name["train/00_capture"].node)


@pytest.mark.thorough
@pytest.mark.slow
def test_tensorboards_graph_plugin_shows_each_pass(dumped: pathlib.Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed (make venv)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what tensorboard imports
        import tensorboard.plugins.graph.graphs_plugin  # noqa: F401
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.graph.graphs_plugin import GraphsPlugin

    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(dumped))
    events.Reload()
    provider = MultiplexerDataProvider(events, str(dumped))
    plugin = GraphsPlugin(TBContext(logdir=str(dumped), multiplexer=events, data_provider=provider))
    info = plugin.info_impl(RequestContext(), experiment="")
    written = graphs(dumped)
    whole = [name for name in written if ".stage" not in name]
    assert sorted(info) == [f"tensorboard/{name}" for name in whole]
    assert all(run["run_graph"] for run in info.values())
    for name in whole:
        text, kind = plugin.graph_impl(
            RequestContext(), f"tensorboard/{name}", None, is_conceptual=False, experiment=""
        )
        assert kind == "text/x-protobuf"
        shown = text_format.Parse(text, GraphDef())
        check_import(shown)
        stages = [graph for other, graph in written.items() if other.startswith(f"{name}.stage")]
        assert len(shown.node) == sum(len(graph.node) for graph in stages or [written[name]])
        names = {function.signature.name for graph in stages or [written[name]] for function in graph.library.function}
        assert {function.signature.name for function in shown.library.function} == names


@pytest.mark.thorough
@pytest.mark.slow
def test_tensorboards_accumulator_has_the_graph(dumped: pathlib.Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed (make venv)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(dumped / "tensorboard" / STEP)).Reload()
    assert run.Tags()["graph"]
    # Serialized, as NaN differs from itself.
    read = GraphDef.FromString(run.Graph().SerializeToString())
    pair = (readable(read), graphs(dumped)[STEP])
    assert len({graph.SerializeToString(deterministic=True) for graph in pair}) == 1


# ---- Netron, whose reader is JavaScript

# Netron asks its users to update half a year after its release: in its page it is that day.
_RELEASE_DAY = """
const Real = Date;
window.Date = class extends Real {
  constructor(...given) {
    const released = document.querySelector('meta[name="date"]');
    super(...(given.length || !released ? given : [released.content]));
  }
};
"""


@contextlib.contextmanager
def netron(path: pathlib.Path) -> Iterator[str]:
    """Netron's server for a file, on loopback; its address."""
    served = pytest.importorskip("netron", reason="netron isn't installed (make venv)")
    host, port = served.start(str(path), ("localhost", 0), browse=False)
    try:
        yield f"http://{host}:{port}/"
    finally:
        served.stop((host, port))


@contextlib.contextmanager
def alone(browser: object, address: str) -> Iterator[None]:
    """The browser without a network, so that Netron tells nobody, and without its question about that."""
    commands = browser.execute_cdp_cmd  # type: ignore[attr-defined]
    commands("Network.enable", {})
    commands("Network.setBlockedURLs", {"urls": ["https://*"]})
    commands("Network.setCookie", {"name": "consent", "value": "1", "url": address})
    script = commands("Page.addScriptToEvaluateOnNewDocument", {"source": _RELEASE_DAY})
    try:
        yield
    finally:
        commands("Page.removeScriptToEvaluateOnNewDocument", script)
        commands("Network.setBlockedURLs", {"urls": []})
        commands("Network.disable", {})


def drawn_nodes(browser: object, address: str) -> Mapping[str, int]:
    """Opens Netron's page; waits until the graph is there; op -> how many nodes it shows."""
    browser.get(address)  # type: ignore[attr-defined]
    limit = time.monotonic() + NETRON_TIMEOUT
    while True:
        state, message, counts = browser.execute_script(  # type: ignore[attr-defined]
            """
            const counts = {};
            for (const text of document.querySelectorAll('.graph-node .node-item-type text')) {
                counts[text.textContent] = (counts[text.textContent] || 0) + 1;
            }
            const message = document.getElementById('message-text');
            return [[...document.body.classList], message ? message.textContent : '', counts];
            """
        )
        assert not (message and "notification" in state), message
        assert not (message and "alert" in state), message
        if state == ["default"]:
            return counts
        assert time.monotonic() < limit, f"Netron is still {state} after {NETRON_TIMEOUT:g} s: {message}"
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", [STEP, "train/03_build_backward.stage0"])
def test_netron_draws_a_graph(dumped: pathlib.Path, browser: object, name: str) -> None:
    path = dumped / f"{name}.pbtxt"
    graph = graphs(dumped)[name]
    with netron(path) as address, alone(browser, address):
        counts = drawn_nodes(browser, address)
    wanted = Counter(node.op for node in graph.node if node.op != "Const")  # most of them are shown in their readers
    assert sum(counts.values()) - counts.get("Const", 0) == sum(wanted.values())
    short = {op: count for op, count in wanted.items() if len(op) <= 20}  # Netron shortens others
    assert {op: counts.get(op) for op in short} == short
