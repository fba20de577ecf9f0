"""What is written to the terminal: a bar of long work, what the first step prepares, lines beside Keras' bar."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from profiled import mlp

import dapple_tf as dapple
from dapple_tf.common import progress
from dapple_tf.common.progress import Progress
from dapple_tf.execution.terminal import beside_progress_bar, without_noise

# --- bars


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
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "progress")
    thread.join(60)
    assert not thread.is_alive()


# --- beside Keras' bar

NOISE = b"I0000 00:00:1795409225.931761   20927 profiler_session.cc:132] Profiler session started.\n"


def test_only_lines_that_mean_nothing_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """They stood in the bar of every fit with a PipelineMonitor."""

    def say() -> None:
        with without_noise():
            os.write(2, NOISE)
            os.write(2, b"W0000 00:00:1795409226.13  20927 xplane_to_step_stats.cc:84] GPU trace was not collected.\n")
            os.write(2, b"E0000 00:00:1795409226.13  20927 util.cc:1] something else\nhalf a line\n")

    threads = [threading.Thread(target=say) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"after\n")
    shown = capfd.readouterr().err
    assert shown.count("something else") == shown.count("half a line") == 4
    assert "profiler_session" not in shown and "xplane" not in shown and shown.endswith("after\n")


def test_progress_is_shown_at_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    with without_noise():
        print("1/3", file=sys.stderr)
        assert capfd.readouterr().err == "1/3\n"


def test_what_was_written_is_shown_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="lost"), without_noise():
        os.write(2, NOISE + b"why it failed\n")
        raise ValueError("lost")
    assert capfd.readouterr().err == "why it failed\n"


@pytest.mark.parametrize(("verbose", "before"), [("auto", "\n"), (2, "")])
def test_warnings_have_lines_of_their_own(verbose: object, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("dapple_tf")
    logger.addHandler(handler)
    try:
        with beside_progress_bar(verbose):
            terminal.write("3/8 loss: 0.1")
            logging.getLogger("dapple_tf.measurement").warning("stage 0 is slow")
        logger.warning("later")
    finally:
        logger.removeHandler(handler)
    assert terminal.getvalue().startswith(f"3/8 loss: 0.1{before}stage 0 is slow\n")
    assert terminal.getvalue().endswith("later\n") and "\n\n" not in terminal.getvalue()


# --- the first step of each kind, which took a minute without a word for large models


def watched(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written where somebody watches, without patience and without the thread that shows the time."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setattr(progress, "_is_watched", lambda: True)
    monkeypatch.setattr(progress, "_TICK", 1e6)
    monkeypatch.setattr("dapple_tf.execution.terminal._PATIENCE", 0.0)
    monkeypatch.setattr("dapple_tf.execution.terminal.Progress", functools.partial(progress.Progress, mininterval=0.0))
    return output


def pipelined() -> dapple.PipelinedModel:
    return dapple.transform(mlp(), dapple.Cluster.local(2, kind="cpu"), dapple.Plan.straight(["second"], 8, 2))


def batches(samples: int) -> tuple[Any, Any]:
    return np.zeros((samples, 4), "float32"), np.zeros(samples, "int32")


def test_the_first_step_says_what_it_prepares_and_others_are_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = pipelined()
    terminal = watched(monkeypatch)
    with caplog.at_level(logging.INFO, logger="dapple_tf.execution"):
        model.train_on_batch(*batches(8))
    shown = [line.rpartition(":")[0].rpartition(":")[0] for line in terminal.getvalue().split("\r") if line.strip()]
    assert {line.partition(", ")[0] for line in shown[1:]} == {"preparing training on batches of 8"}
    told = [line.partition(", ")[2] for line in shown]
    for earlier, later in [
        ("capturing the model", "pass 1, assign_stages"),
        ("pass 1, assign_stages", "pass 4, partition"),
        ("pass 4, partition", "tracing the optimizer"),
        ("tracing the optimizer", "pass 5, replicate"),
        ("pass 5, replicate", "pass 9, update"),
        ("pass 9, update", "TensorFlow prepares the step"),
    ]:
        assert told.index(earlier) < told.index(later)
    assert any(line.startswith("prepared train for x float32 (?, 4), y int32 (?,) in ") for line in caplog.messages)
    assert any(line.startswith("preparing training on batches of 8 took ") for line in caplog.messages)
    terminal = watched(monkeypatch)
    model.train_on_batch(*batches(8))
    assert not terminal.getvalue()
    model.evaluate(*batches(8), batch_size=8, verbose=0)
    assert "preparing evaluation on batches of 8, capturing the model" in terminal.getvalue()


def test_it_never_writes_into_keras_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is smaller: its step is prepared while the bar of the first stands in the line."""
    model = pipelined()
    terminal = watched(monkeypatch)
    model.fit(*batches(12), batch_size=8, verbose=1)
    first, smaller = (
        terminal.getvalue().partition(f"\rpreparing training on batches of {samples}")[0] for samples in (8, 4)
    )
    assert "Epoch 1" not in first or (first.endswith("\n") and not first.endswith("\n\n"))
    assert "loss: " in smaller and smaller.endswith("\n")
