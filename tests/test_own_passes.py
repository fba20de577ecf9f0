"""Passes of a user's own: where they run, that they are treated as the others are, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from models_for_tests import classifier, samples, transform, values
from programs import (
    DOUBLE,
    FLOAT,
    apply,
    connected,
    copied,
    layout,
    replicated,
    show_changes,
    two_layers,
    two_stages,
)

import dapple_tf as dapple
from dapple_tf.execution.step_passes import PASSES, pipeline
from dapple_tf.operators.op_costs import OperatorCosts
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Ref, dtype_attr, reroute
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.text import graph_text
from graph_passes.pass_manager import After, Before, Pass, run_passes
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition
from graph_passes.passes.split_concat import SplitConcat

ROOT = pathlib.Path(__file__).parents[1]
X, Y, _ = samples(7)


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


# ---- places


def test_own_passes_stand_before_and_after_those_that_they_name_in_the_order_given() -> None:
    first, second, last, early = (Looks(name=name) for name in ("first", "second", "last", "early"))
    order = pipeline(
        [
            After("split_concat", first),
            After("split_concat", second),
            Before("accumulate", last),
            Before("replicate", early),
        ]
    )
    names = [item.name for item in order.placed([SplitConcat()])]
    assert names == ["split_concat", "first", "second"]
    assert {own.name: order.number(own) for own in (early, first, second, last)} == {
        "early": 5,
        "first": 9,
        "second": 10,
        "last": 11,
    }


def test_numbers_are_places_and_operators_are_placed_instead_of_joining_a_step() -> None:
    numbers = {slot.name: pipeline().number(Looks(name=slot.name)) for slot in PASSES}
    assert numbers == {
        **dict(zip((slot.name for slot in PASSES[:13]), range(1, 14), strict=True)),
        "join": 14,
        **dict(zip((slot.name for slot in PASSES[14:]), range(14, 19), strict=True)),
    }
    assert pipeline().count == 18


def test_what_comes_before_a_pass_that_runs_again_does_not() -> None:
    order = pipeline([Before("partition", Looks(name="before")), After("partition", Looks(name="after"))])
    assert [item.name for item in order.placed([Partition()])] == ["before", "partition", "after"]
    assert [item.name for item in order.placed([Partition()], again=True)] == ["partition", "after"]


@pytest.mark.parametrize(
    ("passes", "kind", "text"),
    [
        (
            [After("split", Looks())],
            PassError,
            r"After\('split', ...\) names no pass; use one of assign_stages, .*, join,",
        ),
        ([Before("update", object())], PassError, r"isn't a pass: give an object that has a name and run\(program\)"),
        (
            [After("update", Looks(name="join"))],
            PassError,
            "there is a pass 'join' already; give yours a name of its own",
        ),
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


def test_own_passes_run_where_operators_are_placed() -> None:
    looks = Looks()
    cluster, own = dapple.Cluster.local(2, kind="cpu"), dapple.Plan.by_operators(2, 7)
    passes = [After("flatten", looks)]
    pipelined = dapple.transform(classifier(), cluster, own, operator_costs=OperatorCosts(), passes=passes)
    pipelined.train_on_batch(X, Y)
    (flat,) = looks.seen
    assert flat.own_step.dissolved and not flat.own_step.placed_on
    pipelined.close()


def test_the_twin_that_verifies_has_them_too() -> None:
    looks = Looks()
    pipelined = transform(classifier(), passes=[After("update", looks)])
    pipelined.verify(X, Y, steps=1, float64=True)
    assert {variable.dtype for program in looks.seen for variable in program.roles.variables} >= {FLOAT, DOUBLE}
    pipelined.close()


def test_a_pass_that_changes_nothing_trains_as_without_it() -> None:
    trained = []
    for passes in ([], [Before("schedule", Looks())]):
        model = classifier()
        model.set_weights([np.linspace(-1, 1, weight.size).reshape(weight.shape) for weight in model.get_weights()])
        pipelined = transform(model, passes=passes)
        pipelined.train_on_batch(X, Y)
        pipelined.close()
        trained.append(values(model))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- what is checked


def test_a_pass_that_breaks_the_step_is_named() -> None:
    pipelined = transform(classifier(), passes=[After("split_concat", Does(broken))])
    text = (
        r"^pass does \(after replicate, split_concat\): node 'broken' \(Identity\) reads nowhere, but there is no node"
    )
    with pytest.raises(PassError, match=text):
        pipelined.train_on_batch(X, Y)
    pipelined.close()


STAGES: tuple[Pass, ...] = (AssignStages(("a",)), BuildForward(), BuildBackward(), Partition())


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (
            Does(lambda program: None),
            "pass does: run() returned None; let it return the new program, program.replace(graph=graph)",
        ),
        (
            Does(lambda program: program.graph),
            "pass does: run() returned an object of type GraphDef; let it return the new program, "
            "program.replace(graph=graph)",
        ),
        (
            Does(lambda program: program, requires=("COMPLETE",)),  # type: ignore[arg-type]
            "pass does: its requires is ('COMPLETE',); give a tuple of facts, such as (Fact.COMPLETE,)",
        ),
        (
            Does(lambda program: program, ensures=Fact.COMPLETE),  # type: ignore[arg-type]
            "pass does: its ensures is <Fact.COMPLETE: 'a complete training step'>; give a tuple of facts, such as "
            "(Fact.COMPLETE,)",
        ),
        (
            Does(lambda program: program, requires=(Fact.CONNECTED,)),
            "pass does: it requires a step whose tasks are connected over stages; run it after split_concat",
        ),
        (
            Does(lambda program: program, ensures=(Fact.STAGES,)),
            "pass does: it ensures stages; what it returns isn't that: its stages are empty",
        ),
    ],
)
def test_what_a_pass_is_given_and_gives_is_checked(item: Pass, text: str) -> None:
    with pytest.raises(PassError) as caught:
        run_passes(two_layers(), [item])
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("fact", "lack"),
    [
        (Fact.GRAPHS, "its stages are empty"),
        (Fact.STEP, "its step is None"),
        (Fact.COMPLETE, "its step is None"),
    ],
)
def test_what_is_missing_of_what_a_pass_ensures_is_said(fact: Fact, lack: str) -> None:
    with pytest.raises(PassError, match=f"what it returns isn't that: {re.escape(lack)}$"):
        run_passes(two_layers(), [Does(lambda program: program, ensures=(fact,))])


@pytest.mark.parametrize(
    ("program", "fact", "lack"),
    [
        (apply(two_layers(), AssignStages(("a",))), Fact.GRAPHS, "stages[0].graph is None"),
        (two_stages(), Fact.STEP, "its step is None"),
        (replicated(two_stages(), layout([1, 1], 2)), Fact.CONNECTED, "step.pending has "),
        (connected(two_stages(), layout([1, 1], 2)), Fact.ORDERED, "step.schedule is None"),
        (connected(two_stages(), layout([1, 1], 2)), Fact.COMPLETE, "step.train is None"),
    ],
    ids=["graphs", "step", "connected", "ordered", "complete"],
)
def test_what_a_program_lacks_is_said(program: Program, fact: Fact, lack: str) -> None:
    with pytest.raises(PassError) as caught:
        run_passes(program, [Does(lambda program: program, ensures=(fact,))])
    assert f"what it returns isn't that: {lack}" in str(caught.value)


def test_an_exception_in_a_pass_names_the_pass() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_passes(two_layers(), [Looks(), Does(lambda program: 1 // 0)])
    assert caught.value.__notes__ == ["in pass does (after looks)"]


def test_every_pass_says_what_it_requires_and_ensures_and_each_fact_has_its_maker() -> None:
    for slot in PASSES:
        assert isinstance(slot.pass_type.requires, tuple) and slot.pass_type.ensures  # type: ignore[attr-defined]
    makers = {fact.made_by: fact for fact in Fact}
    kinds = {slot.name: slot.pass_type for slot in PASSES}
    assert all(fact in kinds[name].ensures for name, fact in makers.items())  # type: ignore[attr-defined]
    facts = two_layers().facts
    assert not facts
    for item in STAGES:
        facts = run_passes(two_layers(), STAGES[: STAGES.index(item) + 1]).facts
    assert facts == {Fact.STAGES, Fact.GRAPHS, Fact.FUNCTIONS}


@pytest.mark.parametrize(
    "passes", [[BuildBackward()], [Partition()], [SplitConcat()]], ids=lambda passes: passes[0].name
)
def test_built_in_passes_are_told_what_they_lack(passes: list[Pass]) -> None:
    with pytest.raises(PassError, match=f"pass {passes[0].name}: it requires .*; run it after"):
        run_passes(two_layers(), passes)


def test_programs_and_stages_tell_what_they_lack() -> None:
    program = apply(two_layers(), AssignStages(("a",)))
    for ask, text in (
        (lambda: program.own_step, "the program has no step yet; run replicate before"),
        (lambda: program.stages[1].own_graph, "stage 1 has no graph yet; run build_forward before"),
        (lambda: program.stages[1].own_backward, "stage 1 has no function B"),
    ):
        with pytest.raises(PassError, match=text):
            ask()


def test_something_is_put_behind_a_tensor() -> None:
    graph = copied(two_layers()).graph
    before = graph_text(graph)
    double = {"T": dtype_attr(2)}
    reroute(graph, {Ref("a/tanh"): Builder(graph).add("negated", "Neg", [Ref("a/tanh")], **double)})
    assert show_changes(before, graph_text(graph)) == (
        "- b/matmul = MatMul(a/tanh, v)\n+ b/matmul = MatMul(negated, v)\n+ negated = Neg(a/tanh)\n"
    )


def test_a_chain_is_put_behind_a_tensor() -> None:
    graph = copied(two_layers()).graph
    before = graph_text(graph)
    builder, double = Builder(graph), {"T": dtype_attr(2)}
    negated = builder.add("negated", "Neg", [Ref("a/tanh")], **double)
    back = builder.add("back", "AddV2", [builder.add("again", "Neg", [negated], **double), Ref("a/tanh")], **double)
    reroute(graph, {Ref("a/tanh"): back})
    assert show_changes(before, graph_text(graph)) == (
        "- b/matmul = MatMul(a/tanh, v)\n+ b/matmul = MatMul(back, v)\n"
        "+ negated = Neg(a/tanh)\n+ again = Neg(negated)\n+ back = AddV2(again, a/tanh)\n"
    )


# ---- documents


def test_the_table_of_passes_is_the_pipeline() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [
        (pipeline().number(Looks(name=slot.name)), slot.name) for slot in PASSES
    ]


def test_the_documented_pass_is_that_of_the_example() -> None:
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n", text, flags=re.DOTALL | re.MULTILINE)
    (documented,) = (block for block in blocks if "class CompressGradients" in block)
    imports, _, definition = documented.strip().partition("\n\n\n")
    example = (ROOT / "docs/examples/bfloat16_gradients.py").read_text(encoding="utf-8")
    assert definition in example
    for line in filter(None, imports.replace("import ClassVar", "import Any, ClassVar").splitlines()):
        assert line in example
