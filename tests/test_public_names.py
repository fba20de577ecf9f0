"""What is public comes when it is asked for, from wherever that is."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.tools.command import CONSOLE

ROOT = Path(__file__).resolve().parent.parent


def test_public_names_are_there_and_hidden_by_no_module() -> None:
    for name in dapple.__all__:
        value = getattr(dapple, name)
        assert not isinstance(value, types.ModuleType)
        assert name in dir(dapple) and getattr(dapple, name) is value
    assert set(dir(dapple)) == {*dapple.__all__, "__version__"}


@pytest.mark.parametrize("modules", [["worker"], [f"tools.{name}" for name in CONSOLE]], ids=["worker", "tools"])
def test_plans_are_read_and_flags_told_without_tensorflow(modules: list[str]) -> None:
    code = f"""
import sys, dapple_tf, {", ".join(f"dapple_tf.{module}" for module in modules)}
for name in ("Cluster", "Plan", "PlanError", "Policy", "Profile", "plan", "simulate"):
    getattr(dapple_tf, name)
sys.exit(any(name in sys.modules for name in ("tensorflow", "keras")))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_one_thread_at_a_time_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow fails where several threads import it at once, each beginning with another of its modules."""
    free = []

    def importing(module: str) -> Any:
        other = threading.Thread(target=lambda: free.append(dapple._IMPORTING.acquire(blocking=False)))
        other.start()
        other.join()
        return sys.modules[module]

    known = dapple.Plan
    monkeypatch.delitem(vars(dapple), "Plan")
    monkeypatch.setattr(importlib, "import_module", importing)
    assert dapple.Plan is known
    assert free == [False]


def test_a_name_that_there_is_not_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'dapple_tf' has no attribute 'plans'"):
        dapple.plans  # noqa: B018
