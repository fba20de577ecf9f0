"""V-Min and V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024): less memory than 1F1B.

Stages i and 2p - 1 - i are on device i of p, the ways there and back. A building block gives the moment at which each
task of a micro-batch runs, with F = Bx = Bw = 1; it repeats every 6 moments, the number of a micro-batch's tasks on a
device:

    task on position i    v_min              v_half
    F there               i                  2i
    F back                2p - 1 - i         3p - 2 - i
    Bx back               2p + i + g         3p - 1 + 2i + g
    Bx there              4p - 1 - i + g     6p - 2 - i + g
    g                     2 if 3 divides p   3 if 2 divides p    else 0; no two tasks of a device fall on one moment
    most in flight        (p + 4) // 3       (p + 2) // 2        micro-batches on a device; 1F1B's p
    bubble, about         4p                 3p                  tasks; 1F1B's 6 (p - 1)

Bw fill the remaining moments, as they become ready. Then tasks move to earlier free moments, as far as data and memory
allow, which removes bubbles of the first micro-batches; once a device has no more forwards, its Bx go before its Bw.
Only the resulting order counts. For unequal times a list schedule within the same memory may be shorter, and is used
then; under less memory it is the only choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapple_tf.schedules import list_scheduling
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase, inputs

F, BX, BW = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD

Block = Callable[[int, int], tuple[int, int, int, int]]
"""(position, p) -> the moments of F there, F back, Bx back and Bx there."""

_PERIOD = 6
"""Moments from one micro-batch to the next."""


def v_min_block(position: int, positions: int) -> tuple[int, int, int, int]:
    """Returns the building block with the least memory."""
    gap = 0 if positions % 3 else 2
    return (
        position,
        2 * positions - 1 - position,
        2 * positions + position + gap,
        4 * positions - 1 - position + gap,
    )


def v_half_block(position: int, positions: int) -> tuple[int, int, int, int]:
    """Returns the building block with half of 1F1B's memory."""
    gap = 0 if positions % 2 else 3
    return (
        2 * position,
        3 * positions - 2 - position,
        3 * positions - 1 + 2 * position + gap,
        6 * positions - 2 - position + gap,
    )


def v_min_held(positions: int) -> int:
    """Returns the most micro-batches that a device holds under v_min."""
    return (positions + 4) // 3


def v_half_held(positions: int) -> int:
    """Returns the most micro-batches that a device holds under v_half."""
    return (positions + 2) // 2


def room_on_devices(request: ScheduleRequest, most: int) -> dict[int, int]:
    """Returns each device's limit of stages' micro-batches in flight: ``most`` of all its stages, or what D allows.

    D counts micro-batches of any of the device's stages (`Policy.shares_room`); at least one gets through all of them.
    """
    room: dict[int, int] = {}
    for device, stages in request.stages_of.items():
        limits = [] if request.warm_up else [most]
        if request.holds is not None:
            limits.append(max(len(stages), min(request.holds[stage] for stage in stages)))
        if limits:
            room[device] = min(limits)
    return room


def on_devices(request: ScheduleRequest, orders: Sequence[Sequence[Job]]) -> Orders:
    """Turns positions' jobs, whose "stages" are ways, into devices' jobs: each way's stages run one by one."""
    members = request.ways()
    device_orders: Orders = {}
    for position, jobs in enumerate(orders):
        own = [
            Job(stage, job.phase, job.micro_batch)
            for job in jobs
            for stage in (members[job.stage] if job.phase is F else reversed(members[job.stage]))
        ]
        device_orders |= {device: list(own) for device in request.devices[members[position][0]]}
    return device_orders


def v_min(request: ScheduleRequest) -> Orders:
    """Repeats V-Min's block, or makes a list schedule if that takes less time.

    Raises:
        ScheduleError: the devices aren't a V.
    """
    return _shortest(request, v_min_block, v_min_held)


def v_half(request: ScheduleRequest) -> Orders:
    """Repeats V-Half's block, or makes a list schedule if that takes less time.

    Raises:
        ScheduleError: the devices aren't a V.
    """
    return _shortest(request, v_half_block, v_half_held)


def _shortest(request: ScheduleRequest, block: Block, held: Callable[[int], int]) -> Orders:
    """Returns the repeated block, if it keeps within the limits, or a list schedule, whichever takes less time."""
    request.check_vee()
    positions = len(request.ways()) // 2
    most = max(map(len, request.stages_of.values()))
    room = room_on_devices(request, held(positions) * most)
    repeated = _Repeated(block, positions, request.micro_batches, 2 * held(positions)).orders()
    orders = on_devices(request, repeated)
    runs = [list_scheduling.replay(request, orders)] if list_scheduling.keeps_within(request, orders, room) else []
    return list_scheduling.best([*runs, *list_scheduling.free_runs(request, room)]).orders


