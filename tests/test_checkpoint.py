"""Checkpoints are saved while training goes on, restored under any plan, and never half there."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from fake_session import FakeWorkers
from models_for_tests import assert_same_values, classifier, plan, samples, transform, values

import dapple_tf as dapple
from dapple_tf.checkpoints import checkpoint_files, saver
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.directory_lock import LOCK

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


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, pipelined: dapple.PipelinedModel
) -> None:
    write, trained = saver._write, threading.Event()

    def slowly(*arguments: Any) -> None:
        assert trained.wait(60)
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


def unnamed(units: int = 5, optimizer: str = "adam") -> keras.Model:
    layers = [keras.layers.Dense(size) for size in (6, units)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_models_are_matched_by_position_and_another_one_is_left_as_it_was(tmp_path: pathlib.Path) -> None:
    first, second, other = unnamed(), unnamed(), unnamed(9)
    pipelined = transform(first, plan(cuts=[first.layers[0].name]))
    pipelined.train_on_batch(X, Y)
    pipelined.save_checkpoint(tmp_path)
    assert second.layers[0].name != first.layers[0].name
    dapple.load_checkpoint(tmp_path, second)
    assert_identical(second, values(pipelined.sync()))
    before = values(other)
    with pytest.raises(CheckpointError, match=r"(?s)another model: .*float32 \(6, 9\), where .*float32 \(6, 5\)"):
        dapple.load_checkpoint(tmp_path, other)
    assert_identical(other, before)
    with pytest.raises(CheckpointError, match=r"the optimizer has .* variables, where the checkpoint has"):
        dapple.load_checkpoint(tmp_path, unnamed(optimizer="sgd"))
    dapple.load_checkpoint(tmp_path, unnamed(optimizer="sgd"), optimizer=False)
    with pytest.raises(CheckpointError, match=r"is no checkpoint \(it has no checkpoint.json\), and holds none"):
        pipelined.restore_checkpoint(tmp_path / "nowhere")


def test_damage_is_told_and_nothing_changes(tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel) -> None:
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.train_on_batch(X, Y)
    expected = values(pipelined.sync())
    for file in ("shard-0.data-00000-of-00001", "shard-0.index", "checkpoint.json"):
        content = (path / file).read_bytes()
        for damaged in (content[: len(content) // 2], content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
            (path / file).write_bytes(damaged)
            plain = adam()
            before = values(plain)
            with pytest.raises(CheckpointError, match=r"damaged|JSON"):
                pipelined.restore_checkpoint(path)
            with pytest.raises(CheckpointError, match=r"damaged|JSON"):
                dapple.load_checkpoint(path, plain)
            assert_identical(plain, before)
        (path / file).write_bytes(content)
    assert_identical(pipelined.sync(), expected)


def test_another_optimizer_with_the_same_slots_is_told(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    transform(classifier(optimizer=keras.optimizers.AdamW())).save_checkpoint(tmp_path)
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        dapple.load_checkpoint(tmp_path, classifier(optimizer=keras.optimizers.AdamW()))  # whose number differs
        assert not caplog.text
        dapple.load_checkpoint(tmp_path, classifier(optimizer=keras.optimizers.Adam()))
    assert "with the optimizer 'adam_w', and is read into 'adam', which" in caplog.text


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


def test_servers_share_the_work(tmp_path: pathlib.Path) -> None:
    with FakeWorkers(4).used() as workers:
        pipelined = dapple.transform(adam(), workers.cluster, plan(devices=[[0, 2], [1, 3]]))
        pipelined.train_on_batch(X, Y)
        path = pipelined.save_checkpoint(tmp_path)
        sizes = [(path / f"shard-{number}.data-00000-of-00001").stat().st_size for number in range(4)]
        assert 0.5 < sizes[0] / sizes[1] < 2 and 0.5 < sizes[2] / sizes[3] < 2, "replicas share the work"
        expected = values(pipelined.sync())
        pipelined.train_on_batch(X, Y)
        pipelined.restore_checkpoint(path)
        assert_identical(pipelined.sync(), expected)
        pipelined.close()
    dapple.load_checkpoint(path, pipelined.model)
    assert_identical(pipelined.model, expected)


# ---- file systems that fail during training: it goes on, and ends with an error only if its last checkpoint is missing

EPOCHS = 4


@pytest.fixture(params=["read-only", "full"])
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """``fail(when)`` lets the file system fail whenever ``when()`` is true."""
    code, owner, name = {
        "read-only": (errno.EROFS, pathlib.Path, "mkdir"),
        "full": (errno.ENOSPC, checkpoint_files, "_to_disk"),
    }[request.param]
    then = getattr(owner, name)

    def prepare(when: Callable[[], bool]) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            if when():
                raise OSError(code, os.strerror(code))
            return then(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    return prepare


def fit(pipelined: dapple.PipelinedModel, directory: pathlib.Path, *callbacks: Any) -> keras.callbacks.History:
    settings = dapple.Checkpointing(directory)
    return pipelined.fit(X, Y, epochs=EPOCHS, checkpoint=settings, callbacks=list(callbacks), verbose=0)


class Epoch(keras.callbacks.Callback):
    """Knows which epoch runs, from when the checkpoint of the one before has been written."""

    def __init__(self, pipelined: dapple.PipelinedModel) -> None:
        super().__init__()
        self.number, self._saver = 0, pipelined._runtime.saver

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._saver.finish()
        self.number = epoch


def test_training_goes_on_without_checkpoints_and_ends_with_an_error(
    tmp_path: pathlib.Path, fail: Any, pipelined: dapple.PipelinedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that turned read-only ended the training, and one that was full was never mentioned at its end."""
    epoch, steps = Epoch(pipelined), pipelined._runtime.steps
    fail(lambda: epoch.number >= 2)
    with caplog.at_level(logging.WARNING, logger="dapple_tf"), pytest.raises(CheckpointError) as error:
        fit(pipelined, tmp_path, epoch)
    text = str(error.value)
    assert text.startswith("training is over, but its last checkpoint couldn't be written: ")
    assert "Read-only file system" in text or "No space left on device" in text
    assert pipelined._runtime.steps == steps + EPOCHS
    assert len([record for record in caplog.records if "checkpoint" in record.getMessage()]) == 2
    assert names(tmp_path) == [path.name for path in checkpoints(tmp_path)] and len(checkpoints(tmp_path)) == 2


def test_a_file_system_that_fails_for_a_while_is_no_error(
    tmp_path: pathlib.Path, fail: Any, pipelined: dapple.PipelinedModel
) -> None:
    epoch = Epoch(pipelined)
    fail(lambda: epoch.number == 1)
    assert fit(pipelined, tmp_path, epoch).epoch == list(range(EPOCHS))
    assert len(checkpoints(tmp_path)) == EPOCHS - 1


def test_where_nothing_can_be_written_training_does_not_begin(
    tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel
) -> None:
    (tmp_path / "file").write_text("")
    steps = pipelined._runtime.steps
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*: .*Not a directory"):
        fit(pipelined, tmp_path / "file" / "inside")
    assert pipelined._runtime.steps == steps
