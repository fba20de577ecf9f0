"""``fit`` with checkpoints: when they are saved, and how a run resumes from one."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from dapple_tf.checkpoints.checkpoint import Checkpoint, Progress, metrics_of
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError, UnreadableCheckpointError
from dapple_tf.checkpoints.data_position import TrainingData
from dapple_tf.common.keras_private import can_convert_arrays, train_validation_split
from dapple_tf.frontend.attachment import listed
from dapple_tf.frontend.batch import spec_of
from dapple_tf.frontend.capture import build
from dapple_tf.frontend.variables import VariableTable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """When ``fit`` saves checkpoints, and where.

    Checkpoints are written in the background while training goes on.

    Attributes:
        directory: where to save; on a cluster, a file system that all servers share.
        every_steps: steps between two checkpoints; None saves at the end of each epoch.
        keep: number of checkpoints to keep; older ones are removed.
    """

    directory: str | os.PathLike[str]
    every_steps: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 on")


class CheckpointedFit(keras.callbacks.Callback):
    """One call of ``fit`` with checkpoints, saved after the user's callbacks: what they assign is saved, too."""

    def __init__(
        self,
        settings: Checkpointing,
        model: keras.Model,
        batch_size: int,
        save: Callable[[Progress], object],
        steps: Callable[[], int],
    ) -> None:
        """Prepares the call.

        Args:
            settings: when and where to save.
            model: the model that is trained.
            batch_size: batch size of arrays.
            save: function that begins to save a checkpoint.
            steps: number of training steps done.
        """
        super().__init__()
        self.set_model(model)
        self._settings, self._batch_size, self._save, self._steps = settings, batch_size, save, steps
        self._within_epoch: Checkpoint | None = None
        self._saved = 0  # step of the last checkpoint
        self._epoch = 0

    def resumable(self) -> Checkpoint | None:
        """Returns the newest intact checkpoint, if there is any; damaged ones are told.

        Raises:
            CheckpointError: all are damaged, or a newer one can't be read by this process or version.
        """
        faults: list[CheckpointError] = []
        paths = checkpoints(pathlib.Path(self._settings.directory).absolute())
        for path in reversed(paths):
            try:
                source = Checkpoint.open(path)
                source.check()
            except UnreadableCheckpointError:
                raise
            except CheckpointError as error:
                faults.append(error)
            else:
                for fault in faults:
                    logger.warning("%s; training goes on from the older checkpoint %s, which is intact", fault, path)
                return source
        if faults:
            raise CheckpointError(
                f"{faults[0]}; none of the {len(paths)} checkpoints in {self._settings.directory} is intact: remove "
                f"them to start from the beginning, or give the directory of others"
            ) from faults[0]
        logger.info("%s has no checkpoint: training starts from the beginning", self._settings.directory)
        return None

    def arguments(self, source: Checkpoint | None, x: Any, y: Any, **given: Any) -> dict[str, Any]:
        """Returns the arguments for Keras' ``fit``.

        Args:
            source: the checkpoint to resume from, whose values have been restored.
            x: as for ``fit``.
            y: as for ``fit``.
            given: the other arguments of ``fit``.

        Raises:
            CheckpointError: the checkpoint is of another training.
        """
        weights, split = given.pop("sample_weight", None), given.pop("validation_split", 0.0)
        if split and given.get("validation_data") is None and can_convert_arrays((x, y, weights)):
            (x, y, weights), given["validation_data"] = train_validation_split((x, y, weights), validation_split=split)
        data = TrainingData.of(
            *(x, y, weights),
            batch_size=self._batch_size,
            shuffle=given.pop("shuffle", True),
            class_weight=given.pop("class_weight", None),
            steps_per_epoch=given.get("steps_per_epoch"),
        )
        self._data, data.position_due = data, self._due
        if source is not None and source.manifest.data is not None:
            manifest = source.manifest
            if manifest.batch:
                spec = spec_of(self.model, *keras.utils.unpack_x_y_sample_weight(data.example()))
                build(self.model, VariableTable(self.model), spec)  # Keras makes metrics for the first batch only.
                self._within_epoch = source
            data.resume(source.manifest.data, source.read_state(), manifest.batch)
            given["initial_epoch"] = manifest.epoch
            logger.info("training goes on at batch %d of epoch %d", manifest.batch, manifest.epoch)
        given["callbacks"] = self._callbacks(data, given)
        return {"x": data, **given}

    def _callbacks(self, data: TrainingData, given: Mapping[str, Any]) -> keras.callbacks.CallbackList:
        callbacks = given.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return _SeenSteps(data, [*callbacks.callbacks, self], model=self.model)
        verbose = given.get("verbose", "auto")
        return _SeenSteps(
            data,
            [*listed(callbacks), self],
            add_history=True,
            add_progbar=verbose != 0,
            model=self.model,
            verbose=verbose,
            epochs=given.get("epochs", 1),
            steps=given.get("steps_per_epoch") or data.num_batches,
        )

    def _due(self, following: int = 1) -> bool:
        """Returns whether a checkpoint is due after some more steps, other than at the end of a round."""
        every = self._settings.every_steps
        return every is not None and (self._steps() + following) // every > self._saved // every

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the current step as saved: nothing has changed since."""
        self._saved = self._steps()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores the metrics of the resumed epoch, which Keras has reset."""
        self._epoch = epoch
        source, self._within_epoch = self._within_epoch, None
        if source is not None:
            source.assign(source.match(metrics_of(self.model)))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves a checkpoint if one is due; ``batch`` is the number of the epoch's last step."""
        if self._due(0):
            self._now(self._epoch, batch + 1, epoch_over=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves a checkpoint after validation if one is due."""
        self._epoch = epoch + 1
        if self._settings.every_steps is None:
            self._now(self._epoch, 0, epoch_over=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Saves what the last checkpoint lacks."""
        if self._steps() > self._saved:
            self._now(self._epoch, 0, epoch_over=True)

    def _now(self, epoch: int, batch: int, *, epoch_over: bool) -> None:
        self._saved = self._steps()
        data, state = self._data.position(epoch_over=epoch_over)
        try:
            self._save(Progress(epoch, batch, data, state))
        except CheckpointError as error:  # `Saver.training` raises it in the end, unless a later one succeeds.
            logger.warning("no checkpoint after step %d: %s; training goes on", self._saved, error)


class _SeenSteps(keras.callbacks.CallbackList):
    """Callbacks that don't see steps that are only counted."""

    def __init__(self, data: TrainingData, callbacks: list[Any], **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._data = data
        self._hidden = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Passes on a step that really runs."""
        self._hidden = self._data.counting
        if not self._hidden:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Passes on a step that really ran."""
        if not self._hidden:
            super().on_train_batch_end(batch, logs)
