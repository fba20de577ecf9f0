"""Names of layers that don't depend on what was built before."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

from keras.src.backend.common import global_state

_COUNTERS = "object_name_uids"
"""Where Keras counts the names that it has given."""


@contextlib.contextmanager
def names_from_start() -> Iterator[None]:
    """Within it, layers without names are counted from the start: ``re_lu``, ``re_lu_1``, whatever there is already.

    keras.applications leaves many layers unnamed. Plans and profiles name layers, so that they would fit only the first
    model of a process otherwise.
    """
    before = global_state.get_global_attribute(_COUNTERS)
    global_state.set_global_attribute(_COUNTERS, collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTERS, before)
