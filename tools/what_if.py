"""Serves a page for changing a plan or a cluster, which shows at once how the simulated step changes.

    dapple-what-if --profile=profile.json --cluster=cluster.json --plan=plan.json
    dapple-what-if --profile=profile.json --cluster=local:4 --plan=1:1:1:1 --global_batch_size=64

Micro-batches, schedule, recomputation, bandwidths, latencies, the devices' speed and the stages themselves can be
changed. The page shows timelines and numbers of the original and the changed plan, error messages, the plan as JSON
and the command that simulates it. Without --plan the best plan for --global_batch_size is found first.

The page is at http://127.0.0.1:PORT/, for programs on this machine only, and nothing else is served. The browser opens
it, unless there is no display or --nobrowser is given. Ctrl-C ends it.
"""

from __future__ import annotations

import gc
import http.server
import json
import os
import socketserver
import sys
import threading
import time
import webbrowser
from http import HTTPStatus
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from absl import app, flags

import dapple_tf as dapple
from dapple_tf.common.data_files import parse_object
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.tools import command
from dapple_tf.tools.model_flags import ClusterFlag, PlanFlags, ProfileFlags
from dapple_tf.tools.questions import Desk, Question, QuestionError
from dapple_tf.tools.shapes import cuts_by_profile
from dapple_tf.view.page import TIMELINE_SCRIPTS, assemble, asset

FLAGS = flags.FlagValues()

_PROFILE = ProfileFlags(FLAGS)
_CLUSTER = ClusterFlag(FLAGS)
_PLAN = PlanFlags(FLAGS, default="auto", auto=True)
_PORT = flags.DEFINE_integer(
    "port", 0, "Port on 127.0.0.1; 0 for any free port.", lower_bound=0, upper_bound=65_535, flag_values=FLAGS
)

_BROWSER = flags.DEFINE_boolean(
    "browser", True, "Open the page in the browser, where there is a display.", flag_values=FLAGS
)

HOST = "127.0.0.1"
MOST_BYTES = 64 * 1024
"""Maximum bytes of a request's body."""
_SECONDS = 30
"""Seconds after which an idle connection is closed."""


def page(desk: Desk) -> str:
    """Returns the page's HTML."""
    base = Question.of(desk.plan)
    cluster = desk.cluster
    data = desk.answer({"base": base.as_json()})
    data["what_if"] = {
        "question": base.as_json(),
        "model": desk.profile.model,
        "schedules": [*POLICIES, *({str(desk.plan.schedule)} - {*POLICIES})],
        "recompute": list(dict.fromkeys([*RECOMPUTE_MODES, base.as_json()["recompute"]])),
        "layers": [layer.name for layer in desk.profile.layers],
        "cluster": {
            name: getattr(cluster, name)
            for name in ("intra_bandwidth", "inter_bandwidth", "intra_latency", "inter_latency")
        },
        "devices": cluster.num_devices,
        "servers": cluster.num_servers,
    }
    scripts = [*map(asset, TIMELINE_SCRIPTS), asset("what_if.js")]
    title = f"What if: {desk.profile.model} on {cluster.num_devices} devices"
    return assemble(title, scripts, data, connect=True, style=asset("what_if.css"))


class WhatIfServer(http.server.ThreadingHTTPServer):
    """Serves one desk's page on this machine's loopback interface.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, desk: Desk, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.desk = desk
        self.at_work = threading.Lock()  # One answer at a time: they would only slow each other down.
        self.page = page(desk).encode()

    @property
    def address(self) -> str:
        """The page's URL."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names by which browsers may address this server; other names that resolve to this machine are refused."""
        return (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, as the base class does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error, unless the browser has merely closed the connection, as it does when its user types on."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, with one request."""

    timeout = _SECONDS
    server: WhatIfServer
    server_version = "what_if"
    sys_version = ""
    _headers: ClassVar[dict[str, str]] = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": "frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    def do_GET(self) -> None:
        """Sends the page."""
        if self._welcome("/"):
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815  # the name that the base class asks for

    def do_POST(self) -> None:
        """Sends an answer."""
        if not self._welcome("/answer"):
            return
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "ask with Content-Type: application/json")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
            return
        if len(length) > 9 or int(length) > MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MOST_BYTES:,} bytes")
            return
        body = self.rfile.read(int(length))
        try:
            started = time.perf_counter()
            asked = parse_object(body.decode(), "the request", QuestionError)
            with self.server.at_work:
                answer = self.server.desk.answer(asked)
            answer["seconds"] = time.perf_counter() - started
        except (QuestionError, UnicodeDecodeError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self._send_json(HTTPStatus.OK, answer)

    def _welcome(self, path: str) -> bool:
        """Returns whether a request is addressed to this page and comes from it; refuses it otherwise."""
        if self.headers.get_all("Host") not in [[host] for host in self.server.hosts]:
            self._refuse(HTTPStatus.FORBIDDEN, f"this is {self.server.hosts[0]} and no other host")
        elif (origin := self.headers.get("Origin")) is not None and urlsplit(origin).netloc not in self.server.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, "pages of other servers may not ask this one")
        elif urlsplit(self.path).path != path:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is only {path} here")
        else:
            return True
        return False

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._send_json(status, {"error": message})

    def _send_json(self, status: HTTPStatus, data: Any) -> None:
        self._send(status, json.dumps(data, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        for name, value in self._headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests."""


def make_desk() -> Desk:
    """Returns the desk that the flags describe.

    Raises:
        app.UsageError: the flags are invalid.
        PlanError: the plan doesn't fit the cluster or its memory, or no plan does.
    """
    profile, cluster = _PROFILE.profile(), _CLUSTER.cluster()
    _PLAN.early_check()
    sources = [f"--profile={_PROFILE.path}", f"--cluster={_CLUSTER.text}"]
    if _PROFILE.batch_size is not None:
        sources.append(f"--profile_batch_size={_PROFILE.batch_size}")
    if _PLAN.automatic:
        changes = {name: value for name, value in _PLAN.changes.items() if name != "global_batch_size"}
        plan = dapple.plan(profile, cluster, _PLAN.batch_size(), **changes)
    else:
        plan = _PLAN.plan(lambda replicas: cuts_by_profile(profile, replicas))
    desk = Desk(profile, cluster, plan, tuple(sources), None if _PLAN.changes else _PLAN.path)
    question = Question.of(plan)
    try:
        question.check_size()
    except QuestionError as error:
        raise app.UsageError(str(error)) from error
    dapple.simulate(plan, profile, cluster)
    return desk


def main() -> None:
    """Serves until Ctrl-C."""
    desk = make_desk()
    try:
        server = WhatIfServer(desk, _PORT.value)
    except OSError as error:
        raise app.UsageError(f"--port={_PORT.value}: {error.strerror}; leave it out for any that is free") from error
    gc.freeze()  # Otherwise collections would scan all that TensorFlow has imported, longer than an answer takes.
    with server:
        sys.stdout.write(f"{desk.plan}\n\nThe page is at {server.address} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if _BROWSER.value and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
