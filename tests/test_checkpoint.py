"""Checkpoints are saved while training goes on, restored under any plan, and never half there."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
from models_for_tests import assert_same_values, classifier, plan, samples, transform, values

import dapple_tf as dapple
from dapple_tf.checkpoints import saver
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.directory_lock import LOCK
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.kernels import host_of

X, Y, _ = samples(7)


def adam() -> keras.Model:
    return classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])


def names(directory: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != LOCK)


def assert_identical(model: keras.Model, expected: list[np.ndarray]) -> None:
    for own, other in zip(values(model), expected, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dapple.PipelinedModel, pathlib.Path]:
    pipelined = transform(adam())
    for _ in range(2):
        pipelined.train_on_batch(X, Y)
    return pipelined, pipelined.save_checkpoint(tmp_path_factory.mktemp("initial"))


@pytest.fixture
def pipelined(_shared: tuple[dapple.PipelinedModel, pathlib.Path]) -> dapple.PipelinedModel:
    """After two steps; the same for all tests, as it takes long to make."""
    model, initial = _shared
    model.restore_checkpoint(initial)
    return model


@pytest.mark.slow
def test_a_checkpoint_is_restored_whatever_the_plan_and_into_the_plain_model(
    tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel
) -> None:
    path = pipelined.save_checkpoint(tmp_path)
    assert path == tmp_path / "save-000001-step-2" == dapple.latest_checkpoint(tmp_path)
    assert names(path) == [
        *("checkpoint.json", "client.data-00000-of-00001", "client.index"),
        *("shard-0.data-00000-of-00001", "shard-0.index"),
    ]
    expected = values(pipelined.sync())
    plain = adam()
    manifest = dapple.load_checkpoint(path, plain)
    assert (manifest.step, manifest.epoch, manifest.batch) == (2, 0, 0)
    assert_identical(plain, expected)
    other = transform(adam(), plan(cuts=["second"], devices=[[0], [1]]))
    other.restore_checkpoint(tmp_path)
    assert_identical(other.sync(), expected)
    for model in (plain, other):
        model.train_on_batch(X, Y)
    assert_same_values(other.sync(), plain)
    other.restore_checkpoint(path)  # once more, when its devices have values already
    other.train_on_batch(X, Y)
    assert_same_values(other.sync(), plain)


@pytest.mark.slow
def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, pipelined: dapple.PipelinedModel
) -> None:
    write = saver._write

    trained = threading.Event()

    def slowly(*arguments: Any) -> None:
        assert trained.wait(60)
        time.sleep(0.1)
        write(*arguments)

    expected = values(pipelined.sync())
    monkeypatch.setattr(saver, "_write", slowly)
    path = pipelined.save_checkpoint(tmp_path, wait=False)
    for _ in range(3):
        pipelined.train_on_batch(X, Y)
    assert not path.exists()
    trained.set()
    pipelined.wait_for_checkpoint()
    plain = adam()
    dapple.load_checkpoint(path, plain)
    assert_identical(plain, expected)
    assert not np.array_equal(values(pipelined.sync())[0], expected[0])
    # At most one at a time, and a session that is closed waits for the one that is being written.
    pipelined.save_checkpoint(tmp_path, wait=False)
    pipelined.save_checkpoint(tmp_path, wait=False)
    pipelined._engine.state._snapshots.wait()
    pipelined.wait_for_checkpoint()
    assert len(checkpoints(tmp_path)) == 3


def test_the_newest_are_kept_and_what_crashes_left_is_removed(
    tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel
) -> None:
    stale = tmp_path / ".partial-save-000009-step-3-0123456789abcdef"
    foreign = tmp_path / "save-00000٢-step-3"
    for folder in (stale, tmp_path / ".partial-mine", tmp_path / "save-mine", tmp_path / "other", foreign):
        folder.mkdir(parents=True)
    for _ in range(4):
        pipelined.save_checkpoint(tmp_path, keep=2)
    ours = ["save-000003-step-2", "save-000004-step-2"]
    assert names(tmp_path) == sorted([".partial-mine", "other", "save-mine", foreign.name, *ours])
    assert dapple.latest_checkpoint(tmp_path / "nothing") is None
    with pytest.raises(ValueError, match="keep is 0"):
        pipelined.save_checkpoint(tmp_path, keep=0)


@pytest.mark.slow
def test_before_the_first_step_the_model_itself_is_saved_and_restored(tmp_path: pathlib.Path) -> None:
    first = transform(adam())
    first.save_checkpoint(tmp_path)
    second = transform(adam())
    second.restore_checkpoint(tmp_path)
    assert_identical(second.model, values(first.model))
    second.model.layers[1].kernel.assign(np.ones((4, 6)))
    first.model.layers[1].kernel.assign(np.ones((4, 6)))
    for pipelined in (first, second):
        pipelined.train_on_batch(X, Y)
    assert_identical(second.sync(), values(first.sync()))


@pytest.mark.slow
def test_what_is_assigned_counts_before_it_is_saved_and_after_it_is_restored(
    tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel
) -> None:
    pipelined.sync()
    pipelined.model.layers[1].kernel.assign(np.ones((4, 6)))
    pipelined.model.optimizer.learning_rate.assign(0.5)
    pipelined.save_checkpoint(tmp_path)
    plain = adam()
    dapple.load_checkpoint(tmp_path, plain)
    assert_identical(plain, values(pipelined.model))
    assert float(plain.optimizer.learning_rate.numpy()) == 0.5
    # The learning rate, and all else once it is in the model.
    again = transform(adam())
    again.restore_checkpoint(tmp_path)
    again.model.optimizer.learning_rate.assign(0.25)
    again.sync()
    again.model.layers[1].bias.assign(np.full(6, 2))
    again.train_on_batch(X, Y)
    plain.optimizer.learning_rate.assign(0.25)
    plain.layers[1].bias.assign(np.full(6, 2))
    plain.train_on_batch(X, Y)
    assert_same_values(again.sync(), plain)
    # Likewise where devices have values already.
    again.restore_checkpoint(tmp_path)
    again.model.optimizer.learning_rate.assign(0.25)
    again.train_on_batch(X, Y)
    dapple.load_checkpoint(tmp_path, plain)
    plain.optimizer.learning_rate.assign(0.25)
    plain.train_on_batch(X, Y)
    assert_same_values(again.sync(), plain)


def unnamed(units: int = 5, optimizer: str = "adam") -> keras.Model:
    layers = [keras.layers.Dense(size) for size in (6, units)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
def test_layers_without_names_of_their_own_are_matched_by_position(tmp_path: pathlib.Path) -> None:
    first = unnamed()
    own = plan(cuts=[first.layers[0].name])
    pipelined = transform(first, own)
    pipelined.train_on_batch(X, Y)
    pipelined.save_checkpoint(tmp_path)
    second = unnamed()
    assert second.layers[0].name != first.layers[0].name
    dapple.load_checkpoint(tmp_path, second)
    assert_identical(second, values(pipelined.sync()))


@pytest.mark.slow
def test_another_model_is_refused_and_left_as_it_was(tmp_path: pathlib.Path) -> None:
    pipelined = transform(unnamed(), dapple.Plan.data_parallel([0, 1], 7))
    pipelined.train_on_batch(X, Y)
    pipelined.save_checkpoint(tmp_path)
    other = unnamed(9)
    before = values(other)
    with pytest.raises(CheckpointError) as error:
        dapple.load_checkpoint(tmp_path, other)
    assert "is of another model: the model has" in str(error.value)
    assert "float32 (6, 9), where the checkpoint has" in str(error.value)
    assert "float32 (6, 5)" in str(error.value)
    assert_identical(other, before)
    with pytest.raises(CheckpointError, match=r"the optimizer has .* variables, where the checkpoint has"):
        dapple.load_checkpoint(tmp_path, unnamed(optimizer="sgd"))
    dapple.load_checkpoint(tmp_path, unnamed(optimizer="sgd"), optimizer=False)
    with pytest.raises(CheckpointError, match=r"is no checkpoint \(it has no checkpoint.json\), and holds none"):
        pipelined.restore_checkpoint(tmp_path / "nowhere")


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("file", ["shard-0.index", "shard-0.data-00000-of-00001", "checkpoint.json"])
def test_damage_is_told_and_nothing_changes(
    tmp_path: pathlib.Path, file: str, pipelined: dapple.PipelinedModel
) -> None:
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.train_on_batch(X, Y)
    expected = values(pipelined.sync())
    content = (path / file).read_bytes()
    draw = random.Random(3)
    damages = [content[:-1], b"", content[: len(content) // 2]]
    for _ in range(5):
        place = draw.randrange(len(content))
        damages.append(content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :])
    if file == "checkpoint.json":  # It ends with a line break that nobody misses.
        damages = damages[1:]
    for damaged in damages:
        (path / file).write_bytes(damaged)
        plain = adam()
        before = values(plain)
        for load in (
            lambda: pipelined.restore_checkpoint(path),
            lambda model=plain: dapple.load_checkpoint(path, model),
        ):
            with pytest.raises(CheckpointError, match=r"damaged|JSON|isn't a checkpoint|text|unknown|in shard"):
                load()
        assert_identical(plain, before)
    assert_identical(pipelined.sync(), expected)
    (path / file).unlink()
    with pytest.raises(CheckpointError):
        pipelined.restore_checkpoint(path)


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        (keras.optimizers.AdamW, keras.optimizers.Adam, "with the optimizer 'adam_w', and is read into 'adam', which"),
        (keras.optimizers.Adam, keras.optimizers.Adam, ""),  # whose number differs
    ],
)
def test_another_optimizer_with_the_same_slots_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, saved: Any, now: Any, told: str
) -> None:
    pipelined = transform(classifier(optimizer=saved()))
    pipelined.save_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        dapple.load_checkpoint(tmp_path, classifier(optimizer=now()))
    assert told in caplog.text and bool(told) == bool(caplog.text)


def test_a_save_that_fails_is_logged_and_raised_when_someone_waits(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, pipelined: dapple.PipelinedModel
) -> None:
    good = pipelined.save_checkpoint(tmp_path)
    pipelined.train_on_batch(X, Y)
    write = pipelined._engine.state._snapshots._run

    def broken(fetches: Any, feed: Any = None) -> Any:
        if feed is not None:
            feed = {key: "/proc/no/such/place" for key in feed}
        return write(fetches, feed)

    pipelined._engine.state._snapshots._run = broken
    with caplog.at_level(logging.WARNING):
        pipelined.save_checkpoint(tmp_path, wait=False)
        with pytest.raises(CheckpointError, match="the servers can't write to"):
            pipelined.wait_for_checkpoint()
    assert "save-000002-step-3 couldn't be written: the servers can't write to" in caplog.text
    assert names(tmp_path) == [good.name]
    pipelined.wait_for_checkpoint()
    pipelined._engine.state._snapshots._run = write
    assert pipelined.save_checkpoint(tmp_path).name == "save-000002-step-3"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        pipelined.save_checkpoint(tmp_path / "file" / "inside")


def test_a_directory_that_servers_do_not_share_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, pipelined: dapple.PipelinedModel
) -> None:
    write = pipelined._engine.state._snapshots._run
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def on_another_machine(fetches: Any, feed: Any = None) -> Any:
        return write(fetches, feed and {key: str(elsewhere / "x") for key in feed})

    monkeypatch.setattr(pipelined._engine.state._snapshots, "_run", on_another_machine)
    with pytest.raises(CheckpointError) as error:
        pipelined.save_checkpoint(tmp_path / "here")
    assert "server /job:localhost/replica:0/task:0/device:CPU:0 has saved its variables, but " in str(error.value)
    assert "shard-0.index isn't there" in str(error.value)
    assert "must be on a file system that this process and all servers share" in str(error.value)
    assert names(tmp_path / "here") == []


def test_the_cpu_of_a_devices_server() -> None:
    assert host_of("/job:worker/replica:0/task:3/device:GPU:2") == "/job:worker/replica:0/task:3/device:CPU:0"


@pytest.mark.thorough
@pytest.mark.slow
def test_servers_share_the_work(tmp_path: pathlib.Path, workers: LocalWorkers) -> None:
    own = plan(devices=[[0, 2], [1, 3]])
    pipelined = dapple.transform(adam(), dapple.Cluster.of_servers(workers.addresses), own)
    pipelined.train_on_batch(X, Y)
    path = pipelined.save_checkpoint(tmp_path)
    sizes = [(path / f"shard-{number}.data-00000-of-00001").stat().st_size for number in range(4)]
    assert 0.5 < sizes[0] / sizes[1] < 2 and 0.5 < sizes[2] / sizes[3] < 2, "replicas share the work"
    expected = values(pipelined.sync())
    pipelined.train_on_batch(X, Y)
    pipelined.restore_checkpoint(path)
    assert_identical(pipelined.sync(), expected)
    pipelined.train_on_batch(X, Y)
    pipelined.close()
    local = transform(adam())
    local.restore_checkpoint(path)
    local.train_on_batch(X, Y)
    assert_same_values(local.sync(), pipelined.model)


# ---- crashes

_SAVE_FOREVER = """
    import sys
    from test_checkpoint import keras, X, Y, adam, dapple, transform
    keras.utils.set_random_seed(5)
    pipelined = transform(adam(), dapple.Plan.straight(["first"], 7, 1))
    while True:
        pipelined.train_on_batch(X, Y)
        print(pipelined.save_checkpoint(sys.argv[1]).name, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_processes_that_are_killed_while_they_save_leave_a_good_checkpoint(tmp_path: pathlib.Path) -> None:
    draw = random.Random(4)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(_SAVE_FOREVER)]
    directories = [tmp_path / str(attempt) for attempt in range(4)]
    with contextlib.ExitStack() as stack:
        processes = []
        for directory in directories:  # All at once, as it takes them long to start.
            process = subprocess.Popen([*command, str(directory)], stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        said = []
        for process in processes:
            assert process.stdout is not None
            said.append([process.stdout.readline() for _ in range(draw.randrange(1, 6))])
            time.sleep(draw.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            said[-1] += process.stdout.readlines()
    by_step: dict[int, list[np.ndarray]] = {}
    for directory, lines in zip(directories, said, strict=True):
        complete = [line.strip() for line in lines if line.endswith("\n")]
        last = dapple.latest_checkpoint(directory)
        assert last is not None
        assert last.name >= complete[-1], "what was said to be saved, is"
        assert len(checkpoints(directory)) >= min(3, len(complete))
        for path in checkpoints(directory):
            model = adam()
            step = dapple.load_checkpoint(path, model).step
            for own, other in zip(values(model), by_step.setdefault(step, values(model)), strict=True):
                np.testing.assert_array_equal(own, other)
    keras.utils.set_random_seed(5)
    pipelined = transform(adam(), dapple.Plan.straight(["first"], 7, 1))
    for step in range(1, max(by_step) + 1):
        pipelined.train_on_batch(X, Y)
        if step in by_step:
            assert_identical(pipelined.sync(), by_step[step])
