"""Plans, profiles and clusters are data: whatever is in a file, it is read or refused, soon and in little memory."""

from __future__ import annotations

import json
import logging
import pathlib
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dapple_tf.checkpoints.checkpoint_manifest import FORMAT_WITHOUT_DIGEST, CheckpointError, Entry, Manifest, Shard
from dapple_tf.common import data_files
from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.layer_profile import Cost, LayerBuffers, LayerProfile, ProfileError
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_report import PlanReport, StageReport
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.describe.profile_text import PUBLISHED, load_text
from dapple_tf.measuring.profiler import read_profile

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 5.0
"""Of one thread: files that take time quadratic in their length need minutes."""
BYTES = 200 * 10**6
STATM = pathlib.Path("/proc/self/statm")


def a_plan() -> str:
    options = {"warm_up": (3, 2), "reverse_first_k": 1, "carried_updates": 1, "backward_cuts": ("block_1",)}
    options |= {"task_seconds": ((1.0, 2.0, 3.0), (0.5, 1, 1))}
    options |= {"recompute": "min_cut", "all_reduce": ("flat", "hierarchical"), "shares": ((2, 1), (1,))}
    plan = Plan.manual(["block_3"], [[0, 1], [2]], 4, 64, "fast_forward", **options)
    stages = (StageReport(3, 0.5, 0.1, 3, 1e9, None), StageReport(2, 0.5, 0.2, 2, 2e9, 2**34))
    numbers = (1.0, 2.5, None, "too large", 1.2, "3:1", "stage 0", "compute", stages)
    texts = {"out_of_order": "fast_forward, k = 1", "dapple": 1.5, "dapple_text": "2:1"}
    return replace(plan, report=PlanReport(*numbers, fingerprint=plan.fingerprint, **texts)).to_json()


def a_profile() -> str:
    some = Cost(1e-3, 2e-4)
    sizes = {"parameter_bytes": 100, "slot_bytes": 200, "state_bytes": 8, "apply_seconds": 1e-5, "spread": 0.1}
    buffers = LayerBuffers(some, some, some, 100, some, 50)
    full = LayerProfile("a", *[some] * 8, **sizes, buffers=buffers)
    layers = (full, LayerProfile("b", some, some), LayerProfile("c", some, some))
    tensors = (Tensor(0, (1, 2), some, True, (0, 1), (1,), True), Tensor(1, (2,), some, differentiable=False))
    times = {"step_seconds": 1e-3, "task_seconds": 1e-5, "key": "0123"}
    return Profile("model", "cpu", (2, 8), layers, tensors, (SharedParameters((0, 2), 400, 800),), **times).to_json()


def a_cluster() -> str:
    servers = [
        {"devices": 2, "memory_bytes": [2**34, None], "speed": [1.0, 2.0], "capacity": 1.5, "intra_latency": 1e-6},
        {"devices": 3, "memory_bytes": 2**34, "inter_bandwidth": 1e9, "intra_bandwidth": 1e9, "inter_latency": 0},
    ]
    links = {"intra_bandwidth": 1e11, "inter_bandwidth": 3e9, "intra_latency": 5e-6, "inter_latency": 3e-5}
    reduction = {"reduce_bandwidth": 1e9, "reduce_latency": 1e-5}
    return json.dumps({"format": "dapple_tf.cluster/1", "servers": servers} | links | reduction)


def a_manifest() -> str:
    entries = (
        Entry("model/0", "dense/kernel", "float32", (4, 3), "shard-0"),
        Entry("optimizer/0", "iterations", "int64", (), "client"),
    )
    shards = {name: Shard(100, "0f" * 32, 1 << 40) for name in ("shard-0", "client", "data")}
    data = json.loads(Manifest(12, 2, 3, entries, shards).to_json())
    del data["sha256"]  # It would refuse every change.
    return json.dumps({**data, "format": FORMAT_WITHOUT_DIGEST})


def a_text() -> str:
    return PUBLISHED["gnmt-16"].read_text(encoding="utf-8")


@dataclass(frozen=True)
class Kind:
    """One kind of file: an example, what reads it and what that may raise."""

    name: str
    example: Callable[[], str]
    load: Callable[[pathlib.Path], Any]
    error: type[Exception]


