from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
import math
import random
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from browser import Page

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile_text import load_text
from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.page import TIMELINE_SCRIPTS, assemble, asset, embedded, timeline_data, timeline_page
from dapple_tf.view.timeline import Lane, Span, Timeline

Show = Callable[..., Page]

CUTS = ("layer_11", "layer_23", "layer_35")


def cluster(gib: int) -> Cluster:
    """Two servers of two devices on Ethernet."""
    devices = tuple(Device(f"/job:worker/task:{i // 2}/device:GPU:{i % 2}", i // 2, gib << 30) for i in range(4))
    return Cluster(devices, intra_bandwidth=40e9, inter_bandwidth=3.125e9, inter_latency=20e-6, real=False)


@functools.cache
def bert(schedule: str, name: str | None = None) -> Timeline:
    """A step of BERT-48 on four devices, eight micro-batches."""
    profile = load_text("bert-48")
    plan = Plan.manual(CUTS, [[0], [1], [2], [3]], 8, 16, schedule)
    return simulate(plan, profile, cluster(2)).drawn(name or schedule)


@functools.cache
def replicated(name: str = "3:1") -> Timeline:
    """The same model in two stages, on three devices and one."""
    profile = load_text("bert-48")
    plan = Plan.manual([CUTS[1]], [[0, 1, 2], [3]], 4, 24)
    return simulate(plan, profile, cluster(4)).drawn(name)


@functools.cache
def in_forwards() -> Timeline:
    """What is planned without a profile: in the time of a forward task."""
    return planned(Plan.manual(CUTS, [[0], [1], [0], [1]], 4, 8, "modulo"))


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


def bounds(page: Page, unit: str = "s") -> tuple[float, float]:
    limits = page.ask(f"bounds('{unit}')")
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


def test_columns_of_defaults_are_left_out() -> None:
    (data,) = timeline_data([handmade(Span("F", 0.0, 1.0, 0, 0))])["timelines"]
    assert set(data["spans"]) == {"kind", "end", "device"}


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--", "\u2028\u2029", "]]>", "&amp;", "\ud800"]
)
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


# ---- what is drawn


@pytest.mark.slow
def test_lanes_have_the_tasks_of_the_timelines(show: Show) -> None:
    timelines = [bert("dapple_a"), bert("zb_h1"), replicated(), in_forwards()]
    timelines += [handmade(name="empty"), handmade(Span("F", 0.0, 0.0, 0, 0), name="instant", devices={0: "only"})]
    page = show(page_of(*timelines))
    assert page.ask("timelines()") == [timeline.name for timeline in timelines]
    for value in ("total", "matching", "visible"):
        assert counts(page, value) == expected(timelines)
    assert {row for _, _, row in counts(page)} == {"compute", "send", "all_reduce"}
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    page.settle()
    assert page.ask("frame()")["frames"] > 0
    assert "s and F have axes of their own" in page.text("#status")


def test_two_schedules_of_bert(show: Show, picture: Callable[[Page, str], None]) -> None:
    timelines = [bert("dapple_a"), bert("zb_h1")]
    page = show(timeline_page(timelines, title="BERT-48 in four stages, eight micro-batches: dapple_a and zb_h1"))
    for timeline in timelines:
        assert f"{timeline.latency * 1e3:.4g} ms" in page.text("#summary")
    assert page.ask("select('2B3', 'dapple_a')")
    picture(page, "timeline_page.png")


def test_summary_tells_what_the_timelines_do(show: Show) -> None:
    span = Span("F", 0.0, 0.003, 0, 0, 0)
    curves = {0: ((0.0, 1024.0), (0.001, 3 * 2.0**20), (0.002, 0.0)), 1: ((0.0, 512.0),)}
    small = handmade(span, memory=curves, limits={0: 2.0**21, 1: 2.0**21}, samples=6, latency=0.004)
    page = show(page_of(small, dataclasses.replace(small, name="other", unit="F")))
    rows = page.run("return [...document.querySelectorAll('#summary tbody tr')].map(row => row.innerText.split('\\t'))")
    assert rows == [
        ["step time", "4 ms", "0.004 F"],
        ["samples/s", "1500", ""],
        ["bubble"],
        ["mean", "63%", "63%"],
        ["first", "25%", "25%"],
        ["second", "100%", "100%"],
        ["peak memory"],
        ["first", "3 MiB", "3 MiB"],
        ["second", "512 B", "512 B"],
    ]
    over = page.run("return [...document.querySelectorAll('#summary .over')].map(cell => cell.textContent)")
    assert over == ["3 MiB", "3 MiB"]
    assert page.ask("bounds('s').max") == page.ask("bounds('F').max")
    page.ask("setBounds(0.001, 0.002, 'F')")
    assert bounds(page, "F") == (0.001, 0.002)
    assert bounds(page, "s")[0] == 0.0


