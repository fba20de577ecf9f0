"""The folder of readers' results and of samples: ``data`` in DAPPLE_CACHE, or in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable

from dapple_tf.models.sources import ModelError

_logger = logging.getLogger(__name__)


def data_folder() -> pathlib.Path:
    """Returns the folder."""
    given = os.environ.get("DAPPLE_CACHE")
    return (pathlib.Path(given) if given else pathlib.Path.home() / ".cache" / "dapple_tf") / "data"


def kept(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns a folder in the cache, which is made if it is missing: completely, or not at all.

    Args:
        name: name of the folder; another name for other contents.
        make: function that fills an empty folder.

    Raises:
        ModelError: the folder can't be written.
    """
    folder = data_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making_"))
    except OSError as error:
        raise ModelError(
            f"{data_folder()} can't be written ({error.strerror}); set DAPPLE_CACHE to a folder that can"
        ) from error
    try:
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # Another process was faster.
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _logger.info("made %s", folder)
    return folder


def digest(parts: Iterable[object]) -> str:
    """Returns a short hash of the texts of some values."""
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{part}\0".encode())
    return total.hexdigest()[:24]


def digest_of_files(paths: Iterable[pathlib.Path]) -> str:
    """Returns a short hash of files' contents."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:24]


def digest_of_times(paths: Iterable[pathlib.Path]) -> str:
    """Returns a short hash of names, sizes and modification times: for files that are too large to be read for it."""
    files = ((path.resolve(), path.stat()) for path in paths)
    return digest(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files)
