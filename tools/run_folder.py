"""Folders that runs leave behind."""

from __future__ import annotations

import itertools
import pathlib


def fresh_folder(wanted: pathlib.Path) -> pathlib.Path:
    """Makes ``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that doesn't exist yet."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in itertools.chain([wanted], numbered) if not path.exists())
    folder.mkdir(parents=True)
    return folder
