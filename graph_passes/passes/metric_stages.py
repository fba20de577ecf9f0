"""The stage of each metric: part of `assign_stages`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Roles, Variable, VariableKind


def metric_stages(
    graph: Graph,
    roles: Roles,
    stage_of: Mapping[str, int],
    in_model: Container[str],
    last: int,
    has_batch_axis: Callable[[Ref], bool],
) -> dict[str, int]:
    """Puts all nodes that only a metric needs into one stage: the earliest that has their inputs.

        stage 0: d -> sum(d)    stage 1: total + sum(d)    becomes    stage 0: d -> sum(d) -> total + sum(d)

    A metric adds up numbers of slices (sums, counts, a loss times its slice's weight). Stages have different slices,
    so none of these numbers may cross a cut. A metric that reads tensors of several stages goes to the last of these;
    tensors with a batch axis are sent there and cut again.

    Args:
        graph: the flat graph.
        roles: what its tensors mean. Variables of one metric stay together.
        stage_of: stages of nodes by their places in the model.
        in_model: nodes that layers have made.
        last: number of the last stage.
        has_batch_axis: whether a tensor can be cut into slices.

    Returns:
        The stages of nodes that only metrics need, where this rule decides them.
    """
    metrics = [v for v in roles.variables if v.kind is VariableKind.METRIC and v.update is not None]
    if not metrics or not last:
        return {}
    own = _own_nodes(graph, roles, metrics)
    owner_of = _owner_of(graph, roles, stage_of, last, lambda name: name in own and name not in in_model)
    groups = _groups(graph, roles, metrics, own, stage_of, in_model, has_batch_axis)
    stages: dict[str, int] = {}
    for nodes in groups:
        sources = {ref.node for name in nodes for ref in graph.inputs(name)} - nodes
        begun = [stage_of[name] for name in sources if name in stage_of]
        begun += [owner_of[name] for name in sources if name in owner_of]
        begun += [stage_of[name] for name in nodes if name in in_model and name in stage_of]
        stages |= dict.fromkeys(nodes, max(begun, default=last))
    return stages


def _own_nodes(graph: Graph, roles: Roles, metrics: list[Variable]) -> set[str]:
    """Returns the nodes that only metrics need."""
    others = [variable.update for variable in roles.variables if variable.kind is not VariableKind.METRIC]
    results = [*roles.outputs, roles.loss, *others, *(normalizer.of_whole_batch for normalizer in roles.normalizers)]
    wanted = [variable.update for variable in metrics if variable.update is not None]
    needed = graph.ancestors([ref for ref in results if ref is not None], control=False)
    return graph.ancestors(wanted, control=False) - needed - _given(roles)


def _given(roles: Roles) -> set[str]:
    values = {variable.value.node for variable in roles.variables if variable.value is not None}
    return (
        values | {ref.node for ref in (*roles.inputs, *roles.scalars)} | {n.placeholder.node for n in roles.normalizers}
    )


def _owner_of(
    graph: Graph, roles: Roles, stage_of: Mapping[str, int], last: int, late: Callable[[str], bool]
) -> dict[str, int]:
    """Returns the stages of weights and state that metrics may read: that of the first reader that isn't ``late``."""
    owner_of: dict[str, int] = {}
    for variable in roles.variables:
        if variable.value is not None and variable.kind is not VariableKind.METRIC and not variable.is_counter:
            readers = [name for name in graph.consumers(variable.value.node) if name in stage_of and not late(name)]
            owner_of[variable.value.node] = stage_of[readers[0]] if readers else last
    return owner_of


def _groups(
    graph: Graph,
    roles: Roles,
    metrics: list[Variable],
    own: set[str],
    stage_of: Mapping[str, int],
    in_model: Container[str],
    has_batch_axis: Callable[[Ref], bool],
) -> list[set[str]]:
    """Returns sets of nodes that must be in one stage: of metrics that share nodes.

    Nodes that a layer has made for a metric stay in the layer's stage, until the batch axis is gone.
    """
    running = {v.value.node: v.metric or v.name for v in metrics if v.value is not None}
    after = set(running)  # what depends on a metric's value
    for name in graph.ordered(own):
        if any(ref.node in after for ref in graph.inputs(name)):
            after.add(name)
    groups: dict[str, set[str]] = {}
    for variable in metrics:
        assert variable.update is not None
        nodes = groups.setdefault(variable.metric or variable.name, set())
        pending = [variable.update]
        while pending:
            ref = pending.pop()
            name = ref.node
            if name in running:
                nodes.add(name)
            if name in nodes or name not in own or (name not in stage_of and ref != variable.update):
                continue
            if name not in in_model or name in after or not has_batch_axis(ref):
                nodes.add(name)
                pending += graph.inputs(name)
    united: list[set[str]] = []
    for nodes in groups.values():
        apart = [other for other in united if not other & nodes]
        joined = [other for other in united if other & nodes]
        united = [*apart, nodes.union(*joined)]
    return [nodes - running.keys() for nodes in united]
