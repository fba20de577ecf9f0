"""DualPipeV: DeepSeek's DualPipe cut in half by Sea AI Lab, so that each stage exists once, on a V of p devices.

Stages i and 2p - 1 - i are on device i. With its two stages called there and back, device i of p runs

    times             what
    2 (p - i - 1)     F there
    i + 1             F there, F back
    p - i - 1         Bx back, Bw back, F back
    M - 2p + i + 1    F there, B back, F back, B there
    p - i - 1         B back, F back, B there
    i + 1             B back, B there; from half of them on, Bx alone
    p - i - 1         Bw, Bx there
    i + 1             Bw

A Bw comes from the oldest Bx that left one; B is Bx and Bw. With P = 2p stages a device has at most P + 1 micro-batches
of its stages in flight, and the published bubble is ``(P/2 - 1)(F&B + B - 3 Bw)``, where F&B is a forward and a
backward that overlap. Here tasks of a device never overlap, and a Bx is sent on before its Bw runs: the bubble is
``(P/2 - 1)(F + Bx - Bw)``. With fewer than 2p micro-batches, and under less memory, tasks are ordered by list
scheduling.
"""

from __future__ import annotations

from collections import deque

from dapple_tf.schedules import list_scheduling
from dapple_tf.schedules.controllable_memory import on_devices, room_on_devices
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase

F, BX, BW = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


def dualpipe_v(request: ScheduleRequest) -> Orders:
    """Orders a V as DualPipeV, or by list scheduling where limits or too few micro-batches rule that out.

    Raises:
        ScheduleError: the devices aren't a V.
    """
    request.check_vee()
    positions = len(request.ways()) // 2
    each = max(map(len, request.stages_of.values())) // 2
    room = room_on_devices(request, (2 * positions + 1) * each)
    if request.micro_batches >= 2 * positions:
        orders = on_devices(request, [_order(i, positions, request.micro_batches) for i in range(positions)])
        if list_scheduling.keeps_within(request, orders, room):
            return orders
    return list_scheduling.best(list_scheduling.free_runs(request, room)).orders


def _order(position: int, positions: int, micro_batches: int) -> list[Job]:
    """Returns the tasks of a position; a `Job`'s stage is its way."""
    there, back = position, 2 * positions - 1 - position
    near, far = position + 1, positions - position - 1
    tasks = _Tasks()
    tasks.forward(*[there] * (2 * far))
    tasks.forward(*[there, back] * near)
    for _ in range(far):
        tasks.backward(back)
        tasks.forward(back)
    for _ in range(micro_batches - 2 * positions + near):
        tasks.forward(there)
        tasks.backward(back)
        tasks.forward(back)
        tasks.backward(there)
    for _ in range(far):
        tasks.backward(back)
        tasks.forward(back)
        tasks.backward(there)
    for index in range(2 * near):
        tasks.backward(there if index % 2 else back, keep=index >= near)
    for _ in range(far):
        tasks.weights()
        tasks.backward(there, keep=True)
    for _ in range(near):
        tasks.weights()
    return tasks.jobs


class _Tasks:
    """The tasks of one position so far; micro-batches are counted for each way and phase."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._next: dict[tuple[int, Phase], int] = {}
        self._late: deque[Job] = deque()

    def forward(self, *ways_: int) -> None:
        """Appends the next F of each of these ways."""
        for way in ways_:
            self.jobs.append(self._job(way, F))

    def backward(self, way: int, *, keep: bool = False) -> None:
        """Appends the next Bx of a way, and its Bw unless that is kept for later."""
        job = self._job(way, BX)
        self.jobs.append(job)
        weights = Job(way, BW, job.micro_batch)
        (self._late if keep else self.jobs).append(weights)

    def weights(self) -> None:
        """Appends the oldest Bw that was kept."""
        self.jobs.append(self._late.popleft())

    def _job(self, way: int, phase: Phase) -> Job:
        number = self._next.get((way, phase), 0)
        self._next[way, phase] = number + 1
        return Job(way, phase, number)


DUALPIPE_V = Policy(
    "dualpipe_v",
    dualpipe_v,
    "DualPipe cut in half: two stages on each device, there and back, a little more than 1F1B's memory",
    check=ScheduleRequest.check_vee,
    splits=True,
    shares_room=True,
    planning=Planning((Placement.VEE,), 35, where_short=True, by_seconds=True, list_runs=2),
)
