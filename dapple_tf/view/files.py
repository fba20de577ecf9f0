"""Timelines in every form, side by side in a folder."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence

from dapple_tf.common.progress import Progress
from dapple_tf.view.image import draw_timelines
from dapple_tf.view.page import timeline_page
from dapple_tf.view.text import timeline_text
from dapple_tf.view.timeline import Timeline
from dapple_tf.view.trace_events import save_trace


def save_timelines(timelines: Sequence[Timeline], directory: str | os.PathLike[str], title: str) -> list[str]:
    """Writes ``timeline.txt``, ``.html``, ``.svg`` and ``.png``, and ``trace.json`` for Chrome and Perfetto.

    Images are left out if matplotlib isn't installed.

    Args:
        timelines: timelines; each file has all of them.
        directory: folder to write to; created if necessary.
        title: title of the page and the images.

    Returns:
        The names of the files.

    Raises:
        OSError: a file can't be written.
    """
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = ["timeline.txt", "timeline.html", "trace.json"]
    images = ["timeline.svg", "timeline.png"] if importlib.util.find_spec("matplotlib") else []
    with Progress("drawing", len(written) + len(images)) as bar:
        bar.step(written[0])
        (folder / written[0]).write_text(timeline_text(timelines) + "\n", encoding="utf-8")
        bar.step(written[1])
        (folder / written[1]).write_text(timeline_page(timelines, title=title), encoding="utf-8")
        bar.step(written[2])
        save_trace(timelines, folder / written[2])
        for name in images:
            bar.step(name)
            draw_timelines(timelines, folder / name, title=title)
    return written + images
