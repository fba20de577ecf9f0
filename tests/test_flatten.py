"""Pass 13: calls are inlined, and what they ordered stays in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from flat_programs import Steps, assert_same_training
from programs import FLOAT, HOST, apply, layout, node, staged, stateful_layers, step_of, updated
from step_programs import Case, complete, plan

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import CALL_ATTR, LAYER_ATTR, Builder, Graph, GraphDef, Ref, control_inputs, make_node
from graph_passes.ir.outline import call_node, outline, placeholder
from graph_passes.ir.program import Layout, Program, Roles, Slice, Step
from graph_passes.ir.storage import assign, merge_library, read
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import graph_text, library_text
from graph_passes.ir.verify import verify
from graph_passes.passes.flatten import Flatten

ONE_DEVICE = Case("mlp", plan("mlp", 1, [[0]], 1, 4, "gpipe"))
PIPELINE = Case("mlp", plan("mlp", 3, [[0], [1], [2]], 3, 6, "dapple_a"))


def calls(program: Program) -> list[str]:
    """Names of the calls of a step's top level."""
    return [each.name for each in program.graph.node if each.op in CALLS]


def batches(program: Program, count: int = 2) -> list[list[np.ndarray]]:
    """Random batches for a step whose inputs are floats."""
    generator, step = np.random.default_rng(0), step_of(program)
    shapes = [node(program, ref.node).attr["shape"].shape.dim[1:] for ref in step.feeds.values()]
    return [
        [generator.normal(size=[step.layout.batch, *(dim.size for dim in shape)]) for shape in shapes]
        for _ in range(count)
    ]


def paths(graph: GraphDef) -> dict[str, set[str]]:
    """Node -> all nodes before it."""
    view = Graph(graph)
    ancestors: dict[str, set[str]] = {}
    for name in view.topological():
        before = {ref.node for ref in view.inputs(name)} | set(control_inputs(view.nodes[name]))
        ancestors[name] = before.union(*(ancestors[each] for each in before))
    return ancestors


# ---- structure


@pytest.mark.parametrize("keep_tasks", [False, True], ids=["operators", "tasks"])
def test_what_becomes_of_a_step(golden: Callable[[str, str], None], keep_tasks: bool) -> None:
    program = updated(staged(stateful_layers()), layout([1], 2), accumulated=False)
    flat = apply(program, Flatten(keep_tasks=keep_tasks))
    golden(f"flatten_{'tasks' if keep_tasks else 'operators'}.txt", f"{graph_text(flat.graph)}\n{library_text(flat)}")


def test_nothing_is_left_of_calls_but_their_attributes() -> None:
    program = complete(ONE_DEVICE)
    flat = apply(program, Flatten())
    assert not calls(flat) and not flat.graph.library.function
    step = step_of(flat)
    assert not step.entry and not step.exit and step.dissolved == {0}
    named = (*step.metric_results.values(), *step.metric_feeds.values(), *step.outputs, step.feeds.values())
    refs = [*itertools.chain(*named), *step.values.values(), *step.gradients.values(), step.loss]
    reads = itertools.chain(*step.reads.values())
    assert {step.train, *reads, *(ref.node for ref in refs if ref is not None)} <= {
        each.name for each in flat.graph.node
    }
    dense = node(flat, "stage0/replica0/forward0/m_1/dense_1_1/MatMul")
    assert (dense.attr[CALL_ATTR].s, dense.attr[LAYER_ATTR].s) == (b"stage0/replica0/forward0", b"dense_1")
    called = {each.name: each for each in program.graph.node}
    for each in flat.graph.node:
        if call := each.attr[CALL_ATTR].s.decode() if CALL_ATTR in each.attr else "":
            kept = {key: value for key, value in called[call].attr.items() if key.startswith("_dapple")}
            assert each.name.startswith(f"{call}/") and "_class" not in each.attr
            assert all(each.attr[key] == value for key, value in kept.items())


def test_tasks_stay_in_order() -> None:
    program = complete(PIPELINE)
    flat = apply(program, Flatten(keep_tasks=True))
    assert not calls(flat)
    step, before = step_of(flat), paths(flat.graph)
    assert step.entry.keys() == step_of(program).entry.keys() and not step.dissolved
    assert step.schedule is not None
    for tasks in step.schedule.orders.values():
        for one, other in itertools.pairwise(tasks):
            assert set(step.exit[one]) <= before[step.entry[other]]
    inside: dict[str, list[str]] = {}
    for each in flat.graph.node:
        if CALL_ATTR in each.attr and each.op not in ("NoOp", "Const", "VarHandleOp"):
            inside.setdefault(each.attr[CALL_ATTR].s.decode(), []).append(each.name)
    assert inside.keys() == set(calls(program))
    for call, names in inside.items():
        assert all(f"{call}/entry" in before[name] for name in names)
        read = {name for other in flat.graph.node for name in before[other.name] if other.name in names}
        assert set(names) - read <= before[f"{call}/exit"]
    again = Flatten(keep_tasks=True).run(flat)
    assert {each.name: each for each in again.graph.node} == {each.name: each for each in flat.graph.node}
    assert again.step == flat.step


