"""What kind of hardware devices are, in words that are the same for like devices."""

from __future__ import annotations

import contextlib
import os
import platform

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
