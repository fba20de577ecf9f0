"""Numbers for TensorBoard, written by TensorFlow alone: TensorBoard itself needn't be installed.

``tf.summary.scalar`` and Keras' callback are parts of TensorBoard, which TensorFlow doesn't require.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import summary_pb2

from dapple_tf.errors import reason

_VALIDATION = "val_"


class ScalarLog:
    """An event file in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Makes the folder and the file.

        Raises:
            OSError: the folder can't be written to.
        """
        try:
            self._writer = tf.summary.create_file_writer(os.fspath(folder))
        except tf.errors.OpError as error:
            raise OSError(f"log_dir {os.fspath(folder)!r} can't be written to: {reason(error)}") from error
        self._metadata = summary_pb2.SummaryMetadata()
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers by tag, except NaN."""
        with self._writer.as_default():
            for name, value in numbers.items():
                if not math.isnan(value):
                    tf.summary.write(name, tf.constant(value, tf.float32), step, self._metadata)

    def flush(self) -> None:
        """Writes buffered numbers to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class EpochLog(keras.callbacks.Callback):
    """Writes each epoch's losses and metrics as Keras' own callback for TensorBoard does.

    The runs are ``train`` and ``validation`` in the folder, the tags ``epoch_loss`` and so on.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Prepares the log; nothing is written before training begins."""
        super().__init__()
        self._folder = os.fspath(folder)
        self._logs: dict[str, ScalarLog] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes an epoch's numbers."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        rate = getattr(self.model.optimizer, "learning_rate", None)
        self._write("train", epoch, {name: numbers[name] for name in numbers if not name.startswith(_VALIDATION)})
        validated = {name.removeprefix(_VALIDATION): numbers[name] for name in numbers if name.startswith(_VALIDATION)}
        if rate is not None:
            self._write("train", epoch, {"learning_rate": float(keras.ops.convert_to_numpy(rate))})
        if validated:
            self._write("validation", epoch, validated)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the files."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _write(self, run: str, epoch: int, numbers: Mapping[str, float]) -> None:
        if run not in self._logs:
            self._logs[run] = ScalarLog(os.path.join(self._folder, run))
        self._logs[run].write(epoch, {f"epoch_{name}": value for name, value in numbers.items()})
        self._logs[run].flush()
