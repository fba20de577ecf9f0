"""Gradients are reduced over the replicas, and the user's optimizer is applied on every replica."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from graph_passes.ir.collectives import AllReduceRules
from graph_passes.ir.graph import GraphDef, copied
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.apply_updates import Application
from graph_passes.passes.parameter_group import UpdateNodes, reduction_units
from graph_passes.passes.reduce_gradients import Reduction


@dataclasses.dataclass(frozen=True)
class Update:
    """Adds AllReduce and Apply.

        GA, GA.r1   becomes   pack -> all-reduce -> apply,  pack.r1 -> all-reduce.r1 -> apply.r1

    Slices weigh their loss by their samples, so that the sum over replicas is the gradient of the mean over the global
    batch. Variables that the same stages read form a group, which is reduced over the devices of these stages, each of
    which then makes the same update; a device that runs several of the stages adds up their gradients first. A group is
    reduced and updated as soon as its gradients are complete, while other stages of the device still compute. Devices
    start their all-reduces in one order, that in which the schedule completes gradients, so that they can't deadlock.

    The devices of a group may update its parameters together (`GroupUpdate.shards`), each a shard:

        pack -> all-reduce -> apply   becomes   pack -> reduce-scatter -> apply -> all-gather

    Nothing is gathered then if each device keeps only its shards of them (`Shards.stored`).

    Attributes:
        updates: the parameter groups' parts of the optimizer.
        bucket_bytes: gradients are reduced in vectors of about this size.
        wait_free: False makes a group wait until its devices have run all their tasks.
        want_gradients: whether the reduced gradients can be fetched (``step.gradients``); those of groups that are
            carried over can't be.
        carried: the groups, by their stages and in order, that aren't reduced in this step but during the forward of
            the next one. Groups with rows of embeddings can't be: these aren't kept beyond a step.
        head: whether a step before this one has carried groups over: this one begins by reducing and updating them, and
            each stage's forward waits for its own groups only.
        jit_compile: compile the optimizer with XLA.
        spread: the stages whose operators are placed one by one on several devices. Variables that one of them reads
            are reduced one by one, as each gets a device of its own, and updated without XLA.
        all_reduces: how gradients are all-reduced. Sums inside tasks, which have no order beside them, stay with the
            ring.

    Source: DAPPLE (PPoPP'21), section 5.2.3: "AllReduce operation to synchronize gradients among all replicas [...] A
    normal Apply operation updates weights with averaged gradients eventually." Out-Of-Order BackProp (EuroSys'22),
    sections 2 and 5.1, for the order and for what the next forward waits for.
    """

    name: ClassVar[str] = "update"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    updates: tuple[GroupUpdate, ...]
    bucket_bytes: int
    wait_free: bool = True
    want_gradients: bool = True
    carried: tuple[tuple[int, ...], ...] = ()
    head: bool = False
    jit_compile: bool = False
    spread: frozenset[int] = frozenset()
    all_reduces: AllReduceRules = dataclasses.field(default_factory=AllReduceRules)

    def run(self, program: Program) -> Program:
        """Completes a program with ordered tasks: nothing pending, ``step.train`` and ``step.gradients`` set."""
        nodes = UpdateNodes(self, program, copied(program.graph))
        reduction = Reduction(nodes)
        application = Application(nodes, reduction)
        applied = application.carried() if self.head else {}
        application.bind_loss_scale(applied)
        reduction.accumulate_nothing(applied)
        nodes.hold_back_reads(applied)
        now = [group for group in nodes.groups if group not in nodes.carried]
        reduction.all_reduce(reduction_units(program, now))
        applied |= application.call_each(NodeKind.APPLY, now, application.totals())
        ends = [*applied.values(), *application.call_each(NodeKind.COUNTERS, nodes.carried).values()]
        # Carried gradients must have been accumulated, though nothing in this step reads them.
        ends += [name for group in nodes.carried for device in group.devices for name in nodes.complete(group, device)]
        train = nodes.end(dict.fromkeys(ends))
        gradients = application.gradients(now) if self.want_gradients else {}
        step = dataclasses.replace(nodes.step, pending={}, train=train, gradients=gradients)
        return program.replace(graph=nodes.graph, step=step)


def flush(update: Update, program: Program, first_key: int = 1) -> tuple[GraphDef, str]:
    """Returns a graph that only reduces and updates the groups that steps with ``update`` have carried over.

    Args:
        update: the pass with which these steps were made.
        program: one of them, with ordered tasks.
        first_key: the first of the collective keys.

    Returns:
        The graph and the node that has run when the variables have been updated.
    """
    step = dataclasses.replace(program.own_step, next_key=first_key)
    nodes = UpdateNodes(update, program.replace(step=step), empty_graph())
    train = nodes.end(Application(nodes, Reduction(nodes)).carried().values())
    return nodes.graph, train