PLAN = Kind("plan", a_plan, Plan.load, PlanError)
PROFILE = Kind("profile", a_profile, Profile.load, ProfileError)
CLUSTER = Kind("cluster", a_cluster, Cluster.load, ClusterError)
MANIFEST = Kind(
    "manifest",
    a_manifest,
    lambda path: Manifest.from_json(path.read_bytes().decode(errors="replace"), source=str(path)),
    CheckpointError,
)
TEXT = Kind("text", a_text, lambda path: load_text(path, batch_size=64), ProfileError)
JSON_KINDS = (PLAN, PROFILE, CLUSTER)
json_kinds = pytest.mark.parametrize("kind", (*JSON_KINDS, MANIFEST), ids=lambda kind: kind.name)
all_kinds = pytest.mark.parametrize("kind", (*JSON_KINDS, TEXT), ids=lambda kind: kind.name)


pytestmark = pytest.mark.usefixtures("_own_garbage")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a plan was changed after it was planned would be said thousands of times here."""
    monkeypatch.setattr(logging.getLogger("dapple_tf.describe.plan"), "disabled", True)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Whatever takes more than so much memory, beyond what the process has, gets a MemoryError."""
    if not STATM.exists():  # Only Linux tells how much there is.
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Reader:
    """Reads contents as files of one kind, checks what comes of it and counts the refusals."""

    def __init__(self, kind: Kind, folder: pathlib.Path) -> None:
        self.kind = kind
        self.path = folder / "hostile.data"
        self.refused = self.read = 0

    def __call__(self, content: str | bytes) -> str | None:
        """The error's text without the file's name; None if the content is good."""
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        self.path.write_bytes(data)
        start = time.thread_time()
        try:
            loaded = self.kind.load(self.path)
        except self.kind.error as error:
            told = str(error)
            self.refused += 1
        else:
            told = None
            self.read += 1
        assert time.thread_time() - start < SECONDS, data[:1000]
        if told is None:
            if self.kind is not TEXT:  # What is read is as good as what was written.
                self.path.write_text(loaded.to_json(), encoding="utf-8")
                assert self.kind.load(self.path) == loaded
            return None
        assert told.startswith(str(self.path)), told
        assert len(told) < len(str(self.path)) + 1100
        told.encode()  # It can be printed.
        return told.removeprefix(str(self.path))


