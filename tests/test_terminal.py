"""What is written while Keras' progress bar stands in the terminal."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading

import pytest

from dapple_tf.execution.terminal import beside_progress_bar, without_noise

NOISE = b"I0000 00:00:1795409225.931761   20927 profiler_session.cc:132] Profiler session started.\n"


def test_only_lines_that_mean_nothing_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    """They stood in the bar of every fit with a PipelineMonitor."""

    def say() -> None:
        with without_noise():
            os.write(2, NOISE)
            os.write(2, b"W0000 00:00:1795409226.13  20927 xplane_to_step_stats.cc:84] GPU trace was not collected.\n")
            os.write(2, b"W0000 00:00:1795409226.13  20927 util.cc:163] Not handling type DT_DOUBLE\n")
            os.write(2, b"E0000 00:00:1795409226.13  20927 util.cc:1] something else\nhalf a line\n")

    threads = [threading.Thread(target=say) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"after\n")
    shown = capfd.readouterr().err
    assert shown.count("something else") == shown.count("half a line") == 4
    assert "profiler_session" not in shown and "xplane" not in shown and "DT_DOUBLE" not in shown
    assert shown.endswith("after\n")


def test_what_was_written_is_shown_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="lost"), without_noise():
        os.write(2, NOISE + b"why it failed\n")
        raise ValueError("lost")
    assert capfd.readouterr().err == "why it failed\n"


@pytest.mark.parametrize(("verbose", "before"), [("auto", "\n"), (1, "\n"), (2, ""), (0, "")])
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
