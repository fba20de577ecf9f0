"""The errors that users meet."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class DappleError(Exception):
    """Base of this package's own errors."""


class CaptureError(DappleError):
    """The model can't be captured as it is; the text names the layer or setting and the fix."""


class ClusterError(ValueError):
    """A cluster isn't available on this machine, or its description is wrong."""


class PortTakenError(ClusterError):
    """Another process has the port at which a server was to start, or another server of the cluster."""


class UnusableWorkersError(ClusterError):
    """Workers answer, but some can't be used: the others don't reach them, or they lack devices.

    Attributes:
        tasks: numbers of the workers to do without.
    """

    def __init__(self, text: str, tasks: Iterable[int]) -> None:
        super().__init__(text)
        self.tasks = tuple(tasks)


class DataError(DappleError):
    """A batch doesn't fit the model or the plan; the text names the input and both shapes."""


class NonFiniteLossError(DappleError):
    """The loss is no longer a finite number; the text names the step."""


class StepError(DappleError):
    """A device failed in the middle of a step; the text says why, as far as known."""


class WorkerLostError(DappleError):
    """A worker is lost: killed, hung, or cut off the network.

    Attributes:
        task: the worker's number; None if a run hangs for an unknown reason.
        address: the worker's address.
        out_of_memory: whether the worker's kernel killed its process for lack of memory, as far as is known.
    """

    def __init__(self, text: str, task: int | None = None, address: str = "", out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.task, self.address, self.out_of_memory = task, address, out_of_memory

    def anew(self, text: str = "") -> WorkerLostError:
        """Returns the same error, perhaps with another text, without its traceback.

        That holds frames and all that they use: batches, say.
        """
        return WorkerLostError(text or str(self), self.task, self.address, self.out_of_memory)


class VerificationError(DappleError):
    """A pipeline differs from plain Keras without a known reason; the text is the table of what differs."""


def meant(name: str, names: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` if one of the names is close to a wrong one, else an empty text."""
    close = difflib.get_close_matches(name, sorted(names), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_names(function: str, given: Iterable[str], names: Collection[str]) -> None:
    """Checks the names of a function's arguments.

    Raises:
        TypeError: one is unknown; the text says which one is close to it.
    """
    for name in given:
        if name not in names:
            raise TypeError(f"{function}() has no argument {name!r}{meant(name, names)}")


def names_checked(*others: str) -> Callable[[_Function], _Function]:
    """Returns a decorator that gives a function the errors of `check_names`.

    Args:
        others: names that the function takes by ``**``.
    """

    def decorated(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        names = {*others, *(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            check_names(function.__qualname__, kwargs, names)
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorated


def printable(text: str) -> str:
    """Returns a text from elsewhere with whatever a terminal would obey escaped: lines, colours, directions."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def reason(error: BaseException) -> str:
    """Returns an error's message in one printable line, without the text that Keras and TensorFlow add around it."""
    missing = isinstance(error, KeyError) and error.args  # whose str() is the repr of its text
    text = re.sub(r"\x1b\[\d*m", "", str(error.args[0] if missing else getattr(error, "message", error)))
    text = re.sub(r"\{\{\w+ \S*\}\} ?|\[\[\{\{.*?\}\}\]\]| ?\[Op:\w+\]( name:)?", "", text)
    lines = [line.strip() for line in text.splitlines()]
    if lines and lines[0] == "in user code:":  # AutoGraph's frames follow, then the error
        lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b.*: ", line)] or lines[1:]
    frame = (
        r"(Unable to automatically build|Could not automatically infer|Exception encountered|Graph execution error"
        r"|Detected at node|Node:|File \".*\", line \d+, in |\d+ root error|([A-Z_]+: )?From /job:\S+:$|=+$)"
    )
    said = [line for line in lines if line and not re.match(frame, line)]
    if not said:
        return type(error).__name__
    return ("KeyError: " if missing else "") + printable(re.sub(r"^\(\d+\) ?", "", said[0]))