def test_hatched_bubbles_and_boxes_are_where_they_should_be(show: Show) -> None:
    page = show(page_of(handmade(Span("F", 0.0, 1.0, 0, 0, 0), Span("B", 3.0, 4.0, 0, 0, 0))))
    page.settle()
    box, last = page.ask("positionOf('0F0')"), page.ask("positionOf('0B0')")
    between = (box["x"] + last["x"]) / 2 + 50  # beside the length that is written in the middle
    assert len(set(page.pixels(box["x"] + 20, box["y"] - 8, 12, 3))) == 1  # a box has one colour
    assert len(set(page.pixels(between, box["y"] - 8, 12, 3))) > 1  # a bubble is hatched


def test_overlapping_spans_get_rows_of_their_own(show: Show) -> None:
    spans = [Span("F", 0.0, 1.0, 0, stage, 0) for stage in range(4)] + [Span("F", 1.0, 2.0, 0, 9, 0)]
    page = show(page_of(handmade(*spans)))
    heights = [page.ask(f"positionOf('{stage}F0')")["y"] for stage in range(4)]
    assert len(set(heights)) == 4
    assert page.ask("positionOf('9F0')")["y"] == heights[0]


# ---- filters


def test_filters_combine(show: Show) -> None:
    timelines = [bert("zb_h1"), replicated()]
    page = show(page_of(*timelines))
    page.ask("setFilter('stage', [0, 1])")
    page.ask("setFilter('kind', ['F', 'Bx', 'send', 'all_reduce'])")
    page.ask("setFilter('device', [0, 1, 3])")
    page.ask("setFilter('micro_batch', [0, 2, null])")

    def keep(lane: Lane, span: Span) -> bool:
        return (
            span.stage in (0, 1)
            and span.kind in ("F", "Bx", "send", "all_reduce")
            and lane.device in (0, 1, 3)
            and span.micro_batch in (0, 2, None)
        )

    assert counts(page, "matching") == expected(timelines, keep)
    assert "after filters" in page.text("#status")
    for field in ("stage", "kind", "device", "micro_batch"):
        page.ask(f"setFilter('{field}', null)")
    assert counts(page, "matching") == expected(timelines)
    page.ask("setFilter('kind', [])")
    assert set(counts(page, "matching").values()) == {0}


@pytest.mark.slow
def test_filters_by_mouse_and_keyboard(show: Show) -> None:
    timeline = bert("dapple_a")
    page = show(page_of(timeline))
    page.run("[...document.querySelectorAll('button.kind')].find(b => b.textContent === 'B').click()")
    page.click("details[data-field=stage] summary")
    page.driver.find_elements("css selector", "details[data-field=stage] input[type=checkbox]")[1].click()
    assert counts(page, "matching") == expected([timeline], lambda _, span: span.kind != "B" and span.stage != 1)
    assert page.text("details[data-field=stage] summary") == "Stages: 3 of 4"
    ranges = page.find("details[data-field=stage] input[type=text]")
    assert ranges.get_attribute("value") == "0,2-3"
    page.press("\ue00c")  # Escape closes the list.
    assert page.run("return document.querySelector('details[open]')") is None
    page.click("details[data-field=micro_batch] summary")
    ranges = page.find("details[data-field=micro_batch] input[type=text]")
    ranges.send_keys("2-4, 7\n")
    assert page.ask("filters().micro_batch") == [2, 3, 4, 7]
    ranges.clear()
    ranges.send_keys("2-\n")
    assert "invalid" in str(ranges.get_attribute("class"))
    assert page.ask("filters().micro_batch") is None  # cleared before
    buttons = page.driver.find_elements("css selector", "details[data-field=micro_batch] button")
    buttons[1].click()
    assert page.ask("filters().micro_batch") == []
    buttons[0].click()
    assert page.ask("filters().micro_batch") is None


