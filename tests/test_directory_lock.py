"""One training writes to a directory of checkpoints at a time; its name is told, and its end frees the directory."""

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
from collections.abc import Callable
from typing import Any

import keras
import pytest
from models_for_tests import classifier
from workers import client, expect, has_ended

import dapple_tf as dapple
from dapple_tf.checkpoints.checkpoint import Progress
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.directory_lock import LOCK, DirectoryLock, Owner, _life
from dapple_tf.checkpoints.saver import Saver

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
    with client(HOLD, str(tmp_path), "alone") as other:
        expect(other, "holds")
        with pytest.raises(CheckpointError) as error:
            save(saver, tmp_path, model, 2)
        owner = f"model 'other' of process {other.pid} on host {socket.gethostname()}, which was started at 20"
        assert f"{tmp_path} is in use: {owner}" in str(error.value)
        with pytest.raises(CheckpointError, match="is in use"), saver.training(tmp_path, "mine"):
            raise AssertionError("it began")
        assert dapple.load_checkpoint(tmp_path, model).step == 1
        other.send_signal(signal.SIGKILL)
        other.wait()
    save(saver, tmp_path, model, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["save-000001-step-1", "save-000002-step-3"]
    saver.release()
    assert not (tmp_path / LOCK).exists()


def test_children_do_not_keep_it(tmp_path: pathlib.Path, model: keras.Model) -> None:
    with client(HOLD, str(tmp_path), "with a child") as other:
        assert other.stdout is not None
        expect(other, "holds")
        child = int(other.stdout.readline())
        other.send_signal(signal.SIGKILL)
        other.wait()
        try:
            assert not has_ended(child)
            save(Saver(), tmp_path, model)
        finally:
            os.kill(child, signal.SIGKILL)


def test_models_of_one_process_take_turns_but_never_at_once(tmp_path: pathlib.Path, model: keras.Model) -> None:
    one, other = Saver(), Saver()
    for step, saver in enumerate((one, other, one), start=1):
        save(saver, tmp_path, model, step)
    with (
        one.training(tmp_path, "mine"),
        pytest.raises(CheckpointError, match="is in use: model 'mine' of this process saves its checkpoints there;"),
    ):
        save(other, tmp_path, model, 4)
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


@pytest.mark.parametrize("former", [None, "an owner that has ended"])
def test_without_locks_one_of_several_that_begin_at_once_has_it(tmp_path: pathlib.Path, former: str | None) -> None:
    """Two had both read an empty file, and both wrote their names into it."""
    if former is not None:
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


@pytest.mark.parametrize("kind", ["symbolic link", "link to nowhere", "hard link", "pipe", "folder"])
def test_a_file_that_no_training_has_left_is_not_touched(tmp_path: pathlib.Path, kind: str) -> None:
    """Whatever a link led to was truncated and overwritten."""
    place, mine = tmp_path / "runs", tmp_path / "mine"
    place.mkdir()
    mine.write_text("precious")
    lock = place / LOCK
    make: dict[str, Callable[[], Any]] = {
        "symbolic link": lambda: lock.symlink_to(mine),
        "link to nowhere": lambda: lock.symlink_to(tmp_path / "nowhere"),
        "hard link": lambda: lock.hardlink_to(mine),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=r"\.lock is a link or no regular file|Is a directory: .*\.lock"):
        DirectoryLock(place, "mine", lambda: False)
    assert mine.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mine"}


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
