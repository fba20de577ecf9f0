"""The what-if page: questions and answers, the server that it comes from, and the page in a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import pathlib
import re
import shlex
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import planned_hardware as given
import pytest

import dapple_tf as dapple
from dapple_tf.tools import command, simulate, what_if
from dapple_tf.tools.model_flags import load_profile
from dapple_tf.tools.questions import MOST_SLICES, Desk, Question, QuestionError, parse_stages, stages_text
from dapple_tf.tools.shapes import cuts_by_profile
from dapple_tf.tools.variants import Hardware

if TYPE_CHECKING:
    from browser import Page
    from selenium.webdriver import Chrome

SOURCES = ("--profile=profile.json", "--cluster=cluster.json")


def desk(plan: dapple.Plan | None = None, **changes: Any) -> Desk:
    options = {"sources": SOURCES, "plan_path": "plan.json", "cluster": given.cluster()} | changes
    return Desk(given.profile(), plan=plan or given.plan(), **options)


def asked(**changes: Any) -> dict[str, Any]:
    """A question about the usual plan, with changes, as a page asks it."""
    return Question.of(given.plan()).as_json() | changes


def latency(plan: dapple.Plan, **hardware: float) -> float:
    return dapple.simulate(plan, given.profile(), Hardware(**hardware).of(given.cluster())).latency


def only(answer: dict[str, Any]) -> dict[str, Any]:
    """The one case of an answer."""
    (case,) = answer["cases"]
    return dict(case)


# --- stages as text ---


def test_stages_as_text() -> None:
    text = "block_3: 0-2\n(last): 3"
    plan = given.plan()
    assert stages_text(plan.cuts, plan.devices) == text
    assert parse_stages(text) == (plan.cuts, plan.devices)
    assert parse_stages("\n a:b/c : 0, 1,5-6 \n\n(last):4\n") == (("a:b/c",), ((0, 1, 5, 6), (4,)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are 0 stages; write a line for each"),
        ("block_3: 3-1\n(last): 3", "the devices of stage 0 have 3-1; write the smaller number first"),
        ("block_3: 0\nlogits: 1", "the last stage is 'logits: 1'; write '(last): ' and its devices"),
        ("a: 1\n" * 1001, "there are 1001 stages"),
    ],
)
def test_wrong_stages_are_told(text: object, message: str) -> None:
    with pytest.raises(QuestionError, match=re.escape(message)):
        parse_stages(text)


# --- questions ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batches": "four"}, "micro_batches is 'four'; it must be a whole number from 1 on"),
        ({"schedule": "best"}, "schedule is 'best'; use one of gpipe"),
        ({"speed": 0}, "speed is 0.0; it must be above 0"),
        ({"intra_bandwidth": 1e300}, "intra_bandwidth is 1e+300"),
        ({"more": 1}, "it must be an object of global_batch_size"),
    ],
)
def test_wrong_questions_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuestionError, match=re.escape(message)):
        Question.parse(asked(**changes))
    case = only(desk().answer({"what if": asked(**changes)}))
    assert message in case["error"]


def test_what_is_too_large_is_refused_before_it_is_made() -> None:
    case = only(desk().answer({"what if": asked(micro_batches=10**9, global_batch_size=10**9)}))
    assert f"this page simulates up to {MOST_SLICES:,} under dapple_a: use fewer micro-batches" in case["error"]
    case = only(desk().answer({"what if": asked(micro_batches=300, global_batch_size=3000, schedule="zero_bubble")}))
    assert "up to 1,024 under zero_bubble" in case["error"]


# --- answers ---


def test_numbers_are_the_simulators() -> None:
    answer = desk().answer({"base": asked(), "what if": asked(micro_batches=8, schedule="zb_h1")})
    base, other = answer["cases"]
    assert base["numbers"]["latency"] == latency(given.plan())
    step = dapple.simulate(given.plan(micro_batches=8, schedule="zb_h1"), given.profile(), given.cluster())
    assert other["numbers"] == {
        "latency": step.latency,
        "throughput": step.throughput,
        "bubble": pytest.approx(sum(step.idle.values()) / 4),
        "peak_bytes": max(step.peak_bytes.values()),
        "peak_device": max(step.peak_bytes, key=lambda device: step.peak_bytes[device]),
        "limit": 2**30,
        "fits": True,
        "samples": 24,
    }
    assert dapple.Plan.from_json(other["plan"]) == given.plan(micro_batches=8, schedule="zb_h1")
    drawn = {timeline["name"]: timeline["count"] for timeline in answer["timelines"]}
    assert list(drawn) == ["base", "what if"] and drawn["what if"] == len(step.spans)
    json.dumps(answer, allow_nan=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"inter_bandwidth": 2.5e8, "intra_latency": 3e-05, "speed": 1.5},
        {"stages": "block_0: 0\nblock_2: 1\n(last): 2-3", "schedule": "fast_forward"},
    ],
)
def test_commands_give_the_same_step(
    changes: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is copied from the page and run says what the page said."""
    files = given.write(tmp_path)
    sources = (f"--profile={files.profile}", f"--cluster={files.cluster}")
    case = only(desk(sources=sources, plan_path=str(files.plan)).answer({"what if": asked(**changes)}))
    line = shlex.split(case["command"])
    assert line[:3] == ["python", "-m", "tools.simulate"]
    if "stages" in changes:
        assert "--plan=plan.json" in line
        files.plan.write_text(case["plan"])
        line = [argument.replace("--plan=plan.json", f"--plan={files.plan}") for argument in line]
    assert command.run(simulate.main, simulate.FLAGS, [*line[3:], "--notimeline"]) == 0
    assert f"step {case['numbers']['latency'] * 1e3:.4g} ms" in capsys.readouterr().out


