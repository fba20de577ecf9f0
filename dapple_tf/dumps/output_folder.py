"""A directory that a program fills, and fills again later, without touching other files there.

A list (``dump.json``) names the files that the program wrote before. Files are written to a temporary folder and moved
to their places at the end, so that old and new files are never mixed unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

from dapple_tf.common.data_files import Decoder, parse_object, read_text
from dapple_tf.errors import DappleError

LIST = "dump.json"
_FORMAT = "dapple_tf.dump/1"
_PIECE = 2**20


class FolderError(DappleError):
    """Something in a directory is in the way; the text names it."""


@contextlib.contextmanager
def filled(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary directory to write files into, and moves them to ``directory`` at the context's end.

    Files of an earlier call are replaced, or removed if they aren't written again; all others stay. After an error the
    directory is unchanged.

    Raises:
        FolderError: a file in the way isn't an earlier call's, or has been changed since.
    """
    target = pathlib.Path(directory)
    if target.exists() and not target.is_dir():
        raise FolderError(f"{target} is a file: name a directory")
    target.mkdir(parents=True, exist_ok=True)
    before = _listed(target)
    with tempfile.TemporaryDirectory(prefix=".dump-", dir=target) as aside:
        made = pathlib.Path(aside)
        yield made
        _move(made, target, before)


def _move(made: pathlib.Path, target: pathlib.Path, before: Mapping[str, frozenset[str]]) -> None:
    names = [path.relative_to(made).as_posix() for path in sorted(made.rglob("*")) if path.is_file()]
    fresh = {name: frozenset([_digest(made / name)]) for name in names}
    foreign = [name for name in names if not _may_replace(target / name, before.get(name, frozenset()), target)]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FolderError(
            f"{target / foreign[0]}{more} would be overwritten, but isn't what an earlier dump wrote there: move it "
            f"away, or choose another directory"
        )
    # If this is interrupted, both old and new files count as our own.
    both = {name: before.get(name, frozenset()) | fresh.get(name, frozenset()) for name in {*before, *fresh}}
    _write_list(target, both)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, target / name)
    for name in sorted(before.keys() - fresh.keys(), reverse=True):
        if _is_own(target / name, before[name]):
            (target / name).unlink()
            with contextlib.suppress(OSError):  # The folder isn't empty.
                for folder in (target / name).parents:
                    if folder == target:
                        break
                    folder.rmdir()
    _write_list(target, fresh)


def _may_replace(path: pathlib.Path, digests: frozenset[str], target: pathlib.Path) -> bool:
    """Whether a file may be written there: there is none, or the one written before."""
    for folder in path.parents:
        if folder == target:
            break
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            return False
    return not os.path.lexists(path) or _is_own(path, digests)


def _is_own(path: pathlib.Path, digests: frozenset[str]) -> bool:
    return path.is_file() and not path.is_symlink() and _digest(path) in digests


def _digest(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _listed(target: pathlib.Path) -> dict[str, frozenset[str]]:
    """Returns name -> digests of the files of earlier calls; two for a file of an interrupted call."""
    path = target / LIST
    if not path.is_file():
        return {}
    try:
        data = parse_object(read_text(path, ValueError), LIST, ValueError)
        decoder = Decoder(ValueError)
        decoder.check_keys(data, ("format", "files"), (), LIST)
        decoder.check_format(data, _FORMAT, LIST)
        digests = decoder.read(Mapping[str, tuple[str, ...]], data["files"], "files")
    except ValueError as error:
        raise FolderError(
            f"{path} isn't the list of an earlier dump ({error}): move it away, or choose another directory"
        ) from error
    files = {name: frozenset(own) for name, own in digests.items()}
    for name in files:
        parts = pathlib.PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise FolderError(f"{path} names {name!r}, which isn't in its directory: move it away")
    return files


def _write_list(target: pathlib.Path, files: Mapping[str, frozenset[str]]) -> None:
    data = {"format": _FORMAT, "files": {name: sorted(digests) for name, digests in sorted(files.items())}}
    part = target / f"{LIST}.part"
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, target / LIST)
