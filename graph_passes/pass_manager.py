"""Runs passes in order, with the verifier and instruments between them; the passes know of neither."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from google.protobuf import text_format

from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, copied
from graph_passes.ir.program import Fact, Program, Stage
from graph_passes.ir.storage import merge_library
from graph_passes.ir.text import readable
from graph_passes.ir.verify import verify

logger = logging.getLogger(__name__)


class Pass(Protocol):
    """A frozen dataclass whose fields are its options and whose docstring is its contract.

    It may declare what it needs and what it establishes by ``requires`` and ``ensures``: class attributes, tuples of
    `graph_passes.ir.program.Fact`. Both are checked whenever it runs.
    """

    @property
    def name(self) -> str:
        """The pass's name: that of its file."""

    def run(self, program: Program) -> Program:
        """Returns a new program; the given one stays as it is."""


class After(NamedTuple):
    """A pass of a user's own, right after one of the pipeline.

    Attributes:
        name: of the pass that comes before it.
        item: the pass.
    """

    name: str
    item: Pass


class Before(NamedTuple):
    """A pass of a user's own, right before one of the pipeline.

    Attributes:
        name: of the pass that comes after it.
        item: the pass.
    """

    name: str
    item: Pass


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The order of passes, from which their numbers follow.

    Attributes:
        names: of all passes, in order.
        ending: those of ``names`` that end a step: none after them runs in it.
        own: the user's passes; several at one place run in this order.

    Raises:
        PassError: an own pass is at an unknown place, is no pass, or has the name of another.
    """

    names: tuple[str, ...] = ()
    ending: frozenset[str] = frozenset()
    own: tuple[After | Before, ...] = ()

    def __post_init__(self) -> None:
        taken = set(self.names)
        for place in self.own:
            name = getattr(place.item, "name", None)
            if not isinstance(name, str) or not callable(getattr(place.item, "run", None)):
                raise PassError(f"{place.item!r} isn't a pass: give an object that has a name and run(program)")
            if place.name not in self.names:
                where = f"{type(place).__name__}({place.name!r}, ...)"
                raise PassError(f"{where} names no pass; use one of {', '.join(self.names)}")
            if name in taken:
                raise PassError(f"there is a pass {name!r} already; give yours a name of its own")
            taken.add(name)

    def _around(self, name: str) -> tuple[list[Pass], list[Pass]]:
        """Returns the own passes right before and right after one of the pipeline."""
        here = [place for place in self.own if place.name == name]
        before = [place.item for place in here if isinstance(place, Before)]
        return before, [place.item for place in here if isinstance(place, After)]

    def placed(self, passes: Iterable[Pass], *, again: bool = False) -> list[Pass]:
        """Returns passes of the pipeline with the user's among them.

        Args:
            passes: some of the pipeline's, in order.
            again: whether the first of them has run before, and with it the user's passes before it.
        """
        placed: list[Pass] = []
        for index, item in enumerate(passes):
            before, after = self._around(item.name)
            placed += [*(before if index or not again else ()), item, *after]
        return placed

    def number(self, item: Pass) -> int:
        """Returns the number of a pass from 1, own ones counted; passes after one that ends a step begin at its number.

        A run of passes is numbered from its first one's number on, even if it leaves out others.
        """
        number = 1
        for name in self.names:
            before, after = self._around(name)
            names = [*(own.name for own in before), name, *(own.name for own in after)]
            if item.name in names:
                return number + names.index(item.name)
            number += 0 if name in self.ending else len(names)
        return number

    @property
    def count(self) -> int:
        """The largest number that a pass has."""
        return sum(1 + len([*itertools.chain(*self._around(n))]) for n in self.names if n not in self.ending)


# Called after each pass with its number (from 1), the pass, the program that it returned and the seconds that it took.
Instrument = Callable[[int, Pass, Program, float], None]


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    *,
    instruments: Sequence[Instrument] = (),
    first: int = 1,
    complete: bool = False,
) -> Program:
    """Runs ``passes`` one after another.

    Args:
        program: where to start.
        passes: the passes to run.
        instruments: observers, called after each pass.
        first: number of the first pass, for instruments.
        complete: whether nothing may be pending after the last of these passes.

    Raises:
        PassError: from a pass or the verifier, or a pass isn't given what it requires or doesn't give what it ensures;
            the text names the pass and those that had run.
    """
    done: list[str] = []
    known: Sequence[Stage] = ()
    for number, item in enumerate(passes, start=first):
        start = time.perf_counter()
        ran = f" (after {', '.join(done)})" if done else ""
        try:
            _check_facts(program, item, "requires")
            program = item.run(program)
            if not isinstance(program, Program):
                what = "None" if program is None else f"an object of type {type(program).__name__}"
                raise PassError(f"run() returned {what}; let it return the new program, program.replace(graph=graph)")
            _check_facts(program, item, "ensures")
            verify(program, complete=complete and item is passes[-1], known=known)
            known = program.stages
        except PassError as error:
            raise type(error)(f"pass {item.name}{ran}: {error}") from error
        except Exception as error:
            error.add_note(f"in pass {item.name}{ran}")
            raise
        seconds = time.perf_counter() - start
        logger.debug("pass %02d %s: %.3f s, %d nodes", number, item.name, seconds, len(program.graph.node))
        for instrument in instruments:
            instrument(number, item, program, seconds)
        done.append(item.name)
    return program


def _check_facts(program: Program, item: Pass, says: str) -> None:
    """Checks what a pass ``requires`` or ``ensures``."""
    facts = getattr(item, says, ())
    if not isinstance(facts, tuple) or not all(isinstance(fact, Fact) for fact in facts):
        raise PassError(f"its {says} is {facts!r:.60}; give a tuple of facts, such as (Fact.COMPLETE,)")
    present = program.facts if facts else frozenset()
    for fact in facts:
        if fact not in present:
            lacks = _lack(program, fact)
            what = f"run it after {fact.made_by}" if says == "requires" else f"what it returns isn't that: {lacks}"
            raise PassError(f"it {says} {fact.value}; {what}")


def _lack(program: Program, fact: Fact) -> str:
    """Returns what a program lacks of a fact that it hasn't."""
    step = program.step
    if fact in (Fact.STAGES, Fact.GRAPHS, Fact.FUNCTIONS):
        part = "forward" if fact is Fact.FUNCTIONS else "graph"
        lacking = [stage.index for stage in program.stages if getattr(stage, part) is None]
        return f"stages[{lacking[0]}].{part} is None" if lacking else "its stages are empty"
    if step is None:
        return "its step is None"
    if fact is Fact.ORDERED:
        return "step.schedule is None"
    if fact is Fact.COMPLETE and step.train is None:
        return "step.train is None"
    task, value = min(step.pending, key=lambda argument: argument[1].ref == program.roles.loss)
    return f"step.pending has {len(step.pending)} arguments, among them {value} of task {task}"


class Timing:
    """An instrument that keeps the seconds of each pass, and of other parts.

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
        """Times something within it that isn't a pass."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def stage_graphs(program: Program) -> dict[int, GraphDef]:
    """Returns the graphs of stages while they are being built, with the functions that have been made of them."""
    graphs = {}
    for stage in program.stages:
        if program.step is None and stage.graph is not None:
            graphs[stage.index] = copied(stage.graph)
            merge_library(graphs[stage.index], [part.function for part in stage.functions])
    return graphs


class Dumped(NamedTuple):
    """A graph that was written.

    Attributes:
        file: its path.
        what: the pass that it was written after, with its summary, or its stage.
        nodes: number of nodes of its top level.
        functions: number of functions in its library.
    """

    file: pathlib.Path
    what: str
    nodes: int
    functions: int


class Dump:
    """An instrument that writes the graph after each pass: ``03_build_backward.pbtxt``, for any GraphDef viewer.

    Attributes:
        directory: the folder to write to.
        written: the graphs written so far.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.written: list[Dumped] = []

    def __call__(self, number: int, item: Pass, program: Program, seconds: float) -> None:
        """Writes the graph of the program, and its stages' graphs while they are built."""
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
