"""Hardware of this machine, in words that are the same for like devices.

TensorFlow is asked in a process that ends: nothing of it stays in this one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dapple_tf.common.units import gib
from dapple_tf.errors import ClusterError
from dapple_tf.network.inquiry import own_versions
from dapple_tf.network.worker_process import START_SECONDS, environment
from dapple_tf.version import VERSION

logger = logging.getLogger(__name__)

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
_LONGEST = 200
"""The most characters of a description."""


def cpu_kind(devices: int) -> str:
    """Returns the kind of the logical CPU devices of this machine, of which there are ``devices``.

    ``Intel(R) Xeon(R) CPU @ 2.20GHz, 2 cores for 4 devices``: the cores are those that this process may use, by its
    affinity and the quota of its control group.
    """
    model = platform.processor() or platform.machine() or "CPU"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
        quota, period = file.read().split()
        cores = min(cores, int(quota) / int(period))
    shared = f" for {devices} devices" if devices > 1 else ""
    return clean(f"{model}, {cores:g} core{'s' * (cores != 1)}{shared}")


def gpu_kinds() -> list[str]:
    """Returns the kind of each logical GPU that TensorFlow makes here: ``NVIDIA H200, compute capability 9.0``, say."""
    import tensorflow as tf  # heavy, and a description doesn't need it

    kinds = []
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability") or ()))
        name = str(details.get("device_name", "GPU"))
        kind = clean(f"{name}, compute capability {capability}" if capability else name)
        kinds += [kind] * len(tf.config.get_logical_device_configuration(gpu) or [gpu])
    return kinds


def clean(text: str) -> str:
    """Returns a description from elsewhere as one printable line."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:_LONGEST]


class MachineReport(NamedTuple):
    """What TensorFlow knows of a machine.

    Attributes:
        versions: those that a worker here runs with, see `own_versions`.
        gpus: ``memory_bytes``, ``hardware`` and ``card`` of each GPU, see `own_gpus`.
    """

    versions: Mapping[str, str] = {}
    gpus: tuple[Mapping[str, Any], ...] = ()


@functools.cache
def report(options: bytes = b"") -> MachineReport:
    """Imports TensorFlow in a process of its own, which tells its versions and GPUs, and ends.

    Memory of GPUs is what was free there. It is asked for twice: a process that ends meanwhile may still hold some.

    Args:
        options: serialized ``GPUOptions`` of sessions, where other than TensorFlow's own.

    Raises:
        ClusterError: that process fails.
    """
    first = _asked(options)
    second = _asked(options) if first.gpus else first
    return max(first, second, key=lambda told: sum(gpu["memory_bytes"] for gpu in told.gpus))


def _asked(options: bytes) -> MachineReport:
    command = [sys.executable, "-m", __name__, options.hex()]
    try:
        told = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"TensorFlow was asked for this machine's devices, but has said nothing for {START_SECONDS:.0f} s"
        ) from error
    if told.returncode:
        raise ClusterError(
            f"TensorFlow was asked for this machine's devices, but its process ended with code {told.returncode}: "
            f"{told.stderr.strip()[-1000:]}"
        )
    answer = json.loads(told.stdout.splitlines()[-1])
    return MachineReport({**answer["versions"], "dapple_tf": VERSION}, tuple(answer["gpus"]))


def local_gpus() -> tuple[Mapping[str, Any], ...]:
    """Returns `own_gpus` without making any, unless this process has made them already, as Keras' variables do."""
    from graph_passes.ir.tensorflow_private import has_devices, process_config  # imports TensorFlow

    options = process_config().gpu_options.SerializeToString()
    return own_gpus(options) if has_devices() else report(options).gpus


def own_gpus(options: bytes) -> tuple[Mapping[str, Any], ...]:
    """Makes TensorFlow's GPUs in this process, and returns ``memory_bytes``, ``hardware`` and ``card`` of each.

    Memory is taken as it is needed, so that others who ask meanwhile are told the same. Cards have the same text in all
    processes on this machine, and another one on others; parts of a card (MIG) have none.
    """
    if not gpu_kinds():
        return ()
    import tensorflow as tf  # heavy, hence here

    from graph_passes.ir.tensorflow_private import local_devices

    config = tf.compat.v1.ConfigProto()
    config.gpu_options.ParseFromString(options)
    config.gpu_options.allow_growth = True
    gpus = []
    for device in local_devices(config):
        if device.device_type == "GPU":
            described = re.search("name: (.*), pci bus id: (.*), compute capability: (.*)", device.physical_device_desc)
            if described is None:
                raise ClusterError(f"TensorFlow describes {device.name} as {device.physical_device_desc!r}")
            name, bus, capability = described.groups()
            card = "" if " MIG " in name else f"{bus} of machine {_machine()}"
            hardware = f"{name}, compute capability {capability}"
            gpus.append({"memory_bytes": int(device.memory_limit), "hardware": hardware, "card": card})
    return tuple(gpus)


def hide_gpus(lent: Iterable[str | None]) -> None:
    """Leaves this machine's GPUs to workers: TensorFlow makes none in this process.

    Warns if it has made some already that workers lend.

    Args:
        lent: cards of the workers' GPUs, as far as they are known.
    """
    import tensorflow as tf  # heavy, hence here

    try:
        tf.config.set_visible_devices([], "GPU")
    except RuntimeError:  # It has made them.
        cards = set(filter(None, lent))
        held = {gpu["card"]: gpu["memory_bytes"] for gpu in (local_gpus() if cards else ()) if gpu["card"] in cards}
        if held:
            logger.warning(
                "this process (%d) keeps up to %s of memory, which workers will lack, on each GPU of theirs that it "
                "has made devices of already (%s): make the cluster before any model or tensor, or start this process "
                "with CUDA_VISIBLE_DEVICES= in its environment",
                *(os.getpid(), gib(max(held.values())), ", ".join(held)),
            )


def _machine() -> str:
    """Returns a text that differs from machine to machine, but not from container to container."""
    return _BOOT.read_text(encoding="ascii")[:8] if _BOOT.exists() else platform.node()


def _tell() -> None:
    gpus = own_gpus(bytes.fromhex(sys.argv[1]))
    sys.stdout.write(json.dumps({"versions": dict(own_versions()), "gpus": gpus}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without TensorFlow's clean-up, which takes time


if __name__ == "__main__":
    _tell()
