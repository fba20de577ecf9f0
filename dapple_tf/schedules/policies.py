"""The built-in policies: all of them, in the order in which texts list them."""

from __future__ import annotations

from dapple_tf.common.data_files import short
from dapple_tf.schedules.controllable_memory import V_HALF, V_MIN
from dapple_tf.schedules.dualpipe import DUALPIPE_V
from dapple_tf.schedules.interleaving import INTERLEAVED
from dapple_tf.schedules.out_of_order import (
    DAPPLE_A,
    DAPPLE_B,
    FAST_FORWARD,
    FAST_FORWARD_A,
    FAST_FORWARD_B,
    GPIPE,
    MODULO,
)
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V, ZERO_BUBBLE

BUILT_IN: tuple[Policy, ...] = (
    *(GPIPE, DAPPLE_A, DAPPLE_B),
    *(FAST_FORWARD, FAST_FORWARD_A, FAST_FORWARD_B),
    MODULO,
    INTERLEAVED,
    *(ZB_H1, ZB_H2, ZB_V, ZERO_BUBBLE),
    *(V_MIN, V_HALF),
    DUALPIPE_V,
)
"""Policies are listed only here; each is defined in its own file."""

_BY_NAME = {policy.name: policy for policy in BUILT_IN}


def policy_of(schedule: object) -> Policy:
    """Returns the policy that a plan's ``schedule`` means: a built-in one's name, or a policy itself.

    Raises:
        ScheduleError: it is neither, or a policy that has a built-in one's name.
    """
    if isinstance(schedule, Policy):
        if _BY_NAME.get(schedule.name, schedule) != schedule:
            raise ScheduleError(f"a built-in schedule is called {schedule.name} too; give yours another name")
        return schedule
    if isinstance(schedule, str) and schedule in _BY_NAME:
        return _BY_NAME[schedule]
    if callable(schedule):
        name = getattr(schedule, "__name__", "name")
        raise ScheduleError(f"the schedule is the function {name}; wrap it: dapple.Policy({name!r}, {name})")
    raise ScheduleError(f"unknown schedule {short(schedule)}; use one of {', '.join(_BY_NAME)}")
