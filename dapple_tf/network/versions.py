"""Versions of what runs on a client and its workers, and which of them must be the same.

The client captures the model, rewrites its graph and runs the steps; a worker starts TensorFlow's server, which
optimizes the functions of that graph and runs their kernels. So the same step can give other results

* under another TensorFlow: other kernels, other rewrites by Grappler, other all-reduces;
* under another dapple_tf: it divides the worker's cores among devices, on which the order of sums inside kernels
  depends, and both sides must mean the same by the messages that they exchange.

Nothing of Keras or of the user's Python code runs on a worker: layers, losses and metrics are traced in the client, and
graphs with Python functions are refused (`frontend.py_functions.check_py_functions`). Workers report the versions of
both all the same, for whoever compares logs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import TypeGuard

from dapple_tf.version import VERSION

_REQUIREMENTS = {"dapple_tf": "dapple_tf", "tensorflow": "TensorFlow"}
"""What must be the same on both sides, by its name in messages and for users."""


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Returns the versions that this process runs with; imports TensorFlow.

    TensorFlow's includes the commit that it was built from: a build of one's own may have the number of a release.
    """
    import tensorflow as tf  # heavy, and a description of a cluster doesn't need it

    return {
        "dapple_tf": VERSION,
        "tensorflow": f"{tf.version.VERSION} ({tf.version.GIT_VERSION})",
        "keras": importlib.metadata.version("keras"),
        "python": platform.python_version(),
    }


def version_difference(theirs: Mapping[str, str]) -> str | None:
    """Returns an error's text if results could differ between these versions and this process's.

    Args:
        theirs: a worker's versions.
    """
    own = own_versions()
    unlike = {name: told for name, told in _REQUIREMENTS.items() if theirs[name] != own[name]}
    if not unlike:
        return None
    differences = " and ".join(
        f"{told} {theirs[name]} where this process has {own[name]}" for name, told in unlike.items()
    )
    requirements = " ".join(f"{name}=={own[name].partition(' ')[0]}" for name in unlike)
    return (
        f"has {differences}: steps on it can give other results. Use the same versions on both, such as by "
        f"`pip install {requirements}` there, and start the worker again"
    )


def are_versions(value: object) -> TypeGuard[Mapping[str, str]]:
    """Returns whether a message's value has the versions that are compared."""
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in _REQUIREMENTS)
