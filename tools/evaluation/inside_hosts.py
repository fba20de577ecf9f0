"""Programs of which one half makes hosts (`tools.hosts`), and the other half is the client within the first of them."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dapple_tf.tools.hosts import Hosts, HostsError


def run_inside(hosts: Hosts, module: str, task: Mapping[str, Any]) -> Any:
    """Runs ``python -m module --inside=FILE`` in the first host; returns the result that `inside` writes.

    Args:
        hosts: the hosts, whose addresses the task gets as ``addresses``.
        module: the program.
        task: what it is to do, as JSON can have it.

    Raises:
        HostsError: the client failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as directory:
        told, result = pathlib.Path(directory) / "task.json", pathlib.Path(directory) / "result.json"
        told.write_text(json.dumps({**task, "addresses": hosts.addresses, "result": str(result)}))
        program = [sys.executable, "-m", module, f"--inside={told}", "--verbosity=-2"]
        if code := hosts.run(0, program).returncode:
            raise HostsError(f"the client in host 0 ended with code {code}; see above")
        return json.loads(result.read_text())


def inside(path: str, work: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Does the task of a file, writes its result, and ends the process.

    Args:
        path: the file that `run_inside` has written.
        work: task -> result, as JSON can have it.
    """
    task = json.loads(pathlib.Path(path).read_text())
    try:
        pathlib.Path(task["result"]).write_text(json.dumps(work(task)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # After a failed collective, sessions may wait forever to be closed.
    os._exit(0)
