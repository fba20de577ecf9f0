"""Files as tensors, without reading them: the system reads what is used."""

from __future__ import annotations

import mmap
import pathlib
import sys

import numpy as np
import tensorflow as tf


def mapped(path: pathlib.Path, dtype: np.dtype) -> tf.Tensor:
    """All of a file that isn't empty as numbers, [file size // item size]."""
    # Private pages may be written to, as tensors want it, and take no memory until they are.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    numbers = np.frombuffer(memory, dtype, len(memory) // dtype.itemsize)
    return tf.experimental.dlpack.from_dlpack(numbers.__dlpack__())
