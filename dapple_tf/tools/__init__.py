"""The folder ``tools/`` of a checkout, by the name that it is installed under."""

import pathlib

__path__ = [str(pathlib.Path(__file__).resolve().parents[2] / "tools")]
