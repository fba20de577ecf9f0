from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from browser import Page

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile_text import load_text
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.page import assemble, embedded, timeline_data, timeline_page
from dapple_tf.view.timeline import Lane, Span, Timeline

Show = Callable[..., Page]

CUTS = ("layer_11", "layer_23", "layer_35")


def cluster(gib: int) -> Cluster:
    """Two servers of two devices on Ethernet."""
    devices = tuple(Device(f"/job:worker/task:{i // 2}/device:GPU:{i % 2}", i // 2, gib << 30) for i in range(4))
    return Cluster(devices, intra_bandwidth=40e9, inter_bandwidth=3.125e9, inter_latency=20e-6, real=False)


@functools.cache
def bert(schedule: str) -> Timeline:
    """A step of BERT-48 on four devices, eight micro-batches."""
    profile = load_text("bert-48")
    plan = Plan.manual(CUTS, [[0], [1], [2], [3]], 8, 16, schedule)
    return simulate(plan, profile, cluster(2)).drawn(schedule)


@functools.cache
def replicated(name: str = "3:1") -> Timeline:
    """The same model in two stages, on three devices and one."""
    profile = load_text("bert-48")
    plan = Plan.manual([CUTS[1]], [[0, 1, 2], [3]], 4, 24)
    return simulate(plan, profile, cluster(4)).drawn(name)


def handmade(*spans: Span, name: str = "handmade", **fields: Any) -> Timeline:
    latency = max((span.end for span in spans), default=0.0)
    return Timeline(**{"name": name, "latency": latency, "spans": spans, "devices": {0: "first", 1: "second"}} | fields)


def page_of(*timelines: Timeline) -> str:
    return timeline_page(timelines, title="Steps")


def counts(page: Page, value: str = "total") -> dict[tuple[str, int, str], int]:
    return {(lane["timeline"], lane["device"], lane["row"]): lane[value] for lane in page.ask("lanes()")}


def expected(timelines: Sequence[Timeline], keep: Callable[[Lane, Span], bool] = lambda lane, span: True) -> Any:
    return {
        (timeline.name, lane.device, lane.row): sum(keep(lane, span) for span in spans)
        for timeline in timelines
        for lane, spans in timeline.lanes.items()
    }


def selected(page: Page) -> str | None:
    span = page.ask("selected()")
    return span and f"{span['timeline']}: {span['name']}"


def bounds(page: Page) -> tuple[float, float]:
    limits = page.ask("bounds('s')")
    return limits["lo"], limits["hi"]


# ---- without a browser


def test_data_has_every_span() -> None:
    timeline = replicated()
    (data,) = timeline_data([timeline])["timelines"]
    columns = data["spans"]
    defaults = Span("", 0.0, 0.0, None, 0)._asdict()
    for index, span in enumerate(timeline.spans):
        for name, value in span._asdict().items():
            shown = columns[name][index] if name in columns else defaults[name]
            assert shown == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    assert data["count"] == len(timeline.spans)
    assert [device["bubble"] for device in data["devices"]] == [timeline.bubbles[d] for d in timeline.devices]
    assert "target" in columns and "cause" in columns
    assert json.loads(embedded(data)) == json.loads(json.dumps(data))


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "\u2028\u2029", "\ud800"])
def test_embedded_text_cannot_leave_its_tag(text: str) -> None:
    result = embedded({"name": text})
    assert result.isascii()
    assert not set("<>&") & set(result)
    assert json.loads(result) == {"name": text}


def test_page_has_all_in_one_file() -> None:
    text = page_of(bert("dapple_a"))
    assert html.escape("default-src 'none'") in text and "connect-src" not in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "https:" not in text and "http:" not in text and "@import" not in text and "url(" not in text
    assert "innerHTML" not in text and "eval(" not in text and "insertAdjacent" not in text
    assert html.escape("connect-src 'self'") in assemble("x", [], {}, connect=True)


