"""Moves the operators of stage functions to the top level, where each can have its own device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS, CallOrder, Touch
from graph_passes.ir.graph import (
    BRACKET_ATTR,
    CALL_ATTR,
    COLOCATION,
    COMPILED_ATTR,
    MICRO_BATCH_ATTR,
    STAGE_ATTR,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    attr,
    control_inputs,
    own_attrs,
    set_inputs,
    text_attr,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.program import Fact, Program, Step
from graph_passes.ir.resource_use import ResourceUse, library_of
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import makes_resource, output_number


@dataclasses.dataclass(frozen=True)
class Flatten:
    """Puts the bodies of calls in the calls' place.

        read -> F(x) -> B -> apply   becomes   read/W -> F/MatMul(x) -> B/MatMul -> apply/Descent -> write/W

    Functions that a body calls (loops, branches, the user's functions) stay one node. A node is named
    ``<call>/<node>`` and has the call's device and attributes. Atomic calls implied an order, which is lost: operators
    run as soon as their inputs are there. Two parts of it are kept. Operators that touch the same variable are ordered
    as their calls were, unless both only read it. And nodes that waited for a call wait for its effects, and for those
    of all calls before it.

    Attributes:
        stages: the stages whose calls are inlined, with all other calls on their devices (reading variables,
            accumulating, updating); None for all calls.
        keep_tasks: whether tasks stay units of order: ``<call>/entry`` waits for what the call waited for and comes
            before all of the body, ``<call>/exit`` after all of it. Otherwise these stages have no tasks any more.
        kept: the kinds of calls that aren't inlined.
        compiled: whether functions for XLA may be inlined too; the result then has to be compiled.

    Source: FD-DPS (Mathematics 2022), section 3, definition 1: the computation graph of single operators, which the
    search starts from.
    """

    name: ClassVar[str] = "flatten"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    stages: frozenset[int] | None = None
    keep_tasks: bool = False
    kept: frozenset[NodeKind] = frozenset()
    compiled: bool = False

    def run(self, program: Program) -> Program:
        """Complete step program -> the same without the calls.

        Raises:
            PassError: a call is compiled by XLA, which leaves no operators to place, unless ``compiled``.
        """
        return _Flattening(self, program).result()


class _Flattening:
    """The flat top level while it is being made."""

    def __init__(self, options: Flatten, program: Program) -> None:
        self.options = options
        self.program = program
        self.step: Step = program.own_step
        self.view = Graph(program.graph)
        self.functions: dict[str, FunctionDef] = {f.signature.name: f for f in program.graph.library.function}
        self.order = CallOrder(self.view)
        self.calls = {node.name: self._function_of(node) for node in self.view if self._inlined(node)}
        self.uses = ResourceUse(self.functions)
        self.bodies = {f.signature.name: {node.name: node for node in f.node_def} for f in self.calls.values()}
        self.names = Names(name for name in self.view.nodes if name not in self.calls)
        self.graph = GraphDef(versions=program.graph.versions)
        self.nodes: dict[str, NodeDef] = {}
        self.renamed: dict[str, dict[str, str]] = {}  # call -> node of the body -> its name at the top level
        self.results: dict[Ref, Ref] = {}  # result of an inlined call -> what it is now
        self.roots: dict[str, list[str]] = {}  # call -> nodes that read nothing that the body computes
        self.effects: dict[str, list[str]] = {}  # call -> nodes that must run
        self.entry: dict[str, str] = {}
        self.exit: dict[str, str] = {}

    # ---- the calls

    def _inlined(self, node: NodeDef) -> bool:
        if node.op not in CALLS or CALL_ATTR in node.attr:
            return False
        if NodeKind.of(node) in self.options.kept:
            return False
        if self.options.stages is None:
            return True
        if STAGE_ATTR not in node.attr:
            return False
        if MICRO_BATCH_ATTR in node.attr:
            return int(node.attr[STAGE_ATTR].i) in self.options.stages
        # Another stage may read or update these stages' variables, which are about to be moved.
        return node.device in {name for stage in self.options.stages for name in self.step.layout.devices[stage]}

    def _function_of(self, call: NodeDef) -> FunctionDef:
        function = self.functions[call.attr["f"].func.name]
        compiled = any(COMPILED_ATTR in attrs and attrs[COMPILED_ATTR].b for attrs in (call.attr, function.attr))
        if compiled and not self.options.compiled:
            raise PassError(
                f"call {call.name!r} runs {function.signature.name!r}, which XLA compiles as a whole: its operators "
                f"can't be placed one by one; set jit_compile=False"
            )
        return function

    # ---- the whole

    def result(self) -> Program:
        for name in self.order.topological:
            if name in self.calls:
                self._inline(name)
            else:
                self._keep(name)
        for name in self.order.topological:
            self._wait(name)
        for touches in self.order.touches(self.uses).values():
            self._order_uses(touches)
        self._keep_library()
        return self.program.replace(graph=self.graph, step=self._new_step())

    def _resolved(self, ref: Ref) -> Ref:
        return self.results.get(ref, ref)

    def _keep(self, name: str) -> None:
        """Adds a node that isn't an inlined call; its control edges are added later."""
        node = self.graph.node.add()
        original = self.view.nodes[name]
        node.CopyFrom(original)
        if original.input:
            set_inputs(node, map(self._resolved, self.view.inputs(name)))
        self.nodes[name] = node

    # ---- bodies

    def _inline(self, call: str) -> None:
        function = self.calls[call]
        body = self.bodies[function.signature.name]
        renamed = {name: self.names.fresh(f"{call}/{name}") for name in body}
        self.renamed[call] = renamed
        arguments = zip(function.signature.input_arg, self.view.inputs(call), strict=True)
        tensors = {arg.name: self._resolved(ref) for arg, ref in arguments}

        def tensor(text: str) -> Ref:
            if text not in tensors:
                name, argument, index = text.split(":")
                tensors[text] = Ref(renamed[name], output_number(body[name], argument, int(index)))
            return tensors[text]

        given = self._given(call)
        free = {name for name, node in body.items() if _is_free(node, self.functions)}
        roots = self.roots.setdefault(call, [])
        for name, original in body.items():
            node = self.graph.node.add()
            node.CopyFrom(given)
            node.MergeFrom(original)  # its own attributes go before the call's
            node.name = renamed[name]
            node.attr.pop(COLOCATION, None)
            if original.input:
                del node.input[:]
                waits, alone = [], True
                for text in original.input:
                    producer = text.removeprefix("^").partition(":")[0]
                    alone &= producer in free or producer not in renamed
                    if not text.startswith("^"):
                        node.input.append(str(tensor(text)))
                    elif producer in renamed and original.op != "Const":
                        waits.append(f"^{renamed[producer]}")
                node.input.extend(dict.fromkeys(waits))
                if alone and name not in free:
                    roots.append(node.name)
            elif name not in free:
                roots.append(node.name)
            self.nodes[node.name] = node
        for index, arg in enumerate(function.signature.output_arg):
            self.results[Ref(call, index)] = tensor(function.ret[arg.name])
        done = dict.fromkeys(function.control_ret[name] for name in function.signature.control_output)
        self.effects[call] = [renamed[name] for name in done if name in renamed]
        if self.options.keep_tasks:
            self._bracket(call, given)

    def _given(self, call: str) -> NodeDef:
        """Returns the device and attributes that a body's nodes get from their call."""
        node = self.view.nodes[call]
        return NodeDef(device=node.device, attr={**own_attrs(node), CALL_ATTR: attr(call)})

    def _bracket(self, call: str, given: NodeDef) -> None:
        """Adds the nodes before and after a body."""
        ends = [self.results[Ref(call, index)].node for index in range(len(self.calls[call].signature.output_arg))]
        own = [name for name in ends if name in self.nodes and self._call_of(name) == call]
        for names, text, after in (
            (self.entry, "entry", []),
            (self.exit, "exit", [*self.effects[call], *own]),
        ):
            names[call] = self.names.fresh(f"{call}/{text}")
            node = self.graph.node.add()
            node.CopyFrom(given)
            node.name, node.op = names[call], "NoOp"
            node.attr[BRACKET_ATTR].b = True
            node.input.extend(f"^{name}" for name in dict.fromkeys(after))
            self.nodes[node.name] = node
        self.nodes[self.exit[call]].input.append(f"^{self.entry[call]}")
        for name in self.roots[call]:
            self.nodes[name].input.append(f"^{self.entry[call]}")

    def _call_of(self, name: str) -> str:
        return text_attr(self.nodes[name], CALL_ATTR)

    # ---- order

    def _wait(self, name: str) -> None:
        """Makes nodes that waited for a call wait for its remaining nodes."""
        waits = control_inputs(self.view.nodes[name])
        if not waits:
            return
        if self.options.keep_tasks:
            target = self.entry.get(name, name)
            exits = dict.fromkeys(self.exit.get(waited, waited) for waited in waits)
            self.nodes[target].input.extend(f"^{waited}" for waited in exits)
            return
        kept = [waited for waited in waits if waited not in self.calls]
        if name in self.calls:
            # Between calls only variables impose an order. A NoOp that only waits for other nodes orders calls.
            kept = [waited for waited in kept if self._orders(self.view.nodes[waited])]
            for root in self.roots[name] if kept else ():
                self._add_waits(root, kept)
            return
        self._add_waits(name, [*kept, *self._effects_before(waited for waited in waits if waited in self.calls)])

    def _orders(self, node: NodeDef) -> bool:
        """Returns whether waiting for a node, which isn't inlined, has a meaning."""
        if node.op == "NoOp":
            return False
        return node.op not in CALLS or bool(self.uses.of_function(node.attr["f"].func.name))

    def _add_waits(self, name: str, waited: Iterable[str]) -> None:
        node = self.nodes[name]
        present = set(control_inputs(node))
        node.input.extend(f"^{each}" for each in dict.fromkeys(waited) if each not in present)

    def _effects_before(self, calls: Iterable[str]) -> list[str]:
        """Returns the effects of calls and of all calls before them, without effects that others of them imply."""
        effects: list[str] = []
        needed: set[str] = set()
        for call in self.order.up_to(calls):
            for effect in self.effects.get(call, [call]):
                if effect not in needed:
                    effects.append(effect)
                    self._mark(effect, needed)
        return effects

    def _mark(self, name: str, marked: set[str]) -> None:
        """Adds a node and all before it."""
        pending = [name]
        while pending:
            each = pending.pop()
            if each not in marked:
                marked.add(each)
                node = self.nodes[each]
                pending += [text.removeprefix("^").partition(":")[0] for text in node.input]

    # ---- variables

    def _order_uses(self, touches: Iterable[Touch]) -> None:
        for earlier, before, later, after in self.order.conflicts(touches):
            for node in self._nodes_of(later.call, after):
                self._add_waits(node, self._nodes_of(earlier.call, before))

    def _nodes_of(self, call: str, names: Iterable[str]) -> list[str]:
        """Returns the nodes of a call's body; the call itself if it isn't inlined."""
        return [self.renamed[call][name] for name in names] if call in self.calls else [call]

    # ---- what is told of it

    def _keep_library(self) -> None:
        """The functions that are still called, with their gradients."""
        self.graph.library.CopyFrom(library_of(self.graph.node, self.program.graph.library))
        for function in self.graph.library.function:
            # A loop and its gradient name one missing node; they may go to different devices now.
            for node in function.node_def:
                node.attr.pop(COLOCATION, None)

    def _new_step(self) -> Step:
        step, options = self.step, self.options

        def stays(task: Task) -> bool:
            return options.keep_tasks or (options.stages is not None and task.stage not in options.stages)

        values = {key: self._resolved(ref) for key, ref in step.values.items()}
        flat = range(len(step.layout.devices)) if options.stages is None else options.stages
        return dataclasses.replace(
            step.moved(self._resolved),
            entry={task: self.entry.get(name, name) for task, name in step.entry.items() if stays(task)},
            exit={
                task: tuple(self.exit.get(name, name) for name in names)
                for task, names in step.exit.items()
                if stays(task)
            },
            values={key: ref for key, ref in values.items() if ref.node in self.nodes},
            pieces={task: nodes for task, nodes in step.pieces.items() if stays(task) and not options.keep_tasks},
            reads={place: tuple(self._reads(names)) for place, names in step.reads.items()},
            dissolved=step.dissolved if options.keep_tasks else step.dissolved | frozenset(flat),
        )

    def _reads(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if name not in self.calls:
                yield name
                continue
            for use in self.uses.of_function(self.calls[name].signature.name):
                yield self.renamed[name][use.node]


def _is_free(node: NodeDef, functions: Mapping[str, FunctionDef]) -> bool:
    """Returns whether a node yields a constant or a handle, so that it may run at any time."""
    if node.op in functions or not all(text.startswith("^") for text in node.input):
        return False
    return node.op == "Const" or (makes_resource(node.op) and not node.input)
