"""How programs of this package start."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from absl import app, flags

from dapple_tf.version import VERSION

_COMMON = "--flagfile=FILE reads flags from a file, one in each line; --version shows the version.\n"


def run_program(
    main: Callable[[list[str]], Any], groups: Mapping[str, Iterable[flags.Flag[Any]]] | None = None
) -> NoReturn:
    """Parses the command line, calls ``main`` with the remaining arguments, and exits.

    ``--help`` shows the docstring of ``main``'s module, even if a console command imported it, and the flags. A mistake
    in the command line is one line on standard error, and exits with 1.

    Args:
        main: the program.
        groups: its flags by the groups that ``--help`` shows; None is one group, the flags that ``main``'s module
            defines.
    """
    own = set(itertools.takewhile(lambda word: word != "--", sys.argv[1:]))
    if own & {"-h", "--help"}:
        module = sys.argv[0] if main.__module__ == "__main__" else main.__module__  # absl's name of it
        sys.stdout.write(f"{sys.modules[main.__module__].__doc__ or ''}")
        for title, group in (groups or {"flags": flags.FLAGS.get_flags_for_module(module)}).items():
            sys.stdout.write(f"\n{title}:\n" + "".join(map(_described, sorted(group, key=_optional))))
        sys.stdout.write(f"\n{_COMMON}")
        raise SystemExit(0)
    if "--version" in own:
        sys.stdout.write(f"dapple_tf {VERSION}\n")
        raise SystemExit(0)
    app.run(lambda argv: _in_one_line(main, argv), flags_parser=lambda argv: _in_one_line(flags.FLAGS, argv))
    raise AssertionError("app.run doesn't return")


def _optional(flag: flags.Flag[Any]) -> bool:
    return not str(flag.help).startswith("Required")


def _described(flag: flags.Flag[Any]) -> str:
    """A flag's lines: name, meaning and default."""
    name = f"[no]{flag.name}" if flag.boolean else flag.name
    text = f"--{name}: {flag.help}"
    if flag.default is not None and flag.default is not False:
        text += " (default: " + flag.default_as_str.strip("'") + ")"
    return flags.text_wrap(text, indent="      ", firstline_indent="  ") + "\n"


def _in_one_line(function: Callable[[list[str]], Any], argv: list[str]) -> Any:
    """Calls a function; ends the process with a message where the command line is wrong."""
    try:
        return function(argv)
    except (app.UsageError, flags.Error) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from error