class _Repeated:
    """The tasks of a V of ways, each at its moment; a `Job`'s stage is its way."""

    def __init__(self, block: Block, positions: int, micro_batches: int, room: int) -> None:
        """Puts all tasks where the block says.

        Args:
            block: the moments of the first micro-batch's tasks.
            positions: p.
            micro_batches: M.
            room: the most micro-batches in flight on a position, over both ways.
        """
        self.positions, self.room = positions, room
        self.moments: dict[Job, int] = {}
        for position in range(positions):
            back = 2 * positions - 1 - position
            tasks = ((position, F), (back, F), (back, BX), (position, BX))
            for (way, phase), first in zip(tasks, block(position, positions), strict=True):
                for number in range(micro_batches):
                    self.moments[Job(way, phase, number)] = first + _PERIOD * number

    def orders(self) -> list[list[Job]]:
        """Returns for each position its tasks in order."""
        self._fill_gaps()
        self.jobs = frozenset(self.moments)
        self._move_up()
        self._finish()
        orders: list[list[Job]] = [[] for _ in range(self.positions)]
        for job in sorted(self.moments, key=self._when):
            orders[self._position(job)].append(job)
        return orders

    def _when(self, job: Job) -> tuple[int, int]:
        return self.moments[job], self._position(job)

    def _position(self, job: Job) -> int:
        return min(job.stage, 2 * self.positions - 1 - job.stage)

    def _before(self, job: Job) -> list[Job]:
        """Returns a task's predecessors: its inputs, and the same task of the previous micro-batch."""
        way, phase, number = job
        before = [*(Job(*other, number) for other in inputs(way, phase)), Job(way, phase, number - 1)]
        return [other for other in before if other in self.jobs]

    def _tables(self) -> list[dict[int, Job]]:
        """Returns for each position a map from moments to tasks."""
        tables: list[dict[int, Job]] = [{} for _ in range(self.positions)]
        for job, moment in self.moments.items():
            tables[self._position(job)][moment] = job
        return tables

    def _fill_gaps(self) -> None:
        """Puts each Bw at the first free moment after its Bx, in the order of these."""
        for table in self._tables():
            waiting: list[Job] = []
            moment, end = 0, max(table)
            while moment <= end or waiting:
                job = table.get(moment)
                if job is None:
                    if waiting:
                        self.moments[waiting.pop(0)] = moment
                elif job.phase is BX:
                    waiting.append(Job(job.stage, BW, job.micro_batch))
                moment += 1

    def _move_up(self) -> None:
        """Moves each task to the first free moment that data and memory allow, in the order of their moments."""
        tables = self._tables()
        held = [self._held(table) for table in tables]
        for job in sorted(self.moments, key=self._when):
            now, position = self.moments[job], self._position(job)
            table, counts = tables[position], held[position]
            ready = max((self.moments[other] + 1 for other in self._before(job)), default=0)
            if job.phase is F:  # It is held from then on.
                first = now
                while first > ready and counts[first - 1] < self.room:
                    first -= 1
                ready = first
            moment = next((moment for moment in range(ready, now) if moment not in table), now)
            if moment < now:
                del table[now]
                table[moment] = job
                self.moments[job] = moment
                if job.phase is F:
                    for between in range(moment, now):
                        counts[between] += 1
                elif job.phase is BW:
                    for between in range(moment + 1, now + 1):
                        counts[between] -= 1

    @staticmethod
    def _held(table: dict[int, Job]) -> list[int]:
        """Returns the micro-batches in flight at each moment, including one that begins or ends then."""
        counts, count = [], 0
        for moment in range(max(table) + 1):
            phase = table[moment].phase if moment in table else None
            count += phase is F
            counts.append(count)
            count -= phase is BW
        return counts

    def _finish(self) -> None:
        """Runs Bx as soon as they are ready after a position's last F, and Bw when none is."""
        last = [max(moment for moment, job in table.items() if job.phase is F) for table in self._tables()]
        left: list[list[Job]] = [[] for _ in last]
        for job in sorted(self.moments, key=self._when):
            if self.moments[job] > last[self._position(job)]:
                left[self._position(job)].append(job)
        for jobs in left:
            for job in jobs:
                del self.moments[job]
        moment = min(last)
        while any(left):
            moment += 1
            for position, jobs in enumerate(left):
                if moment > last[position]:
                    ready = [job for job in jobs if self._done(job, moment)]
                    if ready:
                        job = next((job for job in ready if job.phase is BX), ready[0])
                        self.moments[job] = moment
                        jobs.remove(job)

    def _done(self, job: Job, moment: int) -> bool:
        """Returns whether all of a task's predecessors are over at a moment."""
        return all(self.moments.get(other, moment) < moment for other in self._before(job))


V_MIN = Policy(
    "v_min",
    v_min,
    "a third of 1F1B's memory, two stages on each device, there and back",
    check=ScheduleRequest.check_vee,
    splits=True,
    shares_room=True,
    planning=Planning((Placement.VEE,), 55, where_short=True, by_seconds=True, list_runs=3),
)
V_HALF = Policy(
    "v_half",
    v_half,
    "half of 1F1B's memory, two stages on each device, there and back",
    check=ScheduleRequest.check_vee,
    splits=True,
    shares_room=True,
    planning=Planning((Placement.VEE,), 65, where_short=True, by_seconds=True, list_runs=3),
)