# ---- moving about


def test_zoom_and_pan(show: Show) -> None:
    page = show(page_of(bert("dapple_a")))
    low, high = bounds(page)
    assert low == 0.0 and high >= bert("dapple_a").latency
    page.press("+")
    zoomed = bounds(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 1.5)
    page.press("\ue014")  # right arrow
    assert bounds(page) == pytest.approx([side + 0.1 * (zoomed[1] - zoomed[0]) for side in zoomed])
    page.press("-", "-")
    assert bounds(page) == (low, high)
    page.press("+", "+", "0")
    assert bounds(page) == (low, high)
    assert page.run(
        "return [...document.querySelectorAll('#tools button')].map(button => button.title).filter(Boolean)"
    )
    for title, change in (("Zoom in (+)", -1), ("Zoom out (-)", 1)):
        width = bounds(page)[1] - bounds(page)[0]
        page.click(f"#tools button[title='{title}']")
        assert math.copysign(1, bounds(page)[1] - bounds(page)[0] - width) == change
    page.ask("setBounds(0.4, 0.6)")
    page.ask("pan(-100)")
    assert bounds(page)[0] == 0.0
    page.ask("zoom(1e12)")
    assert bounds(page)[1] - bounds(page)[0] >= (high - low) * 0.9e-6


def test_wheel_zooms_at_the_pointer_and_dragging_moves(show: Show) -> None:
    page = show(page_of(bert("dapple_a")))
    place = page.ask("positionOf('2B3')")
    page.wheel(place, -300)
    page.settle()
    assert bounds(page)[1] - bounds(page)[0] < 0.6 * bert("dapple_a").latency
    assert page.ask("positionOf('2B3')")["x"] == pytest.approx(place["x"], abs=2)
    before = bounds(page)
    page.drag(place, 80)
    page.settle()
    assert bounds(page)[0] < before[0]
    assert page.ask("positionOf('2B3')")["x"] == pytest.approx(place["x"] + 80, abs=2)
    assert selected(page) is None


def test_only_what_is_in_sight_counts_as_visible(show: Show) -> None:
    timeline = bert("zb_h1")
    page = show(page_of(timeline))
    low, high = 0.3 * timeline.latency, 0.4 * timeline.latency
    page.ask(f"setBounds({low}, {high})")
    assert bounds(page) == pytest.approx((low, high))
    visible = counts(page, "visible")
    assert visible == expected([timeline], lambda _, span: span.end >= low and span.start <= high)
    assert counts(page) == expected([timeline])


# ---- one task


def test_click_gives_details(show: Show) -> None:
    timeline = bert("dapple_a")
    page = show(page_of(timeline, bert("zb_h1")))
    page.hover_at(page.ask("positionOf('2B3')"))
    assert page.text("#tip").startswith("2B3  (dapple_a)\n")
    page.click_at(page.ask("positionOf('2B3')"))
    assert selected(page) == "dapple_a: 2B3"
    number = page.ask("selected()")["index"]
    span = timeline.spans[number]
    assert (span.kind, span.stage, span.micro_batch) == ("B", 2, 3)
    details = page.text("#details")
    assert f"{span.start * 1e3:.4g}"[:5] in details
    assert f"duration{(span.end - span.start) * 1e3:.4g} ms" in details
    assert "stage2" in details and "micro-batch3" in details and "device 2" in details
    cause = timeline.spans[span.cause or 0]
    page.click("#cause button")
    assert page.ask("selected()")["index"] == span.cause
    assert page.ask("selected()")["kind"] == cause.kind
    place = page.ask("positionOf('2B3')")
    page.click_at({"x": place["x"], "y": page.run("return document.querySelector('footer').offsetTop") - 8})
    page.press("\ue00c")
    assert selected(page) is None


