"""Methods of classes, and functions of modules, that do something else while a model is traced."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.RLock()
"""One thread at a time has replaced anything, so that what it puts back is Keras' own."""


@contextlib.contextmanager
def replaced(
    owner: type | types.ModuleType, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within it, and in this thread only, a method is another one; other threads that want one of theirs wait.

    Args:
        owner: the class, or the module of a function.
        name: of the method or function.
        make: original method -> the one in its place.
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
