"""Checkpoints: saved by the servers while training goes on, and restored under any plan and cluster.

A checkpoint identifies variables by their positions in the model and the optimizer, not by devices: it can be restored
under another plan, on other devices, or into the plain Keras model (`load_checkpoint`). `checkpoint_files.py` describes
the files. Loading one never executes code: files are JSON and tensors.
"""

from __future__ import annotations

import logging
import os
import pathlib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint_files import MANIFEST, check_shards, checkpoints, read_manifest
from dapple_tf.checkpoints.checkpoint_manifest import DATA, CheckpointError, Entry, Manifest
from dapple_tf.common.keras_private import seeds_of
from dapple_tf.common.text import counted
from dapple_tf.errors import reason

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


class Progress(NamedTuple):
    """How far training has come.

    Attributes:
        epoch: the next epoch, from 0.
        batch: number of its batches that have been trained on.
        data: position in the training data, as JSON values; None if it isn't known.
        state: state of the training data's iterator: variant tensors, by name.
    """

    epoch: int = 0
    batch: int = 0
    data: Mapping[str, Any] | None = None
    state: Mapping[str, tf.Tensor] = types.MappingProxyType({})


def latest_checkpoint(directory: Path) -> pathlib.Path | None:
    """Returns the newest complete checkpoint in a directory; None if there is none."""
    paths = checkpoints(pathlib.Path(directory))
    return paths[-1] if paths else None


def load_checkpoint(path: Path, model: keras.Model, *, optimizer: bool = True) -> Manifest:
    """Loads a checkpoint into a Keras model, and into its optimizer if it is compiled.

    Args:
        path: a checkpoint, or a directory of checkpoints, whose newest is taken.
        model: a built model with the same variables, from any process and under any names.
        optimizer: False leaves the optimizer alone.

    Returns:
        The checkpoint's manifest; its ``step``, ``epoch`` and ``batch`` say how far training was.

    Raises:
        CheckpointError: there is none, it is damaged, or it doesn't fit the model, which stays unchanged.
    """
    checkpoint = Checkpoint.open(path)
    places = variables_of(model)
    if not optimizer:
        places = {key: variable for key, variable in places.items() if key.startswith("model/")}
    checkpoint.assign(checkpoint.match(places))
    return checkpoint.manifest


