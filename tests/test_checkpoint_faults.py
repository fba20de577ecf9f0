"""File systems that fail during training: it goes on, and ends with an error only if its last checkpoint is missing."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
from models_for_tests import classifier, plan, samples, transform

import dapple_tf as dapple
from dapple_tf.checkpoints import checkpoint_files
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError

X, Y, _ = samples(7)
EPOCHS = 4

Fail = Callable[[Callable[[], bool]], None]


def _failing(code: int, then: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if when():
            raise OSError(code, os.strerror(code))
        return then(*arguments, **options)

    return call


@pytest.fixture(params=["read-only", "full"])
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """``fail(when)`` lets the file system fail whenever ``when()`` is true."""

    def prepare(when: Callable[[], bool]) -> None:
        if request.param == "read-only":
            make = pathlib.Path.mkdir
            monkeypatch.setattr(pathlib.Path, "mkdir", _failing(errno.EROFS, make, when))
        else:
            monkeypatch.setattr(checkpoint_files, "_to_disk", _failing(errno.ENOSPC, checkpoint_files._to_disk, when))

    return prepare


@pytest.fixture(scope="module")
def pipelined() -> dapple.PipelinedModel:
    return transform(classifier(), plan())


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


def test_training_goes_on_and_ends_with_an_error(
    tmp_path: pathlib.Path, fail: Fail, pipelined: dapple.PipelinedModel, caplog: pytest.LogCaptureFixture
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
    assert len(checkpoints(tmp_path)) == 2
    told = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert len(told) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in checkpoints(tmp_path)]


def test_a_fault_that_passes_is_no_error(tmp_path: pathlib.Path, fail: Fail, pipelined: dapple.PipelinedModel) -> None:
    epoch = Epoch(pipelined)
    fail(lambda: epoch.number == 1)
    history = fit(pipelined, tmp_path, epoch)
    assert history.epoch == list(range(EPOCHS))
    assert len(checkpoints(tmp_path)) == EPOCHS - 1


def test_where_nothing_can_be_written_training_does_not_begin(
    tmp_path: pathlib.Path, pipelined: dapple.PipelinedModel
) -> None:
    (tmp_path / "file").write_text("")
    steps = pipelined._runtime.steps
    with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*: .*Not a directory"):
        fit(pipelined, tmp_path / "file" / "inside")
    assert pipelined._runtime.steps == steps
