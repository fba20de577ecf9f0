"""The line that tells how far long work is."""

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
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_TICK", 1e6)  # Its thread goes by the real time.
    return now


def test_the_line_comes_late_and_goes_at_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("measuring", total=3, shown=True) as bar:
        bar.step("first")
        assert capsys.readouterr().err == ""
        clock[0] = 2.0
        bar.step("second")
        line = "measuring 2/3: second (2 s)"
        assert capsys.readouterr().err == "\r" + line
        bar.step("too soon")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "\r" + " " * len(line) + "\r"


def test_nothing_is_shown_where_nobody_looks(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (None, False):  # A test's standard error is no terminal.
        with Progress("measuring", shown=shown) as bar:
            clock[0] += 5.0
            bar.step("first")
    assert capsys.readouterr().err == ""


def test_long_work_is_told_from_its_start(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Nine seconds of capturing and cutting a model were silent."""
    with Progress("profiling", shown=True) as bar:
        bar.step("capturing", now=True)
        assert capsys.readouterr().err == "\rprofiling: capturing (0 s)"
        bar.say("the profile is in the cache")
        assert capsys.readouterr().err.endswith("\rthe profile is in the cache\n")


def test_the_clock_goes_on_in_a_long_step(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """TensorFlow's preparation of a step is one call of 10 s and more."""
    with Progress("preparing", shown=True, patience=2.0) as bar:
        bar.step("a step")
        clock[0] = 1.9
        bar.tick()
        assert capsys.readouterr().err == ""
        clock[0] = 3.0
        bar.tick()
        assert capsys.readouterr().err == "\rpreparing: a step (3 s)"
        clock[0] = 4.0
        bar.tick()
        assert capsys.readouterr().err == "\rpreparing: a step (4 s)"


def test_a_thread_keeps_the_clock_going_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(progress, "_TICK", 1e-3)
    monkeypatch.setattr(progress, "_is_watched", lambda: True)
    monkeypatch.setattr(Progress, "tick", lambda _: ticked.set())
    with Progress("preparing", shown=True, patience=1e6) as bar:
        bar.step("a step")
        assert ticked.wait(60)
    for thread in threading.enumerate():
        if thread.name == "progress":
            thread.join(60)
            assert not thread.is_alive()


def test_another_line_is_left_first(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("preparing", shown=True, before=lambda: sys.stderr.write("\n")) as bar:
        clock[0] = 5.0
        bar.step("first")
        clock[0] = 6.0
        bar.step("second")
    assert capsys.readouterr().err.startswith("\n\rpreparing: first (5 s)\rpreparing: second (6 s)\r ")