def variables_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the variables of a model and its optimizer without metrics, by key ("model/12", "optimizer/3")."""
    metrics = {id(variable) for variable in model.metrics_variables}
    own = {id(v): v for v in (*model.variables, *seeds_of(model)) if id(v) not in metrics}
    variables = {f"model/{index}": variable for index, variable in enumerate(own.values())}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables |= {f"optimizer/{index}": variable for index, variable in enumerate(optimizer.variables)}
    return variables


def metrics_of(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the variables of a model's metrics, its mean loss included, by key ("metrics/0")."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    return {f"metrics/{index}": variable for index, variable in enumerate(variables)}


class Match(NamedTuple):
    """A variable with its key, and the entry of a checkpoint that it gets."""

    key: str
    variable: keras.Variable
    entry: Entry


class Checkpoint:
    """A checkpoint on disk whose manifest and index files have been checked.

    Attributes:
        path: its directory.
        manifest: its contents.
    """

    def __init__(self, path: pathlib.Path, manifest: Manifest) -> None:
        """Use `open` instead."""
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Opens a checkpoint, or the newest in a directory.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        place = pathlib.Path(path).absolute()
        if not (place / MANIFEST).exists():
            newest = latest_checkpoint(place)
            if newest is None:
                raise CheckpointError(f"{place} is no checkpoint (it has no {MANIFEST}), and holds none")
            place = newest
        manifest = read_manifest(place)
        check_shards(place, manifest)
        return cls(place, manifest)

    def match(self, variables: Mapping[str, keras.Variable]) -> list[Match]:
        """Returns the entry that each variable gets.

        Variables of the model and the optimizer match by path if paths are the same; otherwise by position, where
        dtypes, shapes and names must agree up to the numbers in Keras' automatic layer names.

        Args:
            variables: variables by key; entries of sections without any variable are ignored.

        Raises:
            CheckpointError: they don't match; the text has the first differences.
        """
        matches: list[Match] = []
        for section in ("model", "optimizer", "metrics"):
            own = {key: variable for key, variable in variables.items() if key.partition("/")[0] == section}
            if own:
                saved = [entry for entry in self.manifest.entries if entry.section == section]
                saved.sort(key=lambda entry: int(entry.key.partition("/")[2]))
                entries = self._matched(section, list(own.values()), saved)
                matches += map(Match, own, own.values(), entries)
        return matches

    def _matched(self, section: str, own: Sequence[keras.Variable], saved: Sequence[Entry]) -> list[Entry]:
        paths = [variable.path for variable in own]
        by_path = {entry.path: entry for entry in saved}
        order = [by_path[path] for path in paths] if by_path.keys() == set(paths) else list(saved)
        if len(order) != len(saved) or len(by_path) < len(order):
            order = list(saved)
        faults = [
            f"{variable.path} {dtype_of(variable)} {tuple(variable.shape)}, where the checkpoint has "
            f"{entry.path} {entry.dtype} {entry.shape}"
            for variable, entry in zip(own, order, strict=False)
            if (dtype_of(variable), tuple(variable.shape)) != (entry.dtype, entry.shape)
            or _last_name(variable.path) != _last_name(entry.path)
        ]
        if len(own) != len(saved):
            extra = paths[len(saved) :] or [entry.path for entry in saved[len(own) :]]
            faults.append(
                f"{counted(len(own), 'variable')}, where the checkpoint has {len(saved)} (such as {extra[0]})"
            )
        if faults:
            more = f", and {len(faults) - 3} more differences" if len(faults) > 3 else ""
            raise CheckpointError(
                f"checkpoint {self.path} is of another model: the {section} has {'; '.join(faults[:3])}{more}"
            )
        if section == "optimizer":
            now, before = _first_names(paths), _first_names([entry.path for entry in order])
            if now != before:
                logger.warning(
                    "checkpoint %s was saved with the optimizer %s, and is read into %s, which goes on from the same "
                    "slots by another rule; if that isn't meant, compile the model with the former optimizer",
                    *(self.path, before, now),
                )
        return order

    def assign(self, matches: Iterable[Match]) -> None:
        """Reads entries in this process, and assigns them to Keras' variables once all have been read.

        Raises:
            CheckpointError: a file is damaged; nothing is assigned.
        """
        matches = list(matches)
        values = self._read([match.entry for match in matches])
        for _, variable, entry in matches:
            variable.assign(values[entry.key])

    def check(self) -> None:
        """Reads each tensor once, with its checksum.

        Raises:
            CheckpointError: a file is damaged.
        """
        for entry in self.manifest.entries:
            self._read([entry])
        self.read_state()

    def _read(self, entries: Iterable[Entry]) -> dict[str, tf.Tensor]:
        shards: dict[str, list[Entry]] = {}
        for entry in entries:
            shards.setdefault(entry.shard, []).append(entry)
        values: dict[str, tf.Tensor] = {}
        for shard, group in shards.items():
            keys = [entry.key for entry in group]
            tensors = self._tensors(shard, keys, [tf.dtypes.as_dtype(entry.dtype) for entry in group])
            values |= dict(zip(keys, tensors, strict=True))
        return values

    def read_state(self) -> dict[str, tf.Tensor]:
        """Returns the state of the training data's iterator: variant tensors, by name; empty if it wasn't saved.

        Raises:
            CheckpointError: a file is damaged.
        """
        if DATA not in self.manifest.shards:
            return {}
        names = ["iterator", "start"]
        return dict(zip(names, self._tensors(DATA, names, [tf.variant] * len(names)), strict=True))

    def _tensors(self, shard: str, names: list[str], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        prefix = str(self.path / shard)
        try:
            with tf.device("CPU:0"):
                return list(
                    tf.raw_ops.RestoreV2(
                        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), dtypes=dtypes
                    )
                )
        except tf.errors.OpError as error:
            raise CheckpointError(f"shard {shard} of checkpoint {self.path} is damaged: {reason(error)}") from error


def dtype_of(variable: keras.Variable) -> str:
    """Returns the name of a variable's type, as a manifest has it."""
    return str(keras.backend.standardize_dtype(variable.dtype))


def _last_name(path: str) -> str:
    """Returns a variable's own name, without the numbers of layers in it."""
    return _without_numbers(path.rpartition("/")[2])


def _first_names(paths: Iterable[str]) -> str:
    """Returns the names of the optimizers that have variables, without Keras' numbers."""
    return ", ".join(dict.fromkeys(repr(_without_numbers(path.partition("/")[0])) for path in paths))


def _without_numbers(name: str) -> str:
    return re.sub(r"_\d+(?=_|$)", "", name)
