"""Passes in order, a user's own among them, with the verifier and instruments between them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from google.protobuf import text_format
from models_for_tests import classifier, samples, transform
from programs import (
    HOST,
    apply,
    connected,
    copied,
    layout,
    owners,
    replicated,
    staged,
    two_layers,
    two_stages,
    unchanged,
)

from dapple_tf.execution.step_passes import PASSES, pipeline
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import Fact, Program
from graph_passes.pass_manager import After, Before, Dump, Pass, Timing, run_passes
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat

ROOT = pathlib.Path(__file__).parents[1]
X, Y, _ = samples(7)
LAYOUT = layout([1, 1], 2)
STAGES: tuple[Pass, ...] = (AssignStages(("a",)), BuildForward(), BuildBackward(), Partition())


@dataclasses.dataclass(frozen=True)
class Looks:
    """Changes nothing; notes what it is given."""

    seen: list[Program] = dataclasses.field(default_factory=list)
    name: str = "looks"

    def run(self, program: Program) -> Program:
        self.seen.append(program)
        return program


@dataclasses.dataclass(frozen=True)
class Does:
    """Does as it is told."""

    change: Callable[[Program], Any]
    requires: tuple[Fact, ...] = ()
    ensures: tuple[Fact, ...] = ()
    name: ClassVar[str] = "does"

    def run(self, program: Program) -> Any:
        return self.change(program)


def broken(program: Program) -> Program:
    changed = copied(program)
    changed.graph.node.add(name="broken", op="Identity", input=["nowhere"])
    return changed


def fails(program: Program) -> Program:
    raise PassError("it can't")


# ---- running passes


def test_passes_run_one_after_another_and_the_input_stays() -> None:
    program = two_layers()
    seen: list[tuple[int, str, int, bool]] = []

    def note(number: int, item: Pass, program: Program, seconds: float) -> None:
        seen.append((number, item.name, len(program.stages), seconds >= 0))

    with unchanged(program):
        result = run_passes(program, STAGES, instruments=[note], first=3)
    assert result == staged(program, "a")
    assert seen == [(number, item.name, 2, True) for number, item in enumerate(STAGES, start=3)]
    assert run_passes(program, []) is program


BROKEN = "node 'broken' (Identity) reads nowhere, but there is no node 'nowhere'"
LACKS = "what it returns isn't that:"


def claims(**facts: Any) -> Does:
    """A pass that changes nothing, whatever it says of itself."""
    return Does(lambda program: program, **facts)


@pytest.mark.parametrize(
    ("program", "passes", "text"),
    [
        (two_layers(), [*STAGES[:2], Does(fails)], "pass does (after assign_stages, build_forward): it can't"),
        (two_layers(), [AssignStages(("c",))], "pass assign_stages: cut 'c' names no layer of the model"),
        (two_layers(), [STAGES[0], Does(broken)], f"pass does (after assign_stages): {BROKEN}"),
        (two_layers(), [Does(lambda program: None)], "pass does: run() returned None; let it return the new program"),
        (two_layers(), [Does(lambda program: program.graph)], "returned an object of type GraphDef; let it return"),
        (two_layers(), [claims(requires=("COMPLETE",))], "its requires is ('COMPLETE',); give a tuple of facts"),
        (two_layers(), [claims(ensures=Fact.STEP)], "its ensures is <Fact.STEP"),
        (two_layers(), [claims(requires=(Fact.CONNECTED,))], "connected over stages; run it after split_concat"),
        (two_layers(), [claims(ensures=(Fact.STAGES,))], f"it ensures stages; {LACKS} its stages are empty"),
        (two_layers(), [STAGES[0], claims(ensures=(Fact.GRAPHS,))], f"{LACKS} stages[0].graph is None"),
        (two_stages(), [claims(ensures=(Fact.STEP,))], f"{LACKS} its step is None"),
        (replicated(two_stages(), LAYOUT), [claims(ensures=(Fact.CONNECTED,))], f"{LACKS} step.pending has "),
        (connected(two_stages(), LAYOUT), [claims(ensures=(Fact.ORDERED,))], f"{LACKS} step.schedule is None"),
        (connected(two_stages(), LAYOUT), [claims(ensures=(Fact.COMPLETE,))], f"{LACKS} step.train is None"),
    ],
)
def test_an_error_names_the_pass_and_those_that_had_run(program: Program, passes: list[Pass], text: str) -> None:
    timing = Timing()
    with pytest.raises(PassError, match=re.escape(text)):
        run_passes(program, passes, instruments=[timing])
    assert list(timing.seconds) == [item.name for item in passes[:-1]]


def parsed(path: pathlib.Path) -> GraphDef:
    return text_format.Parse(path.read_text(), GraphDef())


def test_a_dump_has_the_graph_after_each_pass_and_the_stages_while_they_are_built(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "new" / "folder"
    program = run_passes(two_layers(), STAGES, instruments=[Dump(target)])
    step = Replicate(LAYOUT, HOST, owners(program))
    run_passes(program, [step, SplitConcat()], instruments=[Dump(target)], first=pipeline().number(step))
    assert len([*target.iterdir()]) == 1 + 3 * 3 + 2
    assert parsed(target / "01_assign_stages.pbtxt") == apply(two_layers(), AssignStages(("a",))).graph
    assert parsed(target / "03_build_backward.stage1.pbtxt") == two_stages().stages[1].graph
    functions = parsed(target / "04_partition.stage1.pbtxt").library.function
    assert [function.signature.name for function in functions] == ["stage1_forward", "stage1_backward"]
    step_graph = apply(two_stages(), step).graph
    assert parsed(target / "05_replicate.pbtxt") == step_graph
    assert parsed(target / "05_replicate.pbtxt").library.function


# ---- places


def test_own_passes_stand_before_and_after_those_that_they_name_in_the_order_given() -> None:
    first, second, last, early = (Looks(name=name) for name in ("first", "second", "last", "early"))
    after = [After("split_concat", first), After("split_concat", second)]
    order = pipeline([*after, Before("accumulate", last), Before("replicate", early)])
    assert [item.name for item in order.placed([SplitConcat()])] == ["split_concat", "first", "second"]
    assert [order.number(own) for own in (early, first, second, last)] == [5, 9, 10, 11]


@pytest.mark.parametrize(
    ("passes", "kind", "text"),
    [
        (
            [After("split", Looks())],
            PassError,
            r"After\('split', ...\) names no pass; use one of assign_stages, .*, join",
        ),
        ([Before("update", object())], PassError, r"isn't a pass: give an object that has a name and run\(program\)"),
        ([After("update", Looks(name="join"))], PassError, "there is a pass 'join' already; give yours a name of its"),
        ([After("update", Looks()), Before("update", Looks())], PassError, "there is a pass 'looks' already"),
        ([Looks()], TypeError, r"passes is \[Looks\(.*; give a list such as \[After\('split_concat', MyPass\(\)\)\]"),
        (After("update", Looks()), TypeError, "give a list such as"),
    ],
)
def test_wrong_passes_are_refused_before_anything_is_done(passes: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        transform(classifier(), passes=passes)


# ---- as the others


def test_an_own_pass_is_dumped_timed_and_run_for_each_step(tmp_path: pathlib.Path) -> None:
    looks, staged = Looks(), Looks(name="staged")
    pipelined = transform(classifier(), passes=[After("split_concat", looks), Before("partition", staged)])
    pipelined.train_on_batch(X, Y)
    assert (len(looks.seen), len(staged.seen)) == (1, 1)
    pipelined.train_on_batch(X[:3], Y[:3])  # slices of another size: partition runs again
    assert (len(looks.seen), len(staged.seen)) == (2, 1)
    pipelined.predict_on_batch(X)
    assert (len(looks.seen), len(staged.seen)) == (3, 2)
    assert {"looks", "staged"} <= pipelined._engine.timing.seconds.keys()
    pipelined.compile(optimizer="sgd", loss=classifier().loss)
    pipelined.train_on_batch(X, Y)
    assert (len(looks.seen), len(staged.seen)) == (4, 3)
    pipelined.close()
    pipelined.train_on_batch(X, Y)  # by a new engine, as after a fault
    assert (len(looks.seen), len(staged.seen)) == (5, 4)
    pipelined.dump(tmp_path)
    names = {path.name for path in tmp_path.glob("train*/*.pbtxt")}
    assert {"04_staged.pbtxt", "05_partition.pbtxt", "07_split_concat.pbtxt", "08_looks.pbtxt"} <= names
    assert {"09_accumulate.pbtxt", "11_update.pbtxt"} <= names
    assert "after looks: Changes nothing; notes what it is given." in (tmp_path / "index.html").read_text()
    pipelined.close()


# ---- facts


def test_an_exception_in_a_pass_names_the_pass() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_passes(two_layers(), [Looks(), Does(lambda program: 1 // 0)])
    assert caught.value.__notes__ == ["in pass does (after looks)"]


def test_every_pass_says_what_it_requires_and_ensures_and_each_fact_has_its_maker() -> None:
    for own in PASSES:
        assert isinstance(own.requires, tuple) and own.ensures  # type: ignore[attr-defined]
    makers = {fact.made_by: fact for fact in Fact}
    kinds = {own.name: own for own in PASSES}
    assert all(fact in kinds[name].ensures for name, fact in makers.items())  # type: ignore[attr-defined]
    facts = two_layers().facts
    assert not facts
    for item in STAGES:
        facts = run_passes(two_layers(), STAGES[: STAGES.index(item) + 1]).facts
    assert facts == {Fact.STAGES, Fact.GRAPHS, Fact.FUNCTIONS}


# ---- documents


def test_the_table_of_passes_is_the_pipeline() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (pipeline().number(Looks(name=own.name)), own.name) for own in PASSES
    ]
