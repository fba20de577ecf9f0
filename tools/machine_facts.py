"""Facts that a benchmark's numbers depend on besides the code: the machine, and versions of packages.

None of them identifies the machine's owner: no host name, user, path or address.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

_PACKAGES = ("tensorflow", "keras", "numpy", "torch")


def machine_facts() -> dict[str, Any]:
    """Returns the machine's facts, to stand beside measured numbers in JSON.

    Returns:
        ``cpu`` (its model), ``cores`` (that this process may use), ``memory_gib``, ``system``, ``load_1min`` (processes
        that wanted a core within the last minute, which reveals other load), ``date`` (UTC)
        and ``versions``.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "versions": versions,
    }


def cpu_model() -> str:
    """Returns the processor's name as the system reports it; its architecture if there is none."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # Not Linux.
        return platform.processor() or platform.machine()
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names else platform.machine()


def memory_bytes() -> int:
    """Returns the machine's main memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