@pytest.mark.parametrize(
    ("timelines", "message"),
    [
        ([], "there are no timelines to show"),
        ([handmade(), handmade()], "2 of the 2 timelines are called 'handmade'; rename them"),
    ],
)
def test_what_cannot_be_shown(timelines: list[Timeline], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        timeline_page(timelines, title="x")


def test_scripts_that_would_end_their_tag() -> None:
    with pytest.raises(ValueError, match=r"script 1 of the page has '</script'"):
        assemble("x", ["1", "'</SCRIPT>'"], {})


# ---- in a browser


def test_the_page_draws_filters_moves_finds_and_shows_the_same_again(
    show: Show, picture: Callable[[Page, str], None]
) -> None:
    timelines = [bert("dapple_a"), bert("zb_h1")]
    text = timeline_page(timelines, title="BERT-48 in four stages, eight micro-batches: dapple_a and zb_h1")
    page = show(text)
    for value in ("total", "matching", "visible"):
        assert counts(page, value) == expected(timelines)
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    for timeline in timelines:
        assert f"{timeline.latency * 1e3:.4g} ms" in page.text("#summary")
    assert page.ask("select('2B3', 'dapple_a')")
    picture(page, "timeline_page.png")

    page.press("\ue00c")  # Escape
    page.hover_at(page.ask("positionOf('2B3')"))
    assert page.text("#tip").startswith("2B3  (dapple_a)\n")
    page.click_at(page.ask("positionOf('2B3')"))
    span = timelines[0].spans[page.ask("selected()")["index"]]
    details = page.text("#details")
    assert f"duration{(span.end - span.start) * 1e3:.4g} ms" in details
    assert "stage2" in details and "micro-batch3" in details and "device 2" in details
    page.click("#cause button")
    assert page.ask("selected()")["index"] == span.cause
    page.find("#search").send_keys("2b3")
    assert page.ask("selected()")["name"] == "2B3"

    low, high = bounds(page)
    page.press("\ue00c", "+")
    zoomed = bounds(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 1.5)
    page.press("0")
    place = page.ask("positionOf('2B3')")
    page.wheel(place, -300)
    page.settle()
    assert bounds(page)[1] - bounds(page)[0] < 0.6 * (high - low)
    page.drag(place, 80)
    page.settle()
    assert page.ask("positionOf('2B3')")["x"] == pytest.approx(place["x"] + 80, abs=2)

    page.ask("setFilter('stage', [1, 2])")
    page.ask("setFilter('kind', ['F', 'Bx'])")
    page.ask("setFilter('micro_batch', [0, 2, null])")

    def keep(lane: Lane, span: Span) -> bool:
        return span.stage in (1, 2) and span.kind in ("F", "Bx") and span.micro_batch in (0, 2, None)

    assert counts(page, "matching") == expected(timelines, keep)
    page.ask("setBounds(0.125, 0.5)")
    page.ask("select('2Bx2', 'zb_h1')")
    questions = ("lanes()", "filters()", "selected()", "bounds('s')")
    state = [page.ask(question) for question in questions]
    wait = "const done = arguments[0]; setTimeout(() => done(location.hash.slice(1)), 400)"
    again = show(text, page.driver.execute_async_script(wait))
    for question, before in zip(questions, state, strict=True):
        assert again.ask(question) == (pytest.approx(before) if question.startswith("bounds") else before)
    again.run("location.hash = 'stage=zzz&kind=&t.s=9~a&name=<b>&nth=-1&y=x&device=1-999999999'")
    again.driver.execute_async_script(wait)
    assert again.ask("filters().stage") is None and again.ask("filters().kind") == []


def test_hostile_names_are_texts(show: Show) -> None:
    evil = "</script><img src=x onerror='document.title=\"broken\"'>\u2028<!--<script>document.title='broken'</script>"
    spans = (Span(evil, 0.0, 1.0, 0, 0, 0), Span("constructor", 1.0, 2.0, 1, 0, 1, cause=0))
    page = show(timeline_page([handmade(*spans, name=evil, devices={0: evil, 1: "__proto__"})], title=evil))
    assert page.ask("select('0constructor1')")
    page.click("#cause button")
    page.hover_at(page.ask("positionOf(dapple.selected().name)"))
    assert page.driver.title.startswith("</script><img")
    assert page.text("h1") == evil
    assert evil in page.text("#tip") and evil in page.text("#details") and evil in page.text("#summary")
    assert page.run("return document.querySelectorAll('img, b, #details script').length") == 0