def test_plans_that_cannot_be_are_told_beside_the_base() -> None:
    answer = desk().answer({"base": asked(), "what if": asked(micro_batches=25)})
    assert "numbers" in answer["cases"][0]
    assert "can't be cut into 25 micro-batches" in answer["cases"][1]["error"]
    assert [timeline["name"] for timeline in answer["timelines"]] == ["base"]
    for changes, message in (
        ({"stages": "block_9: 0\n(last): 1"}, "cuts after 'block_9', which isn't a layer"),
        ({"stages": "block_3: 0-3\n(last): 4"}, "on device 4, but the cluster has 4 devices"),
        ({"schedule": "zb_v"}, "zb_v wants stages i and"),
        ({"inter_bandwidth": 0}, "inter_bandwidth is 0.0 bytes/s; it must be above 0"),
    ):
        answer = desk().answer({"what if": asked(**changes)})
        assert message in only(answer)["error"]
        assert answer["timelines"] == []


# --- the server ---


@pytest.fixture(scope="module")
def server() -> Iterator[what_if.WhatIfServer]:
    with serving(desk()) as started:
        yield started


@contextlib.contextmanager
def serving(served: Desk) -> Iterator[what_if.WhatIfServer]:
    """A desk's server, in a thread."""
    started = what_if.WhatIfServer(served)
    thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield started
    finally:
        started.shutdown()
        thread.join()
        started.server_close()


