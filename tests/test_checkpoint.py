"""Checkpoints are saved while training goes on, restored under any plan, and never half there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from fake_session import FakeWorkers
from models_for_tests import assert_same_values, classifier, plan, samples, transform, values
from workers import client, expect, has_ended

import dapple_tf as dapple
from dapple_tf.checkpoints import checkpoint_files, saver
from dapple_tf.checkpoints.checkpoint import Progress
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.directory_lock import LOCK, DirectoryLock, Owner, _life
from dapple_tf.checkpoints.saver import Saver

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
    pipelined._engine.values._snapshots.wait()
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


def unnamed(units: int = 5, optimizer: str = "adam") -> keras.Model:
    layers = [keras.layers.Dense(size) for size in (6, units)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_models_are_matched_by_position_and_another_one_is_left_as_it_was(tmp_path: pathlib.Path) -> None:
    first, second, other = unnamed(), unnamed(), unnamed(9)
    pipelined = transform(first, plan(cuts=[first.layers[0].name]))
    pipelined.save_checkpoint(tmp_path / "untrained")  # the model itself
    transform(second, plan(cuts=[second.layers[0].name])).restore_checkpoint(tmp_path / "untrained")
    assert_identical(second, values(first))
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
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pipelined: dapple.PipelinedModel,
) -> None:
    """Also if servers have written to a directory of the same name, which isn't the client's."""
    good = pipelined.save_checkpoint(tmp_path)
    pipelined.train_on_batch(X, Y)
    snapshots, elsewhere = pipelined._engine.values._snapshots, tmp_path / "elsewhere"
    elsewhere.mkdir()
    write = snapshots._session.run
    for place, told in (
        (pathlib.Path("/proc/no/such"), "the servers can't write to"),
        (
            elsewhere,
            r"server /job:localhost/replica:0/task:0/device:CPU:0 has saved its variables, but .*shard-0.index "
            "isn't there.* must be on a file system that this process and all servers share",
        ),
    ):
        monkeypatch.setattr(
            snapshots._session,
            "run",
            lambda fetches, feed=None, to=place: write(fetches, feed and dict.fromkeys(feed, f"{to}/x")),
        )
        with caplog.at_level(logging.WARNING):
            pipelined.save_checkpoint(tmp_path, wait=False)
            with pytest.raises(CheckpointError, match=told):
                pipelined.wait_for_checkpoint()
        assert names(tmp_path) == ["elsewhere", good.name]
    assert "save-000002-step-3 couldn't be written: the servers can't write to" in caplog.text
    pipelined.wait_for_checkpoint()
    monkeypatch.undo()
    assert pipelined.save_checkpoint(tmp_path).name == "save-000002-step-3"


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


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """``fail(when)`` lets the file system be full whenever ``when()`` is true."""
    to_disk = checkpoint_files._to_disk

    def prepare(when: Callable[[], bool]) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            if when():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return to_disk(*arguments, **options)

        monkeypatch.setattr(checkpoint_files, "_to_disk", call)

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
    """A full directory was never mentioned at its end."""
    epoch, steps = Epoch(pipelined), pipelined._runtime.elastic.steps
    fail(lambda: epoch.number >= 2)
    with caplog.at_level(logging.WARNING, logger="dapple_tf"), pytest.raises(CheckpointError) as error:
        fit(pipelined, tmp_path, epoch)
    text = str(error.value)
    assert text.startswith("training is over, but its last checkpoint couldn't be written: ")
    assert "No space left on device" in text
    assert pipelined._runtime.elastic.steps == steps + EPOCHS
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
    steps = pipelined._runtime.elastic.steps
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*: .*Not a directory"):
        fit(pipelined, tmp_path / "file" / "inside")
    assert pipelined._runtime.elastic.steps == steps


# ---- one training writes to a directory at a time; its name is told, and its end frees the directory

HOLD = textwrap.dedent("""
    import os, pathlib, sys, time
    from dapple_tf.checkpoints.directory_lock import DirectoryLock
    lock = DirectoryLock(pathlib.Path(sys.argv[1]), "other", lambda: True)
    if sys.argv[2] == "alone" or os.fork() == 0:  # A child tells when it has left the lock to its parent.
        print("holds", flush=True)
        print(os.getpid(), flush=True)
    time.sleep(1000)
