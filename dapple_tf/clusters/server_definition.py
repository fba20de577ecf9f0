"""What a TensorFlow server is told at its start, as TensorFlow's messages, without TensorFlow's Python part."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Self

# Numbers of fields, from TensorFlow's protobuf/tensorflow_server.proto, cluster.proto and config.proto.
_CLUSTER, _JOB_NAME, _TASK, _SESSION_CONFIG, _PROTOCOL = 1, 2, 3, 4, 5  # ServerDef
_JOB = 1  # ClusterDef
_NAME, _TASKS = 1, 2  # JobDef
_KEY, _VALUE = 1, 2  # an entry of a map
_DEVICE_COUNT, _INTRA_OP, _INTER_OP, _GPU_OPTIONS, _EXPERIMENTAL = 1, 2, 5, 6, 16  # ConfigProto
_ALLOW_GROWTH = 4  # GPUOptions
_LEADER = 1  # ConfigProto.Experimental

_VARINT, _BYTES = 0, 2
"""Protobuf's types of fields on the wire."""


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Devices and threads of a server.

    Attributes:
        cpus: number of its logical CPU devices.
        gpus: number of its GPUs, whose memory is taken as it is needed, instead of all at the start.
        inter_op: threads that run operators; 0 for TensorFlow's own choice.
        intra_op: threads inside an operator; 0 for TensorFlow's own choice.
        leader: number of the worker that assigns the keys of collective operations; None for no such operations.
    """

    cpus: int = 1
    gpus: int = 0
    inter_op: int = 0
    intra_op: int = 0
    leader: int | None = None

    @classmethod
    def of_worker(cls, cpus: int, gpus: int, leader: int = 0) -> Self:
        """Returns a worker's options for as many devices; threads as in `session.session_config`."""
        inter_op, intra_op = threads(cpus + gpus, cpus)
        return cls(max(1, cpus), gpus, inter_op, intra_op, leader)


def threads(devices: int, cpus: int) -> tuple[int, int]:
    """Returns the threads that run operators, one for each device at least, and those inside an operator.

    Logical CPU devices share the cores. Without any, TensorFlow chooses the threads inside an operator (0).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(devices + 1, cores), max(1, cores // cpus) if cpus else 0


def worker_name(task: int) -> str:
    """Returns TensorFlow's name of a worker."""
    return f"/job:worker/replica:0/task:{task}"


def serialized(cluster: Mapping[str, Sequence[str]], job: str, task: int, settings: ServerSettings) -> bytes:
    """Returns a serialized ``ServerDef``.

    Args:
        cluster: job -> the address of each of its tasks.
        job: the server's job.
        task: its number there.
        settings: its devices and threads.
    """
    jobs = [
        _message((_NAME, name), *((_TASKS, _message((_KEY, number), (_VALUE, at))) for number, at in enumerate(own)))
        for name, own in sorted(cluster.items())
    ]
    config: list[tuple[int, int | str | bytes]] = [
        (_DEVICE_COUNT, _message((_KEY, "CPU"), (_VALUE, settings.cpus))),
        (_DEVICE_COUNT, _message((_KEY, "GPU"), (_VALUE, settings.gpus))),
        (_INTRA_OP, settings.intra_op),
        (_INTER_OP, settings.inter_op),
        *([(_GPU_OPTIONS, _message((_ALLOW_GROWTH, 1)))] if settings.gpus else []),
        *([] if settings.leader is None else [(_EXPERIMENTAL, _message((_LEADER, worker_name(settings.leader))))]),
    ]
    return _message(
        (_CLUSTER, _message(*((_JOB, entry) for entry in jobs))),
        (_JOB_NAME, job),
        (_TASK, task),
        (_SESSION_CONFIG, _message(*config)),
        (_PROTOCOL, "grpc"),
    )


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Returns a protobuf message of fields, each a number and a value that isn't negative."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3 | _VARINT), _varint(value)]
        else:
            text = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | _BYTES), _varint(len(text)), text]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Returns a number in groups of seven bits, the lowest first; all but the last are marked."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
