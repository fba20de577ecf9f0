"""Python's garbage collection while graphs are built."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def without_collection(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Switches Python's search for cyclic garbage off during a call: graphs are millions of objects, all in use."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return call
