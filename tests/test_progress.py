"""The bar that tells how far long work is: what it adds to tqdm's."""

from __future__ import annotations

import sys
import threading

import pytest

from dapple_tf import progress
from dapple_tf.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until its number is changed."""
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_the_bar_comes_late_and_goes_at_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("measuring", total=3, shown=True) as bar:
        bar.step("first")
        assert capsys.readouterr().err == ""
        clock[0] = 2.0
        bar.step("second")
        assert capsys.readouterr().err.startswith("\rmeasuring, second: 2/3 |")
        bar.step("too soon")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.strip("\r ") == ""


def test_nothing_is_shown_where_nobody_looks(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (None, False):  # A test's standard error is no terminal.
        with Progress("measuring", shown=shown) as bar:
            clock[0] += 5.0
            bar.step("first")
            bar.say("a line")
    assert capsys.readouterr().err == ""


def test_a_line_stays(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("profiling", shown=True, delay=0) as bar:
        assert capsys.readouterr().err == "\rprofiling: 00:00"
        bar.say("the profile is in the cache")
        assert "\rthe profile is in the cache\n" in capsys.readouterr().err


def test_the_clock_goes_on_in_a_long_step(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """TensorFlow's preparation of a step is one call of 10 s and more."""
    with Progress("preparing", shown=True, delay=2.0) as bar:
        bar.step("a step")
        clock[0] = 1.9
        bar.tick()
        assert capsys.readouterr().err == ""
        for clock[0] in (3.0, 4.0):
            bar.tick()
            assert capsys.readouterr().err == f"\rpreparing, a step: 00:0{clock[0]:.0f}"
    assert capsys.readouterr().err.endswith("\r")  # It is gone, though no step came after the wait.


def test_a_thread_keeps_the_clock_going_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(progress, "_TICK", 1e-3)
    monkeypatch.setattr(progress, "_is_watched", lambda: True)
    monkeypatch.setattr(Progress, "tick", lambda _: ticked.set())
    with Progress("preparing", shown=True, delay=1e6):
        assert ticked.wait(60)
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(60)
            assert not thread.is_alive()


def test_another_line_is_left_first(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("preparing", shown=True, before=lambda: sys.stderr.write("\n")) as bar:
        for clock[0], text in ((5.0, "first"), (6.0, "second")):
            bar.step(text)
    assert capsys.readouterr().err.startswith("\n\rpreparing, first: 00:05\rpreparing, second: 00:06\r")
