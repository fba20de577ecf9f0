"""Pass 10: the operators of stage functions move to the top level, where each can have a device of its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from graph_passes.graph import (
    CALL_ATTR,
    GROUP_ATTR,
    MICRO_BATCH_ATTR,
    OWN_ATTRS,
    STAGE_ATTR,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    PassError,
    Ref,
    control_inputs,
)
from graph_passes.outline import COLOCATION, FunctionDef
from graph_passes.parameter_group import contributors
from graph_passes.program import Program, Step
from graph_passes.resource_use import ResourceUse, Use, called_functions
from graph_passes.tasks import Task
from graph_passes.tensorflow_bridge import makes_resource, output_number

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_XLA = "_XlaMustCompile"
_Resource = tuple[str, str]
"""Device and name: each device has variables of its own."""


@dataclasses.dataclass(frozen=True)
class Flatten:
    """Puts the bodies of calls in the calls' place.

        read -> F(x) -> B -> apply   becomes   read/W -> F/MatMul(x) -> B/MatMul -> apply/Descent -> write/W

    What a body calls itself (loops, branches, functions of the user) stays one node. A node is named ``<call>/<node>``
    and has the call's device and attributes. With the calls goes the order that their being atomic gave: operators run
    as soon as their inputs are there. Two things are kept of it. Operators that touch the same variable are ordered as
    their calls were, unless both only read it. And what waited for a call waits for its effects, and for those of all
    calls before it.

    Attributes:
        stages: the stages whose calls are inlined, and with them all that is done on their devices (reading variables,
            accumulating, updating); None for all calls.
        keep_tasks: whether tasks stay units of order: ``<call>/entry`` takes what the call waited for and comes before
            all of the body, ``<call>/exit`` after all of it. Otherwise these stages have no tasks any more, and gradients
            aren't kept in accumulators between B and the update where B's results can be read themselves.

    Source: FD-DPS (Mathematics 2022), section 3, definition 1: the computation graph of single operators that its search
    starts from.
    """

    name: ClassVar[str] = "flatten"
    stages: frozenset[int] | None = None
    keep_tasks: bool = False

    def run(self, program: Program) -> Program:
        """Complete step program -> the same without the calls.

        Raises:
            PassError: a call is compiled by XLA, which leaves no operators to place.
        """
        return _Flattening(self, program).result()


class _Flattening:
    """The flat top level while it is being made."""

    def __init__(self, options: Flatten, program: Program) -> None:
        assert program.step is not None
        self.options = options
        self.program = program
        self.step: Step = program.step
        self.view = Graph(program.graph)
        self.functions: dict[str, FunctionDef] = {f.signature.name: f for f in program.graph.library.function}
        self.order = self.view.topological()
        self.calls = {name: self._function_of(name) for name in self.order if self._inlined(self.view.nodes[name])}
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
        self.before = self._calls_before()

    # ---- the calls

    def _inlined(self, node: NodeDef) -> bool:
        if node.op not in CALLS or CALL_ATTR in node.attr:
            return False
        if self.options.stages is None:
            return True
        if STAGE_ATTR not in node.attr:
            return False
        if MICRO_BATCH_ATTR in node.attr:
            return int(node.attr[STAGE_ATTR].i) in self.options.stages
        # Another stage may read or update these stages' variables, which are about to be moved.
        return node.device in {name for stage in self.options.stages for name in self.step.layout.homes[stage]}

    def _function_of(self, call: str) -> FunctionDef:
        node = self.view.nodes[call]
        function = self.functions[node.attr["f"].func.name]
        if any(_XLA in attrs and attrs[_XLA].b for attrs in (node.attr, function.attr)):
            raise PassError(
                f"call {call!r} runs {function.signature.name!r}, which XLA compiles as a whole: its operators can't be "
                f"placed one by one; set jit_compile=False"
            )
        return function

    def _calls_before(self) -> dict[str, int]:
        """Node of the old top level -> the nodes before it that are calls, as a set of bits."""
        bits: dict[str, int] = {}
        self.bit: dict[str, int] = {}
        for name in self.order:
            node = self.view.nodes[name]
            mask = 0
            for producer in itertools.chain((ref.node for ref in self.view.inputs(name)), control_inputs(node)):
                mask |= bits[producer] | self.bit.get(producer, 0)
            bits[name] = mask
            if node.op in CALLS:
                self.bit[name] = 1 << len(self.bit)
        return bits

    # ---- the whole

    def result(self) -> Program:
        touched = self._touched()
        self.forwarded = {} if self.options.keep_tasks else self._forwarded(touched)
        for name in self.order:
            if name in self.calls:
                self._inline(name)
            else:
                self._keep(name)
        for name in self.order:
            self._wait(name)
        for resource, uses in touched.items():
            if resource not in self.forwarded:
                self._order_uses(uses)
        self._keep_library()
        return self.program.replace(graph=self.graph, step=self._new_step())

    def _resolved(self, ref: Ref) -> Ref:
        return self.results.get(ref, ref)

    def _keep(self, name: str) -> None:
        """A node that isn't an inlined call; what it waits for comes later."""
        node = self.graph.node.add()
        original = self.view.nodes[name]
        node.CopyFrom(original)
        if original.input:
            del node.input[:]
            node.input.extend(str(self._resolved(ref)) for ref in self.view.inputs(name))
        self.nodes[name] = node

    # ---- bodies

    def _inline(self, call: str) -> None:
        function = self.calls[call]
        body = self.bodies[function.signature.name]
        dropped = self._dropped(call)
        renamed = {name: self.names.fresh(f"{call}/{name}") for name in body if name not in dropped}
        self.renamed[call] = renamed
        arguments = zip(function.signature.input_arg, self.view.inputs(call), strict=True)
        tensors = {arg.name: self._resolved(ref) for arg, ref in arguments}

        def tensor(text: str) -> Ref:
            if text not in tensors:
                name, argument, index = text.split(":")
                if name in dropped:  # reads an accumulator
                    tensors[text] = self.accumulated[dropped[name]]
                else:
                    tensors[text] = Ref(renamed[name], output_number(body[name], argument, int(index)))
            return tensors[text]

        for name, resource in dropped.items():
            if body[name].op == "AssignVariableOp":
                self.accumulated[resource] = tensor(body[name].input[1])
        given = self._given(call)
        free = {name for name, node in body.items() if _is_free(node, self.functions)}
        roots = self.roots.setdefault(call, [])
        for name, original in body.items():
            if name in dropped:
                continue
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
        """What a body's nodes have of their call."""
        node = self.view.nodes[call]
        given = NodeDef(device=node.device)
        for key, value in node.attr.items():
            if key.startswith(OWN_ATTRS):
                given.attr[key].CopyFrom(value)
        given.attr[CALL_ATTR].s = call.encode()
        return given

    def _bracket(self, call: str, given: NodeDef) -> None:
        """The nodes before and after a body."""
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
            node.input.extend(f"^{name}" for name in dict.fromkeys(after))
            self.nodes[node.name] = node
        self.nodes[self.exit[call]].input.append(f"^{self.entry[call]}")
        for name in self.roots[call]:
            self.nodes[name].input.append(f"^{self.entry[call]}")

    def _call_of(self, name: str) -> str:
        attrs = self.nodes[name].attr
        return attrs[CALL_ATTR].s.decode() if CALL_ATTR in attrs else ""

    # ---- order

    def _wait(self, name: str) -> None:
        """Makes what waited for a call wait for what is left of it."""
        waits = control_inputs(self.view.nodes[name])
        if not waits:
            return
        if self.options.keep_tasks:
            target = self.entry.get(name, name)
            found = dict.fromkeys(self.exit.get(waited, waited) for waited in waits)
            self.nodes[target].input.extend(f"^{waited}" for waited in found)
            return
        kept = [waited for waited in waits if waited not in self.calls]
        if name in self.calls:
            # Between calls only variables order. Waiting for nothing but other nodes is what a NoOp does for calls.
            kept = [waited for waited in kept if self.view.nodes[waited].op != "NoOp"]
            for root in self.roots[name] if kept else ():
                self._add_waits(root, kept)
            return
        self._add_waits(name, [*kept, *self._effects_before(waited for waited in waits if waited in self.calls)])

    def _add_waits(self, name: str, waited: Iterable[str]) -> None:
        node = self.nodes[name]
        present = set(control_inputs(node))
        node.input.extend(f"^{each}" for each in dict.fromkeys(waited) if each not in present)

    def _effects_before(self, calls: Iterable[str]) -> list[str]:
        """Effects of calls and of all calls before them, without those that others of them need anyway."""
        mask = 0
        for call in calls:
            mask |= self.before[call] | self.bit[call]
        found: list[str] = []
        needed: set[str] = set()
        for call in reversed(self.order):
            if not mask & self.bit.get(call, 0):
                continue
            for effect in self.effects.get(call, [call]):
                if effect not in needed:
                    found.append(effect)
                    self._mark(effect, needed)
        return found

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

    def _touched(self) -> dict[_Resource, list[tuple[str, list[Use]]]]:
        """Resource -> the calls that use it, in order, with what their nodes do; a call that stays is one node."""
        found: dict[_Resource, list[tuple[str, list[Use]]]] = {}
        for name in self.order:
            node = self.view.nodes[name]
            if node.op not in CALLS or node.attr["f"].func.name not in self.functions:
                continue
            by_resource: dict[str, list[Use]] = {}
            for use in self.uses.of_function(node.attr["f"].func.name):
                by_resource.setdefault(use.resource, []).append(use)
            for resource, uses in by_resource.items():
                found.setdefault((node.device, resource), []).append((name, uses))
        return found

    def _is_before(self, one: str, other: str) -> bool:
        return bool(self.before[other] & self.bit[one])

    def _forwarded(self, touched: Mapping[_Resource, list[tuple[str, list[Use]]]]) -> dict[_Resource, None]:
        """Accumulators that are assigned once and only read after that: what is assigned is read in their place."""
        self.accumulated: dict[_Resource, Ref] = {}
        accumulators = {own.name for by_stage in contributors(self.program).values() for own in by_stage.values()}
        found: dict[_Resource, None] = {}
        for resource, uses in touched.items():
            if resource[1] not in accumulators or any(call not in self.calls for call, _ in uses):
                continue
            (first, writes), *later = uses
            ops = [self._op(first, use) for use in writes]
            reads = [self._op(call, use) for call, each in later for use in each]
            ordered = all(self._is_before(first, call) for call, _ in later)
            if ops == ["AssignVariableOp"] and set(reads) <= {"ReadVariableOp"} and ordered:
                found[resource] = None
        return found

    def _op(self, call: str, use: Use) -> str:
        return self.bodies[self.calls[call].signature.name][use.node].op

    def _dropped(self, call: str) -> dict[str, _Resource]:
        """The nodes of a call's body that only serve forwarded accumulators."""
        device = self.view.nodes[call].device
        found = {}
        for use in self.uses.of_function(self.calls[call].signature.name):
            if (device, use.resource) in self.forwarded:
                found[use.node] = (device, use.resource)
        if found:
            for node in self.bodies[self.calls[call].signature.name].values():
                if node.op == "VarHandleOp" and (device, node.attr["shared_name"].s.decode()) in self.forwarded:
                    found[node.name] = (device, node.attr["shared_name"].s.decode())
        return found

    def _order_uses(self, uses: list[tuple[str, list[Use]]]) -> None:
        """Each write of a variable comes after all uses before it, each use after the write before it."""
        written: list[tuple[str, list[str]]] = []
        read: list[tuple[str, list[str]]] = []
        for call, own in uses:
            writes = [self._node_of(call, use) for use in own if use.written]
            reads = [self._node_of(call, use) for use in own if not use.written]
            for befores, nodes in ((written, [*reads, *writes]), (read, writes)):
                for other, before in befores:
                    if self._is_before(other, call):
                        for node in nodes:
                            self._add_waits(node, before)
            if writes:
                written, read = [(call, writes)], []
            else:
                read.append((call, reads))

    def _node_of(self, call: str, use: Use) -> str:
        return self.renamed[call][use.node] if call in self.calls else call

    # ---- what is told of it

    def _keep_library(self) -> None:
        """The functions that are still called, with their gradients."""
        gradients = {g.function_name: g.gradient_func for g in self.program.graph.library.gradient}
        kept: dict[str, None] = {}
        pending = list(dict.fromkeys(name for node in self.graph.node for name in self._named(node)))
        while pending:
            name = pending.pop()
            if name in kept or name not in self.functions:
                continue
            kept[name] = None
            pending += [called for node in self.functions[name].node_def for called in self._named(node)]
            pending += [gradients[name]] if name in gradients else []
        library = self.program.graph.library
        self.graph.library.function.extend(f for f in library.function if f.signature.name in kept)
        for function in self.graph.library.function:
            # A loop and its gradient name one node, which neither has; they may go to different devices now.
            for node in function.node_def:
                node.attr.pop(COLOCATION, None)
        self.graph.library.gradient.extend(g for g in library.gradient if g.function_name in kept)

    def _named(self, node: NodeDef) -> list[str]:
        return called_functions(node, self.functions)

    def _new_step(self) -> Step:
        step, options = self.step, self.options

        def kept(refs: Iterable[Ref]) -> tuple[Ref, ...]:
            return tuple(map(self._resolved, refs))

        def stays(task: Task) -> bool:
            return options.keep_tasks or (options.stages is not None and task.stage not in options.stages)

        values = {key: self._resolved(ref) for key, ref in step.values.items()}
        flat = range(len(step.layout.devices)) if options.stages is None else options.stages
        return dataclasses.replace(
            step,
            entry={task: self.entry.get(name, name) for task, name in step.entry.items() if stays(task)},
            exit={
                task: tuple(self.exit.get(name, name) for name in names)
                for task, names in step.exit.items()
                if stays(task)
            },
            values={key: ref for key, ref in values.items() if ref.node in self.nodes},
            reads={place: tuple(self._reads(names)) for place, names in step.reads.items()},
            metric_results={name: kept(refs) for name, refs in step.metric_results.items()},
            loss=None if step.loss is None else self._resolved(step.loss),
            outputs=tuple(kept(refs) for refs in step.outputs),
            gradients={name: self._resolved(ref) for name, ref in step.gradients.items()},
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
    """Whether a node gives a constant or a handle: when it runs makes no difference."""
    if node.op in functions or not all(text.startswith("^") for text in node.input):
        return False
    return node.op == "Const" or (makes_resource(node.op) and not node.input)
