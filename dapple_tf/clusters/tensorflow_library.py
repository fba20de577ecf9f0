"""TensorFlow's shared library by its C interface: servers in processes that need nothing of its Python part.

A worker's process for a client runs graphs that the client has made. `import tensorflow` would take it 4 s and 210 MiB
of its own; the library alone takes 0.4 s and 40 MiB.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dapple_tf.errors import ClusterError

_NAME = "libtensorflow_cc.so.2"
_BEFORE = ("hashlib", "ssl")
"""Imported before the library, as `import tensorflow` does: its own OpenSSL would take the place of theirs."""
_TRUE = ("1", "true")
_FUNCTIONS = (
    ("TF_NewStatus", ctypes.c_void_p),
    ("TF_DeleteStatus", None, ctypes.c_void_p),
    ("TF_GetCode", ctypes.c_int, ctypes.c_void_p),
    ("TF_Message", ctypes.c_char_p, ctypes.c_void_p),
    ("TF_NewServer", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p),
    ("TF_ServerStart", None, ctypes.c_void_p, ctypes.c_void_p),
    ("TF_ServerTarget", ctypes.c_char_p, ctypes.c_void_p),
)
"""Functions of its C interface (tensorflow/c/c_api.h), with the types of their results and arguments."""


class LibraryError(Exception):
    """TensorFlow's library reports an error; the text is its own."""


class Server:
    """A TensorFlow server, which can't be stopped: it ends with the process."""

    def __init__(self, definition: bytes) -> None:
        """Makes it and has it listen; nothing is answered before `start`.

        Args:
            definition: a serialized ``ServerDef``, see `server_definition.serialized`.

        Raises:
            LibraryError: TensorFlow can't make it; its port may be taken.
            ClusterError: there is no library.
        """
        self._library = load()
        self._handle = self._call("TF_NewServer", definition, len(definition))

    def start(self) -> None:
        """Starts to answer.

        Raises:
            LibraryError: TensorFlow can't start it.
        """
        self._call("TF_ServerStart", self._handle)

    @property
    def target(self) -> str:
        """The target for sessions of this process."""
        target: bytes = self._library.TF_ServerTarget(self._handle)
        return target.decode()

    def _call(self, function: str, *arguments: object) -> int | None:
        """Calls a function whose last argument is a status; returns its result."""
        status = self._library.TF_NewStatus()
        try:
            handle: int | None = getattr(self._library, function)(*arguments, status)
            if self._library.TF_GetCode(status):
                raise LibraryError(self._library.TF_Message(status).decode(errors="replace"))
            return handle
        finally:
            self._library.TF_DeleteStatus(status)


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the library of the installed TensorFlow, which it loads unless this process has it.

    Raises:
        ClusterError: there is none.
    """
    package = importlib.util.find_spec("tensorflow")
    if package is None or package.origin is None:
        raise ClusterError("TensorFlow isn't installed: pip install tensorflow")
    path = Path(package.origin).with_name(_NAME)
    if not path.exists() or _has_extensions(path.parent):
        importlib.import_module("tensorflow")  # It loads them, and the library from wherever it is.
    for module in _BEFORE:
        importlib.import_module(module)
    os.environ["TF2_BEHAVIOR"] = "1"  # `import tensorflow` sets it; the library reads it.
    try:
        library = ctypes.CDLL(str(path) if path.exists() else _NAME)
        for name, result, *arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ClusterError(
            f"TensorFlow's library {_NAME} can't be loaded from {path.parent} ({error}); use a TensorFlow that has it, "
            f"such as that of pip install tensorflow"
        ) from error
    return library


def _has_extensions(package: Path) -> bool:
    """Returns whether `import tensorflow` would load more than the library: kernels, devices or filesystems."""
    return (
        bool(os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"))
        or os.environ.get("TF_USE_MODULAR_FILESYSTEM", "") in _TRUE
        or Path(package, "core", "kernels").exists()
        or any(Path(folder, "tensorflow-plugins").exists() for folder in _site_packages())
    )


def _site_packages() -> Iterator[str]:
    yield from sys.path
    for scheme in sysconfig.get_scheme_names():
        for kind in ("purelib", "platlib"):
            yield sysconfig.get_path(kind, scheme)
