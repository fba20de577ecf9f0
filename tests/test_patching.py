"""Methods that are other ones for a while, in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dapple_tf.frontend import patching
from dapple_tf.frontend.patching import replaced


class Owner:
    def name(self) -> str:
        """Says who it is."""
        return "original"


def called(text: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda original: lambda self: f"{text}({original(self)})"


def test_the_method_is_another_within_and_its_own_afterwards() -> None:
    before = Owner.name
    with replaced(Owner, "name", called("mine")):
        assert Owner().name() == "mine(original)"
        assert Owner.name.__doc__ == "Says who it is."
        with replaced(Owner, "name", called("inner")):
            assert Owner().name() == "inner(mine(original))"
    assert Owner.name is before
    with pytest.raises(KeyError), replaced(Owner, "name", called("mine")):
        raise KeyError
    assert Owner.name is before


def test_other_threads_keep_the_original() -> None:
    with ThreadPoolExecutor(1) as other, replaced(Owner, "name", called("mine")):
        assert other.submit(Owner().name).result() == "original"


def test_a_thread_that_waits_for_its_turn_finds_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models were traced at once: one's losses were weighted with the other's tensors, out of their scope."""
    within, waiting = threading.Event(), threading.Event()
    lock = threading.RLock()

    class Told:
        def __enter__(self) -> None:
            if within.is_set():
                waiting.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(patching, "_lock", Told())

    def first() -> None:
        with replaced(Owner, "name", called("first")):
            within.set()
            assert waiting.wait(10)

    def second() -> str:
        assert within.wait(10)
        with replaced(Owner, "name", called("second")):
            return Owner().name()

    with ThreadPoolExecutor(2) as threads:
        threads.submit(first)
        assert threads.submit(second).result() == "second(original)"