def test_compiled_stages_cant_be_taken_apart() -> None:
    program = complete(ONE_DEVICE)
    graph = GraphDef()
    graph.CopyFrom(program.graph)
    next(each for each in graph.node if each.op in CALLS).attr["_XlaMustCompile"].b = True
    with pytest.raises(PassError, match=r"call 'stage0/replica0/\w+' .* set jit_compile=False"):
        Flatten().run(program.replace(graph=graph))


# ---- the order of what touches a variable


class Written:
    """A top level that is written call by call; each call reads and assigns variables."""

    def __init__(self) -> None:
        self.builder = Builder(empty_graph())

    def call(
        self,
        name: str,
        reads: Sequence[str] = (),
        writes: Mapping[str, float] | None = None,
        *,
        given: Sequence[Ref] = (),
        after: Sequence[str] = (),
    ) -> list[Ref]:
        """A call that reads some variables, and sets others to a number plus all that it is given."""
        body = Builder(empty_graph())
        arguments = [body.append(placeholder(body.names.fresh("given"), FLOAT)) for _ in given]
        values = [read(body, variable, FLOAT, ()) for variable in reads]
        effects = []
        for variable, number in (writes or {}).items():
            value = body.add_n("sum", [body.const(number, FLOAT), *arguments], FLOAT)
            effects.append(assign(body, variable, value, FLOAT, ()))
        function = outline(f"{name}_function", Graph(body.graph), arguments, values, effects=effects)
        merge_library(self.builder.graph, [function])
        self.builder.append(call_node(name, function, given, device=HOST, control=after))
        return [Ref(name, index) for index in range(len(values))]

    def program(self, train: Sequence[str], loss: Ref) -> Program:
        """A step whose end waits for some calls."""
        self.builder.append(make_node("train", "NoOp", control=train, device=HOST))
        step = Step(Layout(((HOST,),), 1, 1, 1), loss=loss, train="train", dissolved=frozenset({0}))
        return Program(self.builder.graph, Roles((), (), Slice(Ref("w"), Ref("n"), Ref("s"))), step=step)


def read_assign_read() -> Program:
    """v = 3 + (v before), then v is read again, in another call that is only told to wait."""
    written = Written()
    (before,) = written.call("first", ["v"])
    written.call("second", writes={"v": 3.0}, given=[before])
    (after,) = written.call("third", ["v"], after=["second"])
    return written.program(["third"], after)


@pytest.mark.parametrize("keep_tasks", [False, True])
def test_a_variable_is_read_assigned_and_read_again(keep_tasks: bool) -> None:
    flat = apply(read_assign_read(), Flatten(keep_tasks=keep_tasks))
    before = paths(flat.graph)
    first, second, third = "first/read/v", "second/assign/v", "third/read/v"
    assert first in before[second] and second in before[third]
    with Steps(flat) as steps:
        steps.load()
        (value,) = steps.values()["v"]
        for number in range(1, 4):
            assert steps.run([])["loss"] == [pytest.approx(value + 3 * number)]


def test_calls_that_nothing_orders_stay_unordered() -> None:
    written = Written()
    (value,) = written.call("one", ["v"])
    (other,) = written.call("two", ["v"])
    written.call("three", ["w"], {"u": 1.0}, after=["one", "two"])
    flat = apply(
        written.program(["three"], written.builder.add_n("sum", [value, other], FLOAT, device=HOST)), Flatten()
    )
    before = paths(flat.graph)
    assert not [each for name in ("one", "two") for each in before[f"{name}/read/v"] if "handle" not in each]
    assert before["three/assign/u"] <= {"three/handle/u", "three/constant"}


def test_the_end_waits_for_effects_of_all_calls_before_it() -> None:
    written = Written()
    written.call("one", writes={"v": 1.0})
    (value,) = written.call("two", ["w"], after=["one"])
    flat = apply(written.program(["two"], value), Flatten())
    assert control_inputs(node(flat, "train")) == ["one/assign/v"]
    with Steps(flat) as steps:
        steps.load()
        steps.run([])
        assert steps.values()["v"] == [1.0]


# ---- numbers


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (PIPELINE, Flatten(frozenset({1}), keep_tasks=True)),
        (Case("stateful", plan("stateful", 2, [[0, 1], [2]], 3, 7, "dapple_b")), Flatten()),
        (Case("mlp", plan("mlp", 2, [[0], [1]], 1, 4, "dapple_a", carried_updates=1)), Flatten()),
        (Case("test", plan("test", 2, [[0], [1]], 2, 4, "gpipe")), Flatten(keep_tasks=True)),
    ],
    ids=str,
)
def test_pipelines_become_flat(case: Case, options: Flatten) -> None:
    program = complete(case)
    flat = options.run(program)
    verify(flat, complete=True)
    here = {each.name for each in program.graph.node if each.device.endswith(":1") and each.op in CALLS}
    assert set(calls(flat)) == (set(calls(program)) - here if options.stages else set())
    assert_same_training(program, flat, batches(program), 3)