Path = tuple[str | int, ...]


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """Where there is a value in JSON data: every leaf and every container but the whole."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(data: Any, path: Path, change: Callable[[Any, Any], None]) -> str:
    """JSON text of the data after ``change(container, key)`` of what is at a place; "@@" stands for what follows."""
    copy = json.loads(json.dumps(data))
    container = copy
    for key in path[:-1]:
        container = container[key]
    change(container, path[-1])
    return json.dumps(copy)


HOSTILE = {
    "null": "null",
    "true": "true",
    "text": '"x"',
    "long text": '"' + "x" * 10**5 + '"',
    "half a character": r'"\ud800"',
    "nought in text": r'"\u0000"',
    "beyond floats": "1e999",
    "no number": "NaN",
    "infinity": "Infinity",
    "-1": "-1",
    "0": "0",
    "tiny": "5e-324",
    "beyond 64 bits": str(2**64),
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "list": "[]",
    "list of lists": "[[], [[]]]",
    "long list": "[" + "0," * 10**4 + "0]",
    "object": "{}",
    "strange object": '{"": {"__class__": "os.system", "x": [1]}}',
    "deep": "[" * 900 + "]" * 900,
    "too deep": "[" * 10**5 + "]" * 10**5,
    "deep objects": '{"a":' * 900 + "1" + "}" * 900,
}


def told_where(message: str, path: Path) -> bool:
    """Whether a message names the key at a place, or one around it, as it is or in words."""
    plain = re.sub(r"[-' ]", "_", message)
    keys = [key for key in path if isinstance(key, str)]
    return any(
        key in plain or key.removesuffix("s").removesuffix("_bytes").removesuffix("_size") in plain for key in keys
    )


@json_kinds
def test_wrong_values_at_every_place(kind: Kind, tmp_path: pathlib.Path) -> None:
    """Each value at every fifth place, in turn."""
    every = 5
    reader = Reader(kind, tmp_path)
    data = json.loads(kind.example())
    assert reader(kind.example()) is None

    def put(container: Any, key: Any) -> None:
        container[key] = "@@"

    silent = []
    for number, path in enumerate(places(data)):
        text = changed(data, path, put)
        for name, raw in list(HOSTILE.items())[number % every :: every]:
            message = reader(text.replace('"@@"', raw))
            # What can't be JSON for Python has a line and a column instead.
            if message and " isn't JSON: " not in message and not told_where(message, path):
                silent.append((path, name, message))
    assert not silent
    assert reader.refused > 5 * reader.read


@json_kinds
def test_keys_left_out_renamed_and_twice(kind: Kind, tmp_path: pathlib.Path) -> None:
    reader = Reader(kind, tmp_path)
    data = json.loads(kind.example())

    def remove(container: Any, key: Any) -> None:
        del container[key]

    def rename(container: Any, key: Any) -> None:
        container["@@"] = container.pop(key)

    for path in places(data):
        message = reader(changed(data, path, remove))
        assert message is None or told_where(message, path) or "report" in path or isinstance(path[-1], int), message
        if isinstance(path[-1], str):
            key = path[-1]
            for other in ("", "__proto__", "\\ud800"):
                assert reader(changed(data, path, rename).replace('"@@"', f'"{other}"')) is not None

            def add(container: Any, key: Any) -> None:
                container["@@"] = container[key]

            twice = changed(data, path, add).replace('"@@"', json.dumps(key))
            assert reader(twice) == f": key {key!r} stands twice in one object; remove one of them"
    assert reader.refused > reader.read


@pytest.mark.parametrize("kind", (*JSON_KINDS, MANIFEST, TEXT), ids=lambda kind: kind.name)
def test_damaged_bytes(kind: Kind, tmp_path: pathlib.Path) -> None:
    reader = Reader(kind, tmp_path)
    generator = random.Random(2026)
    original = kind.example().encode()
    if kind is TEXT:
        original = original[:2500] + b"\n"
    hostile = [b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", *(bytes([byte]) for byte in b'[]{}",\\:;=\n\t -.e')]
    hostile += [b"9" * 40, b" -- ", b"node1", b"nan", b"NaN", b"Infinity", b"null", b"true", b"\\ud800"]
    for _ in range(300):
        data = bytearray(original)
        for _ in range(generator.randint(1, 3)):
            at = generator.randrange(len(data))
            stop = at + generator.randint(1, 50)
            pieces = [generator.choice(hostile), data[at:stop], b"", bytes([generator.randrange(256)])]
            data[at : generator.choice([at, at + 1, stop])] = generator.choice(pieces)
        reader(bytes(data))
    assert reader.refused > 150
    # A file is whole without its last line break.
    for stop in sorted({0, 1, *(generator.randrange(len(original.rstrip())) for _ in range(50))}):
        message = reader(original[:stop])
        assert message is not None or kind is TEXT


@all_kinds
def test_what_is_no_text_or_too_large(kind: Kind, tmp_path: pathlib.Path) -> None:
    reader = Reader(kind, tmp_path)
    for content in (b"\xff\xfe{}", b"\x80", bytes(range(256)), kind.example().encode("utf-16"), b"\x1f\x8b\x08\x00"):
        assert str(reader(content)).startswith(" isn't UTF-8 text: ")
    most = 2 * 2**20 if kind is TEXT else data_files.MOST_BYTES
    assert reader(b" " * most) is not None
    assert str(reader(b" " * (most + 1))).startswith(f" is larger than {most:,} bytes, the most that is read")
    with pytest.raises(kind.error, match=r"^/dev/zero is larger than"):
        kind.load(pathlib.Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        kind.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        kind.load(tmp_path)


MEGABYTE = 2**20
NODE = "forward_compute_time=0, backward_compute_time=0, activation_size={}, parameter_size=0"


def _with(text: str, key: str, raw: str) -> str:
    return json.dumps(json.loads(text) | {key: "@@"}).replace('"@@"', raw)


def _batches(count: int) -> str:
    plan = {"cuts": ["a"], "devices": [[0], [1]], "micro_batches": count, "global_batch_size": count}
    return json.dumps({"format": "dapple_tf.plan/1"} | plan)


def _stages(count: int, schedule: str) -> str:
    cuts, devices = [str(stage) for stage in range(count - 1)], [[stage] for stage in range(count)]
    batches = {"micro_batches": 10**6, "global_batch_size": 10**6, "schedule": schedule}
    return json.dumps({"format": "dapple_tf.plan/1", "cuts": cuts, "devices": devices} | batches)


BOMBS: dict[str, tuple[Kind, Callable[[], str], bool]] = {
    "10**9 devices": (CLUSTER, lambda: _with(a_cluster(), "servers", '[{"devices": 1000000000}]'), True),
    "fewer lists in a cluster": (CLUSTER, lambda: _with(a_cluster(), "servers", f"[{'[],' * 190000}[]]"), True),
    "10**9 micro-batches": (PLAN, lambda: _batches(10**9), True),
    "fewer lists in a plan": (PLAN, lambda: _with(a_plan(), "cuts", f"[{'[],' * 190000}[]]"), True),
    "replicas": (PLAN, lambda: _with(a_plan(), "devices", f"[[{'0,' * 2000000}0]]"), True),
    "fewer objects in a profile": (PROFILE, lambda: _with(a_profile(), "layers", f"[{'{},' * 190000}{{}}]"), True),
    "sizes in a profile": (PROFILE, lambda: _with(a_profile(), "batch_sizes", f"[{'1,' * 2000000}1]"), False),
    "digits": (TEXT, lambda: f"1 -- a -- {NODE.format('1' * (2 * MEGABYTE - 200) + 'x')}\n", True),
    "exponent": (TEXT, lambda: f"1 -- a -- {NODE.format('1e-' + '9' * (2 * MEGABYTE - 200))}\n", False),
    "lines": (TEXT, lambda: "\n" * (2 * MEGABYTE), True),
    "separators": (TEXT, lambda: "1" + " -- " * 500000 + "\n", True),
}


@pytest.mark.parametrize("name", BOMBS)
def test_little_text_that_asks_for_much(name: str, tmp_path: pathlib.Path) -> None:
    kind, make, refused = BOMBS[name]
    text = make()
    path = tmp_path / "bomb"
    path.write_text(text, encoding="utf-8")

    def load() -> bool:
        try:
            kind.load(path)
        except kind.error as error:
            assert str(error).startswith(str(path))
            assert len(str(error)) < len(str(path)) + 1100
            return True
        return False

    times = []
    while not times or (min(times) > SECONDS and len(times) < 3):  # On a busy machine a second is soon over.
        start = time.process_time()
        assert load() == refused
        times.append(time.process_time() - start)
    assert min(times) < SECONDS


def test_files_of_the_cache(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in the cache stops a program: what is damaged there is measured again, with a warning."""
    path = tmp_path / "key.json"
    text = a_profile()
    path.write_text(text, encoding="utf-8")
    assert read_profile(path) == Profile.from_json(text)
    for content in (b"", b"\xff\xfe", b"[" * 10**5, b"{}", a_plan().encode(), text.encode()[:100], b" " * 10**7):
        path.write_bytes(content)
        caplog.clear()
        assert read_profile(path) is None
        assert f"the cached profile {path} can't be used and is measured again: {path}" in caplog.text
    path.unlink()
    caplog.clear()
    assert read_profile(path) is None
    assert not caplog.text


