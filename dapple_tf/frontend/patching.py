"""Replacing methods of classes and functions of modules while a model is traced."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.RLock()
"""Lets one thread at a time replace anything, so that it restores Keras' own method."""


@contextlib.contextmanager
def replaced(
    owner: type | types.ModuleType, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces a method inside the context, in this thread only; other threads that replace anything wait.

    Args:
        owner: the class, or the module of a function.
        name: name of the method or function.
        make: original method -> its replacement.
    """
    with _lock:
        original, thread = getattr(owner, name), threading.get_ident()
        replacement = make(original)

        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

        setattr(owner, name, chosen)
        try:
            yield
        finally:
            setattr(owner, name, original)
