"""Programs with flags of their own: one process can import several of them, and run them with any arguments.

A program puts its flags into a `flags.FlagValues` of its own and ends with::

    if __name__ == "__main__":
        command.start(main, FLAGS)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

import dapple_tf as dapple
from dapple_tf.common.program import run_program
from dapple_tf.errors import reason
from dapple_tf.models.sources import ModelError

USER_ERRORS = (
    app.UsageError,
    dapple.DappleError,
    dapple.ClusterError,
    dapple.PassError,
    dapple.PlanError,
    dapple.ProfileError,
    ModelError,
    OSError,
)
"""Users' mistakes, and failures that a message explains: shown without a traceback."""

INSTALLED = pathlib.Path(__file__).resolve().parents[1] == pathlib.Path(dapple.__file__).resolve().parent
"""Whether this is an installed package; in a checkout `dapple_tf/tools` is a link to `tools`."""

CONSOLE = {
    "dump_graph": "dapple-dump",
    "keys": "dapple-keys",
    "launch": "dapple-launch",
    "plan": "dapple-plan",
    "profile": "dapple-profile",
    "simulate": "dapple-simulate",
    "train": "dapple-train",
    "what_if": "dapple-what-if",
}
"""Programs that installing this package makes console commands of, as setup.py lists them."""

GROUPS = {
    "model and data": "model dataset length mixed_precision seed data_on_workers",
    "cluster": "cluster workers_per_server speed intra_bandwidth inter_bandwidth intra_latency inter_latency",
    "plan": "plan profile profile_batch_size global_batch_size micro_batches schedule schedule_modules compare "
    "recompute jit_compile all_reduce reduce_early next_forward reverse_first_k only placement optimizer_shards "
    "row_shards by_trial",
    "measuring": "measure batch_size device repeats cache profile_step benchmark_steps",
    "training": "epochs steps learning_rate validation_steps checkpoint_dir checkpoint_every resume faults verify",
    "output": "output text_output text_batch_size output_dir log_dir save_profile save_cluster check timeline width "
    "port browser",
}
"""What ``--help`` calls groups of flags -> their names."""


def start(main: Callable[[], None], values: flags.FlagValues) -> NoReturn:
    """Runs a program with this process's arguments, and ends the process with its exit code.

    Args:
        main: the program; its flags have their values when it is called.
        values: its flags.
    """
    publish(values, flags.FLAGS)

    @functools.wraps(main)
    def parsed(argv: Sequence[str]) -> int:
        values.mark_as_parsed()
        if not flags.FLAGS["verbosity"].present:  # TensorFlow has made absl talkative.
            logging.set_verbosity(logging.WARNING)
        return _guarded(main, argv)

    run_program(parsed, groups(values))


def groups(values: flags.FlagValues) -> dict[str, list[flags.Flag[Any]]]:
    """Returns a program's flags by their groups."""
    named = {title: [values[name] for name in names.split() if name in values] for title, names in GROUPS.items()}
    others = [flag for flag in _own(values) if not any(flag in group for group in named.values())]
    return {title: group for title, group in {**named, "others": others}.items() if group}


def publish(values: flags.FlagValues, into: flags.FlagValues) -> None:
    """Makes a program's flags the process's, replacing flags of the same names."""
    for flag in _own(values):
        if flag.name in into:  # absl's --log_dir, for files that nothing here writes
            delattr(into, flag.name)
        into[flag.name] = flag


def _own(values: flags.FlagValues) -> list[flags.Flag[Any]]:
    """A program's flags, but for --flagfile and --undefok, which all have."""
    own = {id(values[name]): values[name] for name in values if name not in flags.FlagValues()}
    return list(own.values())


def line(program: str) -> list[str]:
    """Returns the words that start a program of this package: a console command, or a module of a checkout."""
    if not INSTALLED:
        return ["python", "-m", f"tools.{program}"]
    if program in CONSOLE:
        return [CONSOLE[program]]
    return ["python", "-m", f"dapple_tf.tools.{program}"]


def used(values: flags.FlagValues, program: str) -> str:
    """Returns the command that runs a program of this package, as in `line`, with the flags that were given."""
    return " ".join([*line(program), *(flag.serialize() for flag in _own(values) if flag.present)])


def run(main: Callable[[], None], values: flags.FlagValues, arguments: Sequence[str]) -> int:
    """Runs a program in this process, with these arguments; returns its exit code, 1 after a user's mistake."""
    values.unparse_flags()
    try:
        left = values([sys.argv[0], *arguments])
    except flags.Error as error:
        say(f"error: {error}")
        return 1
    try:
        return _guarded(main, left)
    except SystemExit as ended:
        return int(ended.code or 0)


def say(text: str, since: float | None = None) -> None:
    """Writes a line to standard error.

    Args:
        text: the line.
        since: a time of ``time.monotonic``; the seconds since then precede the text.
    """
    sys.stderr.write(f"{text}\n" if since is None else f"[{time.monotonic() - since:.0f} s] {text}\n")
    sys.stderr.flush()


def fresh_folder(wanted: pathlib.Path) -> pathlib.Path:
    """Makes ``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that doesn't exist yet."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in itertools.chain([wanted], numbered) if not path.exists())
    folder.mkdir(parents=True)
    return folder


def check(condition: bool, message: str) -> None:
    """Raises an error about a user's request unless a condition holds.

    Raises:
        app.UsageError: the condition doesn't hold.
    """
    if not condition:
        raise app.UsageError(message)


def check_choices(flag: flags.FlagHolder[list[str]], known: Iterable[str], *, empty: bool = False) -> None:
    """Checks that a flag that is a list has known values only.

    Args:
        flag: the flag.
        known: values that are allowed.
        empty: whether the list may be empty.

    Raises:
        app.UsageError: it has another value, or none.
    """
    choices = list(known)
    unknown = sorted(set(flag.value) - set(choices))
    check(
        not unknown and bool(flag.value or empty),
        f"--{flag.name}: unknown {', '.join(unknown) or 'nothing'}; choose from {', '.join(choices)}",
    )


@contextlib.contextmanager
def blamed(flag: str) -> Iterator[None]:
    """Makes the errors of a ``with`` block name a flag.

    Raises:
        app.UsageError: in place of a user's error.
    """
    try:
        yield
    except app.UsageError:
        raise
    except USER_ERRORS as error:
        _, _, value = flag.partition("=")
        text = _text(error)
        if value and text.startswith((f"{value}:", f"{value} ")):  # Usually the name of a file.
            text = text[len(value) + 1 :].lstrip()
        raise app.UsageError(f"{flag}: {text}") from error


def _guarded(main: Callable[[], None], argv: Sequence[str]) -> int:
    try:
        check(len(argv) == 1, f"unexpected arguments: {' '.join(argv[1:])}; everything is given by flags, see --help")
        main()
    except USER_ERRORS as error:
        say(f"error: {_text(error)}")
        return 1
    except KeyboardInterrupt:
        say("error: interrupted")
        return 130
    return 0


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or reason(error)