def ask(
    server: what_if.WhatIfServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    answer = response.status, response.headers, response.read()
    connection.close()
    return answer


JSON = {"Content_Type": "application/json"}


def test_the_page_and_an_answer(server: what_if.WhatIfServer) -> None:
    status, headers, body = ask(server, "GET", "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert b"What if: small on 4 devices" in body and b"connect-src &#x27;self&#x27;" in body
    assert b"http:" not in body.replace(b"http://www.w3.org", b"")  # It asks nobody else.
    assert ask(server, "HEAD", "/")[2] == b""
    status, headers, body = ask(
        server, "POST", "/answer", json.dumps({"what if": asked(micro_batches=8)}).encode(), **JSON
    )
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert only(json.loads(body))["numbers"]["latency"] == latency(given.plan(micro_batches=8))


def test_only_loopback_and_only_its_own_name(server: what_if.WhatIfServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    port = server.server_port
    assert ask(server, "GET", "/", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        status, _, body = ask(server, "GET", "/", Host=host)
        assert status == 403 and f"this is 127.0.0.1:{port} and no other host".encode() in body
        assert ask(server, "POST", "/answer", b"{}", Host=host, **JSON)[0] == 403


def test_other_pages_may_not_ask(server: what_if.WhatIfServer) -> None:
    body = json.dumps({"base": asked()}).encode()
    assert ask(server, "POST", "/answer", body, Origin=f"http://127.0.0.1:{server.server_port}", **JSON)[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.server_port + 1}"):
        assert ask(server, "POST", "/answer", body, Origin=origin, **JSON)[0] == 403
    assert ask(server, "POST", "/answer", body, Content_Type="text/plain")[0] == 415  # what a form could send


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/../../etc/passwd", None, {}, 404),
        ("POST", "/answer", b"no JSON", JSON, 400),
        ("POST", "/answer", b"[" * 60_000, JSON, 400),
        ("POST", "/answer", b" " * (what_if.MOST_BYTES + 1), JSON, 413),
        ("POST", "/answer", None, JSON | {"Content_Length": "9" * 50}, 413),
        ("POST", "/answer", None, JSON | {"Content_Length": "-1"}, 411),
        ("POST", "/answer", None, JSON | {"Transfer_Encoding": "chunked"}, 411),
    ],
)
def test_bad_requests(
    method: str, path: str, body: bytes | None, headers: dict[str, str], status: int, server: what_if.WhatIfServer
) -> None:
    code, _, text = ask(server, method, path, body, **headers)
    assert code == status
    if status != 501:
        assert json.loads(text)["error"]
    assert ask(server, "GET", "/")[0] == 200


# --- the program ---


def test_the_program_serves(
    server: what_if.WhatIfServer,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served: list[what_if.WhatIfServer] = []

    def serve(own: what_if.WhatIfServer, *_: object) -> None:
        served.append(own)
        raise KeyboardInterrupt

    def run(*arguments: str) -> int:
        return command.run(what_if.main, what_if.FLAGS, ["--nobrowser", *arguments])

    opened: list[str] = []
    monkeypatch.setattr(what_if.WhatIfServer, "serve_forever", serve)
    monkeypatch.setattr(what_if.webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    files = given.write(tmp_path)
    assert run(*files.flags, "--browser") == 0
    assert opened == [served[0].address]
    assert f"The page is at http://127.0.0.1:{served[0].server_port}/ (Ctrl-C ends it)" in capsys.readouterr().out
    assert (served[0].desk.plan, served[0].desk.plan_path) == (given.plan(), str(files.plan))
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert run(*files.flags, "--schedule=gpipe", "--browser") == 0 and len(opened) == 1
    assert served[1].desk.plan_path is None  # The file has another schedule.
    assert run(*files.flags, f"--port={server.server_port}") == 1
    text = f"--port={server.server_port}: Address already in use; leave it out for any that is free"
    assert text in capsys.readouterr().err


def test_browsers_that_go_before_their_answer(server: what_if.WhatIfServer, capfd: pytest.CaptureFixture[str]) -> None:
    """Typing on drops the question before. The terminal showed a traceback for each."""
    asker = socket.create_connection(("127.0.0.1", server.server_port))
    host = f"Host: 127.0.0.1:{server.server_port}\r\n"
    asker.sendall(
        f"POST /answer HTTP/1.1\r\n{host}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode()
    )
    asker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Reset, not closed.
    asker.close()
    assert ask(server, "GET", "/")[0] == 200  # One after another: the first has been begun.
    deadline = time.monotonic() + 20
    while any(thread.name.endswith("(process_request_thread)") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Traceback" not in capfd.readouterr().err


# --- in a browser ---


def test_the_page_answers_errs_and_resets(browser: Chrome, picture: Callable[[Page, str], None]) -> None:
    """BERT-48 as the DAPPLE authors measured it, on two servers of two; the docs show this page."""
    from browser import Page

    profile = load_profile("bert-48")
    links = {"intra_bandwidth": 130e9, "inter_bandwidth": 3.125e9, "intra_latency": 5e-6, "inter_latency": 3e-5}
    machines = given.cluster((2, 2), memory=16 * 2**30, **links)
    plan = dapple.Plan.straight(cuts_by_profile(profile, (1, 1, 1, 1)), 64, 8)
    faster = dapple.simulate(
        dataclasses.replace(plan, schedule="zb_h1"), profile, Hardware(inter_bandwidth=25e9).of(machines)
    )
    with serving(Desk(profile, machines, plan, SOURCES, "plan.json")) as started:
        page = Page(browser, started.address)

        def settle() -> None:
            deadline = time.monotonic() + 60
            while page.run("return whatIf.busy()"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            page.settle()

        def enter(name: str, value: str) -> None:
            """Changes a setting as a person does, and waits for the answer."""
            field = page.find(f"#set-{name}")
            before = page.run("return whatIf.asked()")
            if field.tag_name == "select":
                field.find_element("css selector", f"option[value='{value}']").click()
            else:
                field.send_keys("\ue009a\ue000\ue017", value)  # Ctrl and A, then Delete
            settle()
            assert page.run("return whatIf.asked()") > before

        def click(button: str) -> None:
            page.click(f"#{button}")
            settle()

        def step_time() -> list[str]:
            """Of the base, of what would be, and the difference."""
            rows = "[...document.querySelectorAll('#what-if .results tbody tr')]"
            row = f"{rows}.find((row) => row.textContent.startsWith('step time'))"
            return list(page.run(f"return [...{row}.children].map((cell) => cell.textContent)"))[1:]

        settle()
        enter("schedule", "zb_h1")
        enter("inter_bandwidth", "25")  # GB/s
        picture(page, "what_if.png")
        before, after, change = step_time()
        assert before == f"{dapple.simulate(plan, profile, machines).latency:.4g} s"
        assert after == f"{faster.latency:.4g} s" and change.startswith("\u2212")
        assert page.text("tr.changed td.base") == "dapple_a"
        command_line = page.run("return whatIf.answer().cases[1].command")
        expected = ["--plan=plan.json", "--schedule=zb_h1", *SOURCES, "--inter_bandwidth=2.5e+10"]
        assert shlex.split(command_line)[3:] == expected
        assert [*page.ask("timelines()")] == ["what if", "base"]
        click("use-as-base")
        assert step_time() == [after, after, "same"]
        click("reset")
        assert step_time()[0] == before

        enter("stages", "block_9: 0-2\n(last): 3")
        assert "cuts after 'block_9', which isn't a layer" in page.text("#what-if-error")
        assert [*page.ask("timelines()")] == ["base"] and step_time()[1] == "\u2014"
        assert not page.find("#copy-plan").is_enabled()
        click("reset")
        assert page.text("#what-if-error") == ""
        page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'));")
        enter("micro_batches", "16")
        text = "The server doesn't answer; is the program that opened this page still running?"
        assert page.text("#what-if-error") == text
        assert page.errors() == []
