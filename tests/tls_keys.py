"""Certificates for tests."""

from __future__ import annotations

import pathlib

import pytest

from dapple_tf.network.certificates import Authority


def new_authority() -> Authority:
    """An authority of a test's own; the test is skipped where none can be made."""
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    return Authority.make(days=2)


def new_machine(authority: Authority, directory: pathlib.Path, *names: str, days: int = 1) -> pathlib.Path:
    """A machine's directory."""
    authority.write_machine(directory, names, days)
    return directory