def test_keys_go_from_task_to_task(show: Show) -> None:
    timeline = bert("dapple_a")
    page = show(page_of(timeline, bert("zb_h1")))
    lane = timeline.lanes[Lane(0, "compute")]
    page.press("]")
    assert selected(page) == "dapple_a: 0F0"
    page.press("]", "]", "[")
    assert page.ask("selected().start") == pytest.approx(lane[1].start)
    page.ask("setFilter('kind', ['B', 'send'])")
    page.ask("select('0B0')")
    page.press("]")
    assert selected(page) == "dapple_a: 0B1"
    before = bounds(page)
    page.press("f")
    assert bounds(page)[1] - bounds(page)[0] < before[1] - before[0]
    assert page.ask("positionOf('0B1')") is not None
    page.press("c")
    assert page.ask("selected().end") <= timeline.spans[page.ask("selected().index")].end + 1e-9
    assert selected(page) != "dapple_a: 0B1"
    page.press("p")
    assert page.find("button[aria-pressed=true][title*='determine']")


def test_search(show: Show) -> None:
    page = show(page_of(replicated("first"), replicated("second")))
    box = page.find("#search")
    page.press("/")
    box.send_keys("0b3.r1")
    assert selected(page) == "first: 0B3.r1"
    total = sum(f"{span.stage}{span.kind}{span.micro_batch}.r{span.replica}" == "0B3.r1" for span in replicated().spans)
    assert page.text("#tools .hint").startswith("1 of ")
    box.send_keys("\n" * total)
    assert selected(page) == "second: 0B3.r1"
    box.clear()
    box.send_keys("no such task")
    assert page.text("#tools .hint") == "nothing found"
    box.send_keys("+0")  # Typing doesn't zoom.
    assert bounds(page)[0] == 0.0
    assert page.ask("select('0B3.r2', 'second')") is True
    assert page.ask("select('9B9')") is False
    page.click_link("first")
    assert selected(page) == "first: 0B3.r2"


# ---- links and new data


@pytest.mark.slow
def test_link_shows_the_same_again(show: Show) -> None:
    text = page_of(bert("dapple_a"), bert("zb_h1"), in_forwards())
    page = show(text)
    page.ask("setFilter('stage', [1, 2])")
    page.ask("setFilter('kind', ['F', 'Bx'])")
    page.ask("setFilter('micro_batch', [1, 2, 5])")
    page.ask("setBounds(0.125, 0.5)")
    page.ask("setBounds(2, 9, 'F')")
    page.ask("select('2Bx5', 'zb_h1')")
    page.press("p")
    state = [page.ask(question) for question in ("lanes()", "filters()", "selected()")]
    views = bounds(page), bounds(page, "F")
    wait = "const done = arguments[0]; setTimeout(() => done(location.hash.slice(1)), 400)"
    hash = page.driver.execute_async_script(wait)
    parsed = dict(urllib.parse.parse_qsl(hash))
    assert parsed["stage"] == "1-2" and parsed["micro_batch"] == "1-2,5" and parsed["kind"] == "F,Bx"
    again = show(text, hash)
    assert [again.ask(question) for question in ("lanes()", "filters()", "selected()")] == state
    for view, before in zip((bounds(again), bounds(again, "F")), views, strict=True):
        assert view == pytest.approx(before)
    assert again.find("button[aria-pressed=true][title*='determine']")
    again.run("location.hash = 'stage=3'")
    again.driver.execute_async_script(wait)
    assert again.ask("filters()") == {"stage": [3], "kind": None, "device": None, "micro_batch": None}
    assert selected(again) is None
    again.run("location.hash = 'stage=zzz&kind=&t.s=9~a&name=<b>&nth=-1&y=x&device=1-999999999'")
    again.driver.execute_async_script(wait)
    assert again.ask("filters().stage") is None and again.ask("filters().kind") == []


def test_other_timelines_in_place(show: Show) -> None:
    page = show(page_of(bert("dapple_a", "simulated")))
    page.ask("setFilter('stage', [1, 2])")
    page.ask("select('2B3')")
    other = Timeline(**{**_fields(bert("gpipe", "simulated")), "latency": 2.0})
    page.run("dapple.showTimelines(arguments[0])", timeline_data([other]))
    assert counts(page) == expected([other])
    assert counts(page, "matching") == expected([other], lambda _, span: span.stage in (1, 2))
    assert selected(page) == "simulated: 2B3"
    assert page.ask("selected().start") == pytest.approx(
        next(s.start for s in other.spans if (s.stage, s.kind, s.micro_batch) == (2, "B", 3))
    )
    assert bounds(page) == (0.0, pytest.approx(2.02))  # It showed everything, so it still does.
    page.ask("setBounds(0.25, 0.5)")
    page.run("dapple.showTimelines(arguments[0])", timeline_data([bert("zb_h1", "simulated"), in_forwards()]))
    assert bounds(page) == (0.25, 0.5)
    assert selected(page) is None  # There is no 2B3 in it.
    assert page.ask("timelines()") == ["simulated", "planned"]
    page.run("dapple.controls.append(dappleLib.element('button', {}, '<b>'))")
    assert page.text("#controls") == "<b>"
    page.settle()


