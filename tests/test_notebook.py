"""What objects show of themselves in notebooks: tables that are escaped, a picture, and text in place of it."""

from __future__ import annotations

import io
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from profiles_for_tests import profile_of

import dapple_tf as dapple
from dapple_tf.common.progress import Progress
from dapple_tf.simulation.planned import planned
from dapple_tf.view.notebook import Table, notebook_html

SERVER = '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 2}]}'
PLAN = dapple.Plan.manual(["a<b>"], [[0, 1], [2]], micro_batches=2, global_batch_size=8)


class _Tags(HTMLParser):
    """Checks that tags are closed in the order in which they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(text: str) -> set[str]:
    parser = _Tags()
    parser.feed(text)
    assert not parser.open
    return parser.seen


def test_a_plan_is_a_table_of_its_stages_and_a_picture() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed (make venv)")
    text = PLAN._repr_html_()
    assert {"table", "th", "td", "svg"} <= tags(text)
    assert "a&lt;b&gt;" in text and "a<b>" not in text
    assert "schedule dapple_a" in text


def test_without_matplotlib_the_timeline_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = notebook_html("a step", [Table("numbers", [("x", "y"), ("1", "2")])], [planned(PLAN)], ["a remark"])
    assert "svg" not in tags(text) and "pre" in tags(text)
    assert '<pre style="font-family:monospace;' in text
    assert "<caption>numbers</caption>" in text and "<td>2</td>" in text and "<p>a remark</p>" in text


@pytest.mark.parametrize("value", [profile_of(*[(1.0, 2.0)] * 3), dapple.Cluster.from_json(SERVER)])
def test_profiles_and_clusters_are_text(value: Any) -> None:
    shown: list[str] = []
    value._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown == [str(value)]


def test_progress_is_shown_below_a_notebooks_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's streams aren't terminals, but somebody watches them; standard error would be red."""

    class Stream(io.StringIO):
        __module__ = "ipykernel.iostream"

    for kind, shown in ((Stream, True), (io.StringIO, False)):
        output, errors = kind(), kind()
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        with Progress("measuring", total=2, delay=0, mininterval=0) as bar:
            bar.step("first")
            bar.say("a line")
        assert ("measuring, first: 1/2 |" in output.getvalue()) == shown
        assert ("a line\n" in output.getvalue()) == shown
        assert not errors.getvalue()