EXECUTING = re.compile(
    r"^\s*(import|from) (pickle|cPickle|_pickle|dill|cloudpickle|joblib|marshal|shelve|yaml|code)\b"
    r"|(?<![.\w])(eval|exec|__import__)\("
    r"|allow_pickle=(?!False\b)|safe_mode=(?!True\b)|\b(enable_unsafe_deserialization|read_pickle)\("
    r"|\bload_model\((?!.*safe_mode=)",
    re.MULTILINE,
)


def test_no_source_runs_code_from_files() -> None:
    bad = ["import pickle", "eval('1')", "load(path, allow_pickle=True)", "load_model(path)", "f(safe_mode=False)"]
    assert all(map(EXECUTING.search, bad))
    assert not EXECUTING.search("x.eval('1')\nre.exec('1')\nload_model(path, safe_mode=True)")
    by_design = {
        "tools/evaluation/run_document.py",  # runs the examples of documents
        "tools/evaluation/mutants.py",  # runs this repository's modules, each with one small change
        "dapple_tf/front/model_copies.py",  # makes a model of what this process tells of one that it has
    }
    folders = ("dapple_tf", "graph_passes", "models", "tools")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 80
    found = {str(path.relative_to(ROOT)) for path in sources if EXECUTING.search(path.read_text(encoding="utf-8"))}
    assert found <= by_design
