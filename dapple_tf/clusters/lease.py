"""The lease of one worker's devices, and what this process asks the worker as long as it lasts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from dapple_tf.clusters.clocks import ClockSample
from dapple_tf.clusters.serving import ProcessExit
from dapple_tf.network.control import PROTOCOL, Channel, ControlError, SilentError
from dapple_tf.network.inquiry import lease_secret
from dapple_tf.network.keys import Keys

_CLOCK_SAMPLES = 8
"""Number of questions for a worker's time; the fastest answer counts."""
_SILENT, _PAUSE, _CONNECT, _ANSWER = 0.15, 0.05, 0.05, 0.3
"""Shares of the time for an answer: until a worker is asked on new connections, too; between these; for making one;
for its answer."""
_AGAIN_SECONDS = 0.05
"""Pause before a worker is asked again how its process has ended."""


@dataclasses.dataclass
class Lease:
    """The lease of one worker's devices.

    Attributes:
        task: number of the worker.
        address: its address.
        channel: the connection to it.
        port: port of its TensorFlow server.
        host: this process's own address, as that worker sees it.
        keys: this machine's, for TLS; None without.
        process: the worker's process that serves this one.
        confirmed: time of the worker's last sign of life.
        questions: what its watcher is to ask it, besides pings, and to note.
    """

    task: int
    address: str
    channel: Channel
    port: int
    host: str
    keys: Keys | None = None
    process: int = 0
    confirmed: float = 0.0
    questions: collections.deque[Callable[[Lease], object]] = dataclasses.field(default_factory=collections.deque)
    _expected: collections.deque[tuple[str, int | None]] = dataclasses.field(default_factory=collections.deque)

    def ping(self, number: int, seconds: float) -> float:
        """Waits at most ``seconds`` for a sign of life; returns a time at which the worker was alive.

        When a link has been down, TCP sends what was lost again only after as many seconds again. A worker that is
        silent on its connection is therefore asked on new ones, too, each of which is there as soon as the link is.

        Args:
            number: number of the ping, larger than those before.
            seconds: time for an answer.

        Raises:
            SilentError: it gave no sign of life.
            ControlError: it has gone.
        """
        asked = time.monotonic()
        deadline, pause = asked + seconds, _SILENT * seconds
        self._send({"ping": number}, "pong", number, seconds)
        while True:
            try:
                self._receive(min(pause, max(0.0, deadline - time.monotonic())))
                return asked
            except SilentError as silent:
                if time.monotonic() >= deadline:
                    raise SilentError(f"doesn't answer within {seconds:.3g} s") from silent
            pause = _PAUSE * seconds
            alive = self._last_sign(deadline, seconds)
            if alive is not None and alive > asked:
                return alive

    def _last_sign(self, deadline: float, seconds: float) -> float | None:
        """Asks on a new connection when the serving process was seen alive; None if nobody answers.

        Raises:
            ControlError: the worker isn't lent to this process any more.
        """

        def at_most(share: float) -> float:
            return max(0.0, min(share * seconds, deadline - time.monotonic()))

        try:
            with contextlib.closing(Channel.connect(self.address, at_most(_CONNECT), self.keys)) as channel:
                asked = time.monotonic()
                answer = self._ask_pulse(channel, at_most(_ANSWER))
        except ControlError:
            return None
        if (end := ProcessExit.parsed(answer)) is not None:
            raise ControlError(end.text)
        if "error" in answer:
            raise ControlError(str(answer["error"]))
        age = answer.get("age")
        return asked - age if type(age) is float else None

    def end(self, seconds: float) -> ProcessExit | None:
        """Asks the worker on a new connection how its process for this one has ended; None if it doesn't know."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(ControlError):
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.closing(Channel.connect(self.address, left, self.keys)) as channel:
                    if (end := ProcessExit.parsed(self._ask_pulse(channel, left))) is not None:
                        return end
                time.sleep(_AGAIN_SECONDS)  # Its connections are closed a moment before the process has ended.
        return None

    def _ask_pulse(self, channel: Channel, seconds: float) -> dict[str, Any]:
        question = {"protocol": PROTOCOL, "ask": "pulse", "secret": lease_secret(self.address), "process": self.process}
        return channel.ask(question, seconds)

    def ask_time(self, seconds: float) -> tuple[ClockSample, ...]:
        """Asks for the worker's time several times.

        Raises:
            SilentError: it didn't answer in time.
            ControlError: it has gone, or says something else.
        """
        samples = []
        for _ in range(_CLOCK_SAMPLES):
            sent = time.time_ns()
            self._send({"time": sent}, "time", sent, seconds)
            answer = self._receive(seconds)
            answered = time.time_ns()
            if type(now := answer.get("now")) is not int:
                raise ControlError(f"was asked for its time and said {reprlib.repr(answer)}")
            samples.append(ClockSample(sent, answered, now))
        return tuple(samples)

    def knock(self, knocking: float, seconds: float) -> dict[str, Any]:
        """Has the worker knock at the others' servers for at most ``knocking`` seconds; returns its answer.

        Raises:
            SilentError: it didn't answer within ``seconds``.
            ControlError: it has gone, or says something else.
        """
        self._send({"knock": knocking}, "unreachable", None, seconds)
        return self._receive(seconds)

    def _send(self, question: Mapping[str, Any], name: str, number: int | None, seconds: float) -> None:
        """Sends a question, whose answer has an entry ``name``, with that number unless it is None."""
        self.channel.send(question, seconds)
        self._expected.append((name, number))

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Returns the answer to the last question; answers to earlier ones may come before it, each once, in order."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.channel.receive(max(0.0, deadline - time.monotonic()))
            name, number = self._expected.popleft()
            if name not in answer or number not in (None, answer[name]):
                raise ControlError(f"was asked for {name!r} and said {reprlib.repr(answer)}")
            if not self._expected:
                return answer
