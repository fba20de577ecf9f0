"""Runs passes in order, with the verifier and instruments between them; the passes know of neither."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from google.protobuf import text_format

from graph_passes.ir.graph import GraphDef, PassError, copied
from graph_passes.ir.program import Program, Stage
from graph_passes.ir.readable import readable
from graph_passes.ir.storage import merge_library
from graph_passes.ir.verify import verify

logger = logging.getLogger(__name__)


class Pass(Protocol):
    """A frozen dataclass whose fields are its options and whose docstring is its contract."""

    @property
    def name(self) -> str:
        """The pass's name: that of its file."""

    def run(self, program: Program) -> Program:
        """A new program; the given one stays as it is."""


# Called after each pass with its number (from 1), the pass, the program that it returned and the seconds that it took.
Instrument = Callable[[int, Pass, Program, float], None]


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    *,
    instruments: Sequence[Instrument] = (),
    first: int = 1,
    verified: bool = True,
    complete: bool = False,
) -> Program:
    """Runs ``passes`` one after another.

    Args:
        program: where to start.
        passes: what to run.
        instruments: what looks on.
        first: number of the first pass, for instruments.
        verified: whether to check the invariants after each pass.
        complete: whether nothing may be pending after the last of these passes.

    Raises:
        PassError: from a pass or the verifier; it names the pass and those that had run.
    """
    done: list[str] = []
    known: Sequence[Stage] = ()
    for number, item in enumerate(passes, start=first):
        start = time.perf_counter()
        try:
            program = item.run(program)
            if verified:
                verify(program, complete=complete and item is passes[-1], known=known)
                known = program.stages
        except PassError as error:
            ran = f" (after {', '.join(done)})" if done else ""
            raise type(error)(f"pass {item.name}{ran}: {error}") from error
        seconds = time.perf_counter() - start
        logger.debug("pass %02d %s: %.3f s, %d nodes", number, item.name, seconds, len(program.graph.node))
        for instrument in instruments:
            instrument(number, item, program, seconds)
        done.append(item.name)
    return program


class Timing:
    """An instrument that keeps the seconds of each pass, and of what else there is to time.

    Attributes:
        seconds: name of the pass or part -> seconds, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, number: int, item: Pass, program: Program, seconds: float) -> None:
        """Adds one pass."""
        self._add(item.name, seconds)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within it, time passes for something that isn't a pass."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def stage_graphs(program: Program) -> dict[int, GraphDef]:
    """The graphs of stages while they are being built, with the functions that have been made of them."""
    found = {}
    for stage in program.stages:
        if program.step is None and stage.graph is not None:
            found[stage.index] = copied(stage.graph)
            merge_library(found[stage.index], [part.function for part in stage.functions])
    return found


class Dumped(NamedTuple):
    """A graph that was written.

    Attributes:
        file: where to.
        what: the pass after which it is like that, and what that does; of which stage it is.
        nodes: of its top level.
        functions: in its library.
    """

    file: pathlib.Path
    what: str
    nodes: int
    functions: int


class Dump:
    """An instrument that writes the graph after each pass: ``03_build_backward.pbtxt``, for any GraphDef viewer.

    Attributes:
        directory: where to.
        written: what has been written so far.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.written: list[Dumped] = []

    def __call__(self, number: int, item: Pass, program: Program, seconds: float) -> None:
        """Writes the graph of the program, and those of its stages while they are being built."""
        stem = f"{number:02d}_{item.name}"
        summary = (type(item).__doc__ or "").strip().partition("\n")[0]
        self.graph(stem, program.graph, f"after {item.name}: {summary}")
        for index, graph in stage_graphs(program).items():
            self.graph(f"{stem}.stage{index}", graph, f"stage {index} after {item.name}")

    def graph(self, stem: str, graph: GraphDef, what: str = "") -> None:
        """Writes one graph as ``stem.pbtxt``."""
        path = self.directory / f"{stem}.pbtxt"
        path.write_text(text_format.MessageToString(readable(graph)), encoding="utf-8")
        self.written.append(Dumped(path, what, len(graph.node), len(graph.library.function)))
