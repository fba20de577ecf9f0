"""Profiles on disk, under a hash of all that they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.hardware import cpu_kind
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring.example_batch import ExampleBatch
from graph_passes.ir.graph import POSITION_ATTR, NodeDef, renamed_in_body
from graph_passes.ir.program import Program

logger = logging.getLogger(__name__)

_VERSION = 5
"""Version of the measuring method: older files don't count when a model is measured in another way."""


def cache_directory(cache: bool | str | os.PathLike[str]) -> pathlib.Path | None:
    """Returns the directory of profiles: the given one, the default one for True, or None for False."""
    if cache is False:
        return None
    if cache is not True:
        return pathlib.Path(cache)
    given = os.environ.get("DAPPLE_CACHE")
    return pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "dapple_tf" / "profiles"


def read_profile(path: pathlib.Path) -> Profile | None:
    """Returns the profile in a file; None if there is none, or, with a warning, if it can't be used."""
    try:
        return Profile.load(path)
    except FileNotFoundError:
        return None
    except (ProfileError, OSError, ValueError) as error:
        logger.warning("the cached profile %s can't be used and is measured again: %s", path, error)
        return None


def write_profile(path: pathlib.Path, profile: Profile) -> None:
    """Writes a profile atomically, so that no reader finds half of one; only warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(profile.to_json())
            os.replace(name, path)
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("the profile can't be kept in %s: %s", path.parent, error)


def profile_key(
    model: keras.Model,
    program: Program,
    example: ExampleBatch,
    sizes: Sequence[int],
    cluster: Cluster,
    device: int,
    repeats: int | None,
) -> str:
    """Returns a hash of all that the measured costs depend on; the same in every process.

    Args:
        model: the model.
        program: its captured training graph.
        example: its batches.
        sizes: samples of the measured slices.
        cluster: devices that sessions are configured for.
        device: index of the measured device.
        repeats: number of measurements, if it was given.
    """
    own = cluster.devices[device]
    hardware = own.kind or cpu_kind(cluster.num_devices)
    parts = [
        *(_VERSION, tf.version.VERSION, keras.version(), own.type, hardware, cluster.num_devices),
        *(model.name, list(sizes), repeats, [(array.dtype.name, array.shape) for array in example.arrays]),
        [(call.path, call.number, call.stop > call.start) for call in program.roles.calls],
        [(v.name, v.dtype, v.shape, v.kind.value) for v in program.roles.variables],
        _optimizer_text(model.optimizer),
        graph_hash(program),
    ]
    return _hash(json.dumps(parts))[:32]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _optimizer_text(optimizer: Any) -> str:
    """Returns the optimizer's configuration without its name (Keras counts) and a plain, changeable learning rate."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left = {key: plain(entry) for key, entry in value.items() if key != "name"}
            return {k: v for k, v in left.items() if k != "learning_rate" or not isinstance(v, float)}
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(keras.saving.serialize_keras_object(optimizer)), sort_keys=True, default=str)


def graph_hash(program: Program) -> str:
    """Returns a hash of the captured graph under neutral names: those of Keras and TensorFlow contain counters."""
    library = {function.signature.name: function for function in program.graph.library.function}
    hashes: dict[str, str] = {}

    def of_function(name: str) -> str:
        if name not in hashes:
            function = library.get(name)
            hashes[name] = name if function is None else "recursive"
            if function is not None:
                names = {arg.name: f"a{index}" for index, arg in enumerate(function.signature.input_arg)}
                names |= {node.name: f"n{index}" for index, node in enumerate(function.node_def)}
                lines = [of_node(node, names) for node in function.node_def]
                lines += [renamed_in_body(function.ret[arg.name], names) for arg in function.signature.output_arg]
                lines += [str(arg.type) for arg in function.signature.input_arg]
                hashes[name] = _hash("\n".join(lines))
        return hashes[name]

    def of_attr(value: Any) -> str:
        if value.HasField("func"):
            return of_function(value.func.name)
        if value.HasField("list") and value.list.func:
            return ",".join(of_function(function.name) for function in value.list.func)
        return str(value.SerializeToString(deterministic=True).hex())

    def of_node(node: NodeDef, names: Mapping[str, str]) -> str:
        attrs = [
            f"{key}={of_attr(node.attr[key])}"
            for key in sorted(node.attr)
            # Hints and roles; the calls' positions are part of the key as far as they matter.
            if not key.startswith("_") and key != POSITION_ATTR
        ]
        return " ".join([names[node.name], node.op, *(renamed_in_body(text, names) for text in node.input), *attrs])

    names = {node.name: f"n{index}" for index, node in enumerate(program.graph.node)}
    roles = program.roles
    results = [roles.loss, *(variable.update for variable in roles.variables)]
    lines = [of_node(node, names) for node in program.graph.node]
    lines += ["" if ref is None else f"{names[ref.node]}:{ref.output}" for ref in results]
    return _hash("\n".join(lines))
