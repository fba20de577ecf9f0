"""Memory that isn't used any more: Python's garbage collection while graphs are built, and what C++ has freed."""

from __future__ import annotations

import ctypes
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


def return_freed_memory() -> None:
    """Gives the kernel back the memory that this process has freed.

    glibc keeps it in pools for groups of threads: what one thread has freed while it built graphs isn't there for the
    threads that run them. With other C libraries nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
