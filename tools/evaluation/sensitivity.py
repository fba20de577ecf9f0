"""Changes that a comparison of results must notice, made on purpose: what the evaluations of all papers share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dapple_tf.simulation.cost import CostModel, Message

FACTOR = 1.03
"""By which constants and what formulas return are changed."""


@dataclass(frozen=True)
class Change:
    """A change.

    Attributes:
        text: what changes.
        parts: names of the parts that it may show in, which are computed again; none for what isn't computed.
        make: makes it, as long as the context lasts.
    """

    text: str
    parts: tuple[str, ...]
    make: Callable[[], AbstractContextManager[object]]


def scaled(owner: object, name: str) -> AbstractContextManager[object]:
    """Changes the number that a function of a class or module returns by 3 %, as long as the context lasts."""
    original: Callable[..., Any] = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: original(*args, **options) * FACTOR)


@contextlib.contextmanager
def longer_transfers() -> Iterator[None]:
    """Makes each message of the simulator 3 % larger."""
    with contextlib.ExitStack() as stack:
        for name in ("messages", "leg_messages"):
            stack.enter_context(mock.patch.object(CostModel, name, _enlarged(getattr(CostModel, name))))
        yield


def _enlarged(original: Callable[..., tuple[Message, ...]]) -> Callable[..., tuple[Message, ...]]:
    def changed(*args: Any, **options: Any) -> tuple[Message, ...]:
        return tuple(Message(sender, receiver, size * FACTOR) for sender, receiver, size in original(*args, **options))

    return changed


def outcome(change: Change, said: Sequence[str]) -> dict[str, Any]:
    """Returns what a change does to results, as it is stored: whether the command fails, and what it says first.

    Args:
        change: the change.
        said: the differences that it makes.
    """
    first = said[0] if said else "nothing"
    more = f", and {len(said) - 1} more" if len(said) > 1 else ""
    return {"parts": list(change.parts), "fails": bool(said), "first": first + more}


def unnoticed(outcomes: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns which changes make no difference, and which are tried or stored only.

    Args:
        outcomes: change -> its `outcome`.
        stored: the same as it is stored.
    """
    texts = [f"{change}: is noticed by nothing" for change, one in outcomes.items() if not one["fails"]]
    texts += [f"{change}: is stored, but wasn't tried" for change in stored if change not in outcomes]
    return texts + [f"{change}: isn't stored" for change in outcomes if change not in stored]
