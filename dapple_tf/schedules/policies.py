"""The built-in policies, and the references to policies in a plan's file.

    in the file               what it is
    zb_h1                     a built-in policy
    my_schedules:RUN_AHEAD    a policy bound to a name of a module
    schedules/mine.csv        a CSV file, relative to the plan's folder

A plan's file is data: reading it must not run code that it names. A module is therefore searched only if the program
has already imported it; otherwise the caller passes the policy itself. A CSV file is read, within bounds.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path

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
from dapple_tf.schedules.schedule_csv import SUFFIX, csv_policy
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V, ZERO_BUBBLE

logger = logging.getLogger(__name__)

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
_HOW_TO_GIVE = "Plan.load(path, schedules=[...])"


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


def own_policy(schedule: object) -> object:
    """Returns the policy that a plan's ``schedule`` names: by a CSV file's path, or as ``module:name``.

    A built-in policy becomes its name, and all else stays as it is.

    Raises:
        ScheduleError: the CSV file isn't a schedule, or can't be read; or no imported module has such a policy.
    """
    if isinstance(schedule, Policy) and schedule in BUILT_IN:
        return schedule.name
    if isinstance(schedule, os.PathLike) or (isinstance(schedule, str) and schedule.endswith(SUFFIX)):
        return csv_policy(schedule)
    if isinstance(schedule, str) and ":" in schedule:
        policy, what = _of_module(schedule)
        if policy is None:
            raise ScheduleError(f"the schedule {short(schedule)} {what}; import its module, or give the policy itself")
        return policy
    return schedule


def reference(policy: Policy, folder: Path | None = None) -> str:
    """Returns the reference to a policy for a plan's file.

    Args:
        policy: the policy. If no name of a module is bound to it, its own name is used, by which `find_policy` finds
            it among ``given``; a warning says so.
        folder: the plan's: the path of a CSV file in it, or below it, is relative to it.
    """
    text = _reference(policy, folder)
    if text == policy.name and policy not in BUILT_IN:
        logger.warning(
            "no name of a module is bound to the schedule %s, so that reading the plan takes the policy: %s",
            policy, _HOW_TO_GIVE,
        )  # fmt: skip
    return text


def _reference(policy: Policy, folder: Path | None) -> str:
    if policy in BUILT_IN:
        return policy.name
    if policy.source is not None:
        if folder is not None and policy.source.endswith(SUFFIX) and Path(policy.source).is_relative_to(folder):
            return Path(policy.source).relative_to(folder).as_posix()
        return policy.source
    order = policy.order
    while isinstance(order, functools.partial):
        order = order.func
    for name, value in _names(order.__module__).items():
        if isinstance(value, Policy) and value == policy:
            return f"{order.__module__}:{name}"
    return policy.name


def find_policy(text: object, given: Iterable[Policy], folder: Path) -> object:
    """Returns the policy that ``text`` refers to in a plan's file; ``text`` itself if it is a name, built in or not.

    Args:
        text: from the file.
        given: policies that it may refer to, besides those of imported modules.
        folder: the plan's, which paths of CSV files are relative to.

    Raises:
        ScheduleError: no policy is found, or it is a CSV file that isn't a schedule or can't be read; or what is given
            isn't policies.
    """
    if isinstance(given, Policy) or not isinstance(given, Iterable):
        raise ScheduleError(f"schedules is {short(given)}; give a list of policies, such as schedules=[RUN_AHEAD]")
    policies = tuple(given)
    for policy in policies:
        if not isinstance(policy, Policy):
            raise ScheduleError(f"schedules has {short(policy)}; give policies: dapple.Policy(name, function)")
    if not isinstance(text, str) or any(text == policy.name for policy in BUILT_IN):
        return text
    for policy in policies:
        if text in (policy.name, policy.source, _reference(policy, folder.absolute())):
            return policy
    if text.endswith(SUFFIX):
        return csv_policy(folder / text)
    if ":" not in text:
        names = ", ".join(policy.name for policy in BUILT_IN)
        raise ScheduleError(
            f"unknown schedule {short(text)}; use one of {names}, or give your own policy of that name: {_HOW_TO_GIVE}"
        )
    own, what = _of_module(text)
    if own is None:
        raise ScheduleError(
            f"the schedule {short(text)} {what}, and reading a plan imports nothing; import the module that has it "
            f"first, or give the policy: {_HOW_TO_GIVE}"
        )
    return own


def _of_module(text: str) -> tuple[Policy | None, str]:
    """Returns the policy that ``module:name`` means, or None and why it isn't there."""
    module, _, name = text.partition(":")
    value = _names(module).get(name)
    if isinstance(value, Policy):
        return value, ""
    return None, "isn't a Policy of that module" if module in sys.modules else "is of a module that isn't imported"


def _names(module: str) -> dict[str, object]:
    """Returns the names of an imported module. Reading its dictionary runs no code; reading an attribute could."""
    imported = sys.modules.get(module)
    return vars(imported) if isinstance(imported, types.ModuleType) else {}
