"""What TensorFlow knows of this machine, asked in a process that ends: nothing of TensorFlow stays in this one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from absl import logging

from dapple_tf.clusters.ends import End
from dapple_tf.describe.hardware import gpu_kinds
from dapple_tf.errors import ClusterError
from dapple_tf.network.versions import own_versions

_PR_SET_PDEATHSIG = 1


class MachineReport(NamedTuple):
    """What TensorFlow knows of a machine.

    Attributes:
        versions: those that a worker here runs with, see `own_versions`.
        gpus: ``memory_bytes`` and ``hardware`` of each GPU.
    """

    versions: Mapping[str, str] = {}
    gpus: tuple[Mapping[str, Any], ...] = ()


def report() -> MachineReport:
    """Imports TensorFlow in a process of its own, which tells its versions and GPUs, and ends.

    Raises:
        ClusterError: that process fails; it has told why.
    """
    reading, writing = os.pipe()
    own = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run_child(lambda: _tell(writing), "the question for this machine's devices", own)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise ClusterError(f"TensorFlow was asked for this machine's devices, but {End.of(status, 0, 0).text}")
    answer = json.loads(text)
    return MachineReport(answer["versions"], tuple(answer["gpus"]))


def run_child(work: Callable[[], object], name: str, parent: int) -> NoReturn:
    """Runs what a forked process is for, and ends it: with code 1 after an error, and at once if its parent ends.

    Args:
        work: what it is for.
        name: what it is for, in words for the log.
        parent: the process that forked it.
    """
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and this process with it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
            code = 0
    except Exception:
        logging.exception("%s failed", name)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # TensorFlow's server can't be stopped.


def _tell(writing: int) -> None:
    import tensorflow as tf  # heavy, hence here

    gpus = []
    if tf.config.list_physical_devices("GPU"):
        from graph_passes.ir.tensorflow_private import local_devices  # imports TensorFlow

        gpu_devices = [device for device in local_devices() if device.device_type == "GPU"]
        gpus = [
            {"memory_bytes": int(device.memory_limit), "hardware": hardware}
            for device, hardware in zip(gpu_devices, gpu_kinds(), strict=True)
        ]
    with open(writing, "w", encoding="utf-8") as pipe:
        json.dump({"versions": dict(own_versions()), "gpus": gpus}, pipe)
