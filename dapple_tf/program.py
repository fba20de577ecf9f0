"""How programs of this package start."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags

_HELP = frozenset({"help", "helpshort", "helpfull", "helpxml", "?"})


def run_program(main: Callable[[list[str]], Any]) -> NoReturn:
    """Parses the command line, calls ``main`` with the remaining arguments, and exits.

    ``--help`` shows the flags of ``main``'s module, even if a console command imported it, and exits with 0.
    """
    for flag in flags.FLAGS.flags_by_module_dict().get(main.__module__, ()):
        flags.FLAGS.register_flag_by_module(sys.argv[0], flag)
    try:
        app.run(main)
    except SystemExit as ended:
        own = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
        if _HELP & {word.lstrip("-") for word in own if word.startswith("-")}:
            raise SystemExit(0) from ended  # absl ends with 1.
        raise
    raise AssertionError("app.run doesn't return")