""")


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return classifier(name="mine")


def save(saver: Saver, directory: pathlib.Path, model: keras.Model, step: int = 1) -> None:
    saver.save(directory, model, None, step=step, progress=Progress(), plan="{}", keep=3)
    saver.wait()


def test_another_process_is_named_and_does_not_hinder_reading(tmp_path: pathlib.Path, model: keras.Model) -> None:
    """Of 144 checkpoints that two processes wrote, 27 failed with "No such file or directory"."""
    saver = Saver()
    save(saver, tmp_path, model)
    saver.release()
    with client(HOLD, str(tmp_path), "with a child") as other:
        assert other.stdout is not None
        expect(other, "holds")
        child = int(other.stdout.readline())
        with pytest.raises(CheckpointError) as error:
            save(saver, tmp_path, model, 2)
        owner = f"model 'other' of process {other.pid} on host {socket.gethostname()}, which was started at 20"
        assert f"{tmp_path} is in use: {owner}" in str(error.value)
        with pytest.raises(CheckpointError, match="is in use"), saver.training(tmp_path, "mine"):
            raise AssertionError("it began")
        assert dapple.load_checkpoint(tmp_path, model).step == 1
        other.send_signal(signal.SIGKILL)
        other.wait()
        try:
            assert not has_ended(child)  # It doesn't keep the directory.
            save(saver, tmp_path, model, 3)
        finally:
            os.kill(child, signal.SIGKILL)
    assert [path.name for path in checkpoints(tmp_path)] == ["save-000001-step-1", "save-000002-step-3"]
    saver.release()
    assert not (tmp_path / LOCK).exists()


def test_models_of_one_process_take_turns_but_never_at_once(tmp_path: pathlib.Path, model: keras.Model) -> None:
    one, other = Saver(), Saver()
    for step, own in enumerate((one, other, one), start=1):
        save(own, tmp_path, model, step)
    with (
        one.training(tmp_path, "mine"),
        pytest.raises(CheckpointError, match="is in use: model 'mine' of this process saves its checkpoints there;"),
    ):
        save(other, tmp_path, model, 4)
    with other.training(tmp_path, "mine"):
        pass  # It has no part in the error before.
    save(other, tmp_path, model, 5)
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["2", "3", "5"]


def test_a_directory_that_was_removed_is_locked_anew(tmp_path: pathlib.Path, model: keras.Model) -> None:
    place, saver = tmp_path / "runs", Saver()
    save(saver, place, model)
    place.rename(tmp_path / "elsewhere")
    save(saver, place, model)
    with client(HOLD, str(place), "alone") as other:
        assert other.stderr is not None
        assert "is in use: model 'mine'" in other.stderr.read()


@pytest.fixture
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)


def write(directory: pathlib.Path, owner: Owner) -> None:
    (directory / LOCK).write_text(json.dumps(dataclasses.asdict(owner)))


@pytest.mark.usefixtures("_no_locks")
def test_without_locks_the_name_counts(tmp_path: pathlib.Path, model: keras.Model) -> None:
    here, saver, parent = Owner.here("other"), Saver(), os.getppid()
    for owner in (dataclasses.replace(here, process=parent, life=_life(parent)), Owner("far", 7, 0, "", "m")):
        write(tmp_path, owner)
        with pytest.raises(CheckpointError, match=r"is in use: .*\(if that has ended, remove .*\.lock\)"):
            save(saver, tmp_path, model)
    for owner in (
        dataclasses.replace(here, process=2**22 + 1),  # no such process
        dataclasses.replace(here, process=parent, life="1"),  # another one has its number now
        here,  # left behind by this process
    ):
        write(tmp_path, owner)
        save(saver, tmp_path, model)
        saver.release()
    for way in (tmp_path / LOCK, tmp_path / ".lock-taking"):  # Their creators haven't written their names yet.
        way.touch()
        with pytest.raises(CheckpointError, match=r"is in use: another process .*\(if that has ended, remove .*lock"):
            save(saver, tmp_path, model)
        if way.name == LOCK:
            write(tmp_path, dataclasses.replace(here, process=2**22 + 1))


TAKE = textwrap.dedent("""
    import errno, fcntl, pathlib, sys
    from dapple_tf.checkpoints import directory_lock

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    fcntl.flock = refuse
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        lock = directory_lock.DirectoryLock(pathlib.Path(sys.argv[1]), "other", lambda: True)
        print("holds", flush=True)
    except directory_lock.CheckpointError:
        print("waits", flush=True)
    sys.stdin.readline()
""")


def test_without_locks_one_of_several_that_begin_at_once_has_it(tmp_path: pathlib.Path) -> None:
    """Two had both read an empty file, and both wrote their names into it. Their former owner has ended."""
    write(tmp_path, dataclasses.replace(Owner.here("former"), process=2**22 + 1))
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(client(TAKE, str(tmp_path), stdin=subprocess.PIPE)) for _ in range(3)]
        for other in others:
            expect(other, "ready")
        for other in others:
            assert other.stdin is not None
            other.stdin.write("go\n")
            other.stdin.flush()
        said = [other.stdout.readline() for other in others if other.stdout is not None]
    assert sorted(said) == ["holds\n", "waits\n", "waits\n"]


@pytest.mark.parametrize(
    "make", [pathlib.Path.symlink_to, pathlib.Path.hardlink_to, lambda lock, mine: os.mkfifo(lock)]
)
def test_a_file_that_no_training_has_left_is_not_touched(tmp_path: pathlib.Path, make: Callable[..., None]) -> None:
    """Whatever a link led to was truncated and overwritten."""
    place, mine = tmp_path / "runs", tmp_path / "mine"
    place.mkdir()
    mine.write_text("precious")
    make(place / LOCK, mine)
    with pytest.raises(CheckpointError, match=r"\.lock is a link or no regular file"):
        DirectoryLock(place, "mine", lambda: False)
    assert mine.read_text() == "precious"


@pytest.mark.parametrize(("directory", "lock"), [(0o755, 0o600), (0o775, 0o660)])
def test_who_cannot_write_to_the_directory_cannot_lock_it(tmp_path: pathlib.Path, directory: int, lock: int) -> None:
    tmp_path.chmod(directory)
    before = os.umask(0)
    try:
        held = DirectoryLock(tmp_path, "mine", lambda: False)
    finally:
        os.umask(before)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == lock
    held.release()


def test_files_that_others_have_left(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """They name nobody, or an owner on another machine that has not given it back."""
    wrong = '{"host": 1, "process": 2, "started": 3, "life": "4", "model": "m"}'
    for text in ("", "{", "[1]", wrong, "[" * 9999, json.dumps(dataclasses.asdict(Owner("far", 7, 0, "", "m")))):
        assert not caplog.text
        (tmp_path / LOCK).write_text(text)
        with caplog.at_level(logging.WARNING, logger="dapple_tf"):
            DirectoryLock(tmp_path, "mine", lambda: False).release()
        assert not (tmp_path / LOCK).exists()
    assert "was in use by model 'm' of process 7 on host far" in caplog.text
