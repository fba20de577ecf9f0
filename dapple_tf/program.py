"""How programs of this package start."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags

from dapple_tf.version import VERSION

_HELP = frozenset({"h", "help", "helpshort", "helpfull", "helpxml", "?"})


class _VersionFlag(flags.BooleanFlag):
    """Flag that prints the version and ends the process, as absl's --help does."""

    def __init__(self) -> None:
        super().__init__("version", False, "show the version", allow_hide_cpp=True)

    def parse(self, arg: Any) -> None:
        if self._parse(arg):
            sys.stdout.write(f"dapple_tf {VERSION}\n")
            raise SystemExit(0)


def run_program(main: Callable[[list[str]], Any]) -> NoReturn:
    """Parses the command line, calls ``main`` with the remaining arguments, and exits.

    ``--help`` shows the docstring and the flags of ``main``'s module, even if a console command imported it, and exits
    with 0. A mistake in the command line is one line on standard error, and exits with 1.
    """
    app.define_help_flags()
    if "version" not in flags.FLAGS:
        flags.DEFINE_alias("h", "help")
        flags.DEFINE_flag(_VersionFlag())
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__  # absl shows this module's.
    for flag in flags.FLAGS.flags_by_module_dict().get(main.__module__, ()):
        flags.FLAGS.register_flag_by_module(sys.argv[0], flag)
    try:
        app.run(lambda argv: _in_one_line(main, argv), flags_parser=lambda argv: _in_one_line(flags.FLAGS, argv))
    except SystemExit as ended:
        own = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
        if _HELP & {word.lstrip("-") for word in own if word.startswith("-")}:
            raise SystemExit(0) from ended  # absl ends with 1.
        raise
    raise AssertionError("app.run doesn't return")


def _in_one_line(function: Callable[[list[str]], Any], argv: list[str]) -> Any:
    """Calls a function; ends the process with a message where the command line is wrong."""
    try:
        return function(argv)
    except (app.UsageError, flags.Error) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from error