def _fields(timeline: Timeline) -> Mapping[str, Any]:
    return {field.name: getattr(timeline, field.name) for field in dataclasses.fields(timeline)}


def test_pages_of_others_add_scripts_and_data(show: Show) -> None:
    scripts = [*map(asset, TIMELINE_SCRIPTS), "document.title = dapple.data.cases.length + ' ' + dapple.lanes().length"]
    page = show(assemble("What if", scripts, timeline_data([bert("dapple_a")]) | {"cases": [1, 2]}))
    assert page.driver.title == "2 8"
    page.run("'use strict'; try { dapple.data.cases.push(3) } catch (error) { document.title = error.name }")
    assert page.driver.title == "TypeError"


def test_a_page_may_begin_with_nothing(show: Show) -> None:
    page = show(assemble("What if", [asset(name) for name in TIMELINE_SCRIPTS], {"timelines": []}))
    place = {"x": 500, "y": 400}
    page.wheel(place, 100)
    page.drag(place, 50)
    page.press("]", "f", "p", "c", "+", "0")
    page.settle()
    assert counts(page) == {}
    page.run("dapple.showTimelines(arguments[0])", timeline_data([bert("dapple_a")]))
    assert counts(page, "visible") == expected([bert("dapple_a")])
    page.settle()


# ---- hostile and large


def test_hostile_names_are_texts(show: Show) -> None:
    evil = "</script><img src=x onerror='document.title=\"broken\"'>\u2028<!--<script>document.title='broken'</script>"
    spans = (Span(evil, 0.0, 1.0, 0, 0, 0), Span("constructor", 1.0, 2.0, 1, 0, 1, cause=0))
    page = show(timeline_page([handmade(*spans, name=evil, devices={0: evil, 1: "__proto__"})], title=evil))
    page.ask("setFilter('stage', null)")
    assert page.ask("select('0constructor1')")
    page.click("#cause button")
    page.hover_at(page.ask("positionOf(dapple.selected().name)"))
    assert page.driver.title.startswith("</script><img")
    assert page.text("h1") == evil
    assert evil in page.text("#tip") and evil in page.text("#details") and evil in page.text("#summary")
    assert page.run("return document.querySelectorAll('img, b, #details script').length") == 0
    assert page.driver.title != "broken"


@pytest.mark.thorough
@pytest.mark.slow
def test_ten_thousand_tasks(show: Show) -> None:
    draw = random.Random(0)
    spans: list[Span] = []
    for device in range(16):
        moments = itertools.accumulate(draw.choice((0.5, 1.0)) for _ in range(625))
        for number, end in enumerate(moments):
            kind = draw.choice(("F", "B", "Bx", "Bw"))
            spans.append(
                Span(kind, end - 0.5, end - 0.1, device, device, number, cause=len(spans) - 1 if spans else None)
            )
    curves = {device: tuple((i / 3, draw.random()) for i in range(1500)) for device in range(16)}
    timeline = handmade(*spans, devices={device: f"device {device}" for device in range(16)}, memory=curves)
    page = show(page_of(timeline))
    assert counts(page) == expected([timeline])
    assert len(timeline.spans) == 10_000
    name = f"{spans[-1].stage}{spans[-1].kind}{spans[-1].micro_batch}"
    assert page.ask(f"select('{name}')")
    page.press("p", "f", "0")
    page.settle()
    assert page.run("return document.querySelectorAll('*').length") < 2500  # Tasks aren't elements.
    assert page.ask("frame()")["frames"] > 0


def test_dark_and_light(show: Show) -> None:
    page = show(page_of(bert("dapple_a")))
    page.settle()
    (light,) = page.pixels(2, 400, 1, 1)
    page.prefer("dark")
    (dark,) = page.pixels(2, 400, 1, 1)
    assert sum(light) > 600 > 200 > sum(dark)
