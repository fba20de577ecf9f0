"""Scales losses and state so that slices' contributions add up to the whole batch's values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from graph_passes.analysis.chosen_rows import with_counted_rows
from graph_passes.analysis.sample_dependence import SampleDependence, sample_dependence
from graph_passes.analysis.update_flow import Part, parts_of_update
from graph_passes.ir.graph import (
    FLOAT_DTYPES,
    LAYER_ATTR,
    AttrValue,
    Builder,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    dtype_attr,
    make_node,
    own_attrs,
    set_inputs,
    shape_attr,
    text_attr,
)
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Normalizer, Program, Roles, Variable, VariableKind
from graph_passes.ir.spreads import CONSTANT, Coupling, Spread

_LINEAR = frozenset({"Identity", "Neg", "Cast", "Reshape", "Squeeze", "ExpandDims", "Sum", "Mean", "StopGradient"})
"""Ops that are linear in their first input."""
_SUMS = frozenset({"AddV2", "Add", "Sub", "AddN", "Pack"})


def scale_losses(program: Program, outputs: Sequence[Ref] = ()) -> Program:
    """Returns a program whose loss, state and metrics are slices' contributions to the batch's.

        weight * (sum(e) + mean(f))       becomes   weight * (sum(e) / weight + mean(f))
        sum(m * e) / sum(m)               becomes   sum(m * e) / (sum(m) of the whole batch)

    Capture has multiplied the whole loss by ``weight``, as if it were a mean. That stays if it is one, or if nothing is
    known. A sum is divided by the weight where it is made, so that each slice's is an estimate of the whole batch's,
    as a mean is: the slices of another stage read its mean over the slices of its stage. Statistics of batch inputs
    that only the loss and metrics use, and not linearly, are computed from the whole batch before the step, like
    divisors of masked losses. The rest is recorded in ``couplings``.

    Args:
        program: a flat program, its loss and its floating-point state multiplied by the slice's weight.
        outputs: the model's outputs.
    """
    view, roles = Graph(program.graph), program.roles
    state = [v.update for v in roles.variables if v.update is not None and v.kind is VariableKind.STATE]
    model = view.ancestors([*(ref for ref in outputs if ref.node in view), *state], control=False)
    loss = set[str]() if roles.loss is None else view.ancestors([roles.loss], control=False)
    metrics = [v.update for v in roles.variables if v.update is not None and v.kind is VariableKind.METRIC]
    aside = (loss | view.ancestors(metrics, control=False)) - model
    dependence = sample_dependence(program, aside, outputs)
    if dependence is None or dependence.partial:
        unknown = view.ordered(loss - model if dependence else model | loss)[-1:]
        told = [] if dependence is None else [*dependence.couplings]
        return program.replace(couplings=(*told, *((name, Coupling.UNKNOWN) for name in unknown)))
    counted = with_counted_rows(program, dependence, aside)
    if counted is not None:
        return scale_losses(counted, outputs)
    return _Scaling(with_whole_batches(program, dependence), dependence).result()


def with_whole_batches(program: Program, dependence: SampleDependence) -> Program:
    """Replaces values that the loss must read from the whole batch by placeholders; these are computed apart."""
    if not dependence.wholes:
        return program
    view = Graph(program.graph)
    graph = copied(program.graph)
    own = {node.name: node for node in graph.node}
    names, placeholders, copies = Names(view.nodes), list[NodeDef](), list[NodeDef]()
    renamed: dict[str, str] = {}
    normalizers: dict[Ref, Normalizer] = {}
    for whole in dependence.wholes:
        ref = whole.ref
        if ref not in normalizers:
            name = names.fresh(f"{ref.node}/whole_batch")
            attrs = {"dtype": dtype_attr(dtype_of(view, ref)), "shape": shape_attr(dependence.shapes.get(ref))}
            placeholders.append(make_node(name, "Placeholder", attrs=attrs))
            for original in view.ordered(_computing(view, ref)):
                if original not in renamed:
                    renamed[original] = names.fresh(f"{original}/of_whole_batch")
                    copies.append(_copy(view.nodes[original], renamed))
            result = Ref(renamed.get(ref.node, ref.node), ref.output)
            normalizers[ref] = Normalizer(Ref(name), result, text_attr(view.nodes[ref.node], LAYER_ATTR) or ref.node)
        own[whole.node].input[whole.argument] = str(normalizers[ref].placeholder)
    nodes = [*placeholders, *graph.node, *copies]
    ordered = GraphDef(node=nodes, versions=graph.versions, library=graph.library)
    roles = program.roles
    roles = dataclasses.replace(roles, normalizers=(*roles.normalizers, *normalizers.values()))
    return program.replace(graph=ordered, roles=roles)


def _computing(view: Graph, ref: Ref) -> set[str]:
    """Returns the nodes that compute a tensor from batch inputs, with ``Shape`` nodes but not what these read."""
    asked = [Ref(node.name) for node in view if node.op == "Shape"]
    body = view.ancestors([ref], asked, control=False)
    shapes = {own.node for name in body for own in view.inputs(name) if view.nodes[own.node].op == "Shape"}
    return {name for name in body | shapes if view.nodes[name].op not in ("Const", "Placeholder")}


def _copy(node: NodeDef, renamed: Mapping[str, str]) -> NodeDef:
    """Copies a node under its new name, with its inputs under theirs; the copy belongs to no layer."""
    copy = copied(node)
    copy.name = renamed[node.name]
    set_inputs(copy, [ref._replace(node=renamed.get(ref.node, ref.node)) for ref in data_inputs(node)])
    for key in own_attrs(copy):
        del copy.attr[key]
    return copy


class _Scaling:
    """A program while it is being scaled."""

    def __init__(self, program: Program, dependence: SampleDependence) -> None:
        self.program, self.dependence = program, dependence
        self.view = Graph(program.graph)
        self.graph = copied(program.graph)
        self.builder = Builder(self.graph)
        self.couplings = [  # Capture's own products with the weight say nothing of the model.
            (name, coupling) for name, coupling in dependence.couplings if not self._is_weighted(self.view.nodes[name])
        ]
        self.shares: dict[Ref, Ref] = {}

    def result(self) -> Program:
        """Returns the program with scaled losses."""
        roles, view = self.program.roles, self.view
        needed = [roles.loss, *roles.outputs, *(v.update for v in roles.variables if v.kind is VariableKind.STATE)]
        used = view.ancestors([ref for ref in needed if ref is not None], control=False)
        self.aside = {name for name, coupling in self.couplings if coupling is not Coupling.DRAWS} - used
        self.couplings = [(name, coupling) for name, coupling in self.couplings if name in used]
        loss = None if roles.loss is None else self._scaled(roles.loss, Coupling.NOT_LINEAR)
        variables = tuple(self._updated(variable) for variable in roles.variables)
        roles = dataclasses.replace(roles, loss=loss, variables=variables)
        scaled = self.program.replace(roles=roles, couplings=tuple(self.couplings))
        return scaled if roles == self.program.roles else scaled.replace(graph=_pruned(self.graph, roles))

    def _updated(self, variable: Variable) -> Variable:
        if variable.update is None:
            return variable
        if variable.kind is VariableKind.STATE and variable.dtype in FLOAT_DTYPES:
            value = self._value(variable.update)
            if (spread := self.of(value)).extreme and spread.axis is None and spread.degree == 0:
                return dataclasses.replace(variable, update=value, merge=spread.extreme)
            sized = {name for name, coupling in self.couplings if coupling is Coupling.BATCH_SIZE}
            if sized & self.view.ancestors([value], control=False):  # running moments by counts, say
                self.couplings.append((value.node, Coupling.STATE))
            return dataclasses.replace(variable, update=self._scaled(variable.update, Coupling.STATE))
        if variable.kind is VariableKind.STATE and not self._alike(self.of(variable.update)):
            self.couplings.append((variable.update.node, Coupling.STATE))
        if variable.kind is VariableKind.METRIC:
            coupled = self.aside & self.view.ancestors([variable.update], control=False)
            update = None if coupled else self._running(variable)
            if update is not None:
                return dataclasses.replace(variable, update=update)
            self.couplings.append((variable.update.node, Coupling.METRIC))
        return variable

    def _alike(self, spread: Spread) -> bool:
        return not spread.varies and spread.degree == 0

    def _running(self, variable: Variable) -> Ref | None:
        """Returns a metric's new value: its value and sums over samples; None if it is made of something else."""
        if variable.update is None or variable.value is None:
            return None
        parts = parts_of_update(self.view, variable.update, variable.value)
        if parts is None:
            return None
        own = [self._sum(part.ref) if part.added else self._extreme(part) for part in parts]
        sums = [ref for ref in own if ref is not None]
        if len(sums) < len(parts) or sums == [part.ref for part in parts]:
            return None if None in own else variable.update
        value, kind = variable.value, {"T": dtype_attr(variable.dtype)}
        for part, ref in zip(parts, sums, strict=True):
            value = self.builder.add(f"{variable.update.node}/running", part.op, [value, ref], **kind)
        return value

    def _extreme(self, part: Part) -> Ref | None:
        """Returns what a running value is compared with; None if it isn't the extreme of samples or a constant."""
        spread = self.of(part.ref)
        return part.ref if spread.constant or spread.extreme == part.op.removesuffix("imum") else None

    def _sum(self, ref: Ref) -> Ref | None:
        """Returns a slice's contribution to a tensor of the whole batch; None if slices' don't add up to it."""
        spread = self.of(ref)
        if self._is_sum(spread):
            return ref
        share = self._share(ref) if spread.linear and dtype_of(self.view, ref) in FLOAT_DTYPES else None
        if share is None:
            return None
        return self._times_weight(share, 1, dtype_of(self.view, ref), f"{ref.node}/contribution", {})

    @staticmethod
    def _is_sum(spread: Spread) -> bool:
        return spread.axis is None and spread.linear and spread.degree == 1

    def of(self, ref: Ref) -> Spread:
        """Returns a tensor's spread."""
        return self.dependence.spreads.get(ref, CONSTANT)

    # ---- contributions

    def _scaled(self, contribution: Ref, coupling: Coupling) -> Ref:
        """Returns the replacement of a value that capture has multiplied by the weight, or of a sum that it hasn't."""
        node, inputs = self.view.nodes[contribution.node], self.view.inputs(contribution.node)
        if node.op == "Identity":
            scaled = self._scaled(inputs[0], coupling)
            return contribution if scaled == inputs[0] else scaled
        weighted = self._is_weighted(node)
        value = inputs[0] if weighted else contribution
        spread = self.of(value)
        stays = spread.degree == (0 if weighted else 1) and spread.axis is None
        share = None if stays else self._share(value)
        if share is None:
            if not (stays and spread.linear) and value.node not in self._coupled:
                self.couplings.append((value.node, coupling))
            return contribution
        return self._times_weight(share, 1, dtype_of(self.view, value), f"{value.node}/contribution", {})

    def _value(self, update: Ref) -> Ref:
        """Returns what capture has multiplied by the weight."""
        node, inputs = self.view.nodes[update.node], self.view.inputs(update.node)
        if node.op == "Identity":
            return self._value(inputs[0])
        return inputs[0] if self._is_weighted(node) else update

    def _is_weighted(self, node: NodeDef) -> bool:
        """Returns whether a node is capture's product with the weight."""
        if node.op != "Mul":
            return False
        weight, factor = self.program.roles.slice.weight, self.view.inputs(node.name)[1]
        origin = self.view.nodes[factor.node]
        return factor == weight or (origin.op == "Cast" and self.view.inputs(origin.name)[0] == weight)

    @functools.cached_property
    def _coupled(self) -> set[str]:
        """Returns the nodes that couple samples, and all that depend on them."""
        return self.view.dependents(name for name, _ in self.dependence.couplings)

    def _share(self, ref: Ref) -> Ref | None:
        """Returns a tensor whose weighted mean over slices is the whole batch's; None if none is known."""
        if ref not in self.shares:
            share = self._contribution(ref)
            if share is None:
                return None
            self.shares[ref] = share
        return self.shares[ref]

    def _contribution(self, ref: Ref) -> Ref | None:
        spread, node = self.of(ref), self.view.nodes[ref.node]
        if spread.axis is not None:
            return None
        if spread.degree == 0:
            return ref
        # A sum of sums, too, is divided term by term: they may be made in several stages.
        combined = self._combined(ref)
        if combined is None and spread.degree is not None:
            marks = {LAYER_ATTR: node.attr[LAYER_ATTR]} if LAYER_ATTR in node.attr else {}
            return self._times_weight(ref, -spread.degree, dtype_of(self.view, ref), f"{node.name}/share", marks)
        return combined

    def _combined(self, ref: Ref) -> Ref | None:
        """Returns the node's result for the shares of inputs that it is linear in; None if there are none."""
        node = self.view.nodes[ref.node]
        inputs = self.view.inputs(node.name)
        if node.op in _LINEAR:
            scaled = [0]
        elif node.op in _SUMS:
            scaled = list(range(len(inputs)))
        elif node.op in ("SelectV2", "Select"):
            scaled = [1, 2]
        elif node.op in ("Mul", "RealDiv", "DivNoNan"):
            scaled = [index for index, own in enumerate(inputs) if not self.of(own).constant]
            varying = [index for index in scaled if self.of(inputs[index]).varies]
            several = len(scaled) > 1 and self.of(ref).degree is not None  # It is a power of the weight at once.
            if not scaled or several or len(varying) > 1 or (node.op != "Mul" and 1 in varying):
                return None
        else:
            return None
        if not all(dtype_of(self.view, inputs[index]) in FLOAT_DTYPES for index in scaled):
            return None
        shares = {index: self._share(inputs[index]) for index in scaled}
        if None in shares.values():
            return None
        copy = copied(node)
        copy.name = self.builder.names.fresh(f"{node.name}/share")
        for index, share in shares.items():
            copy.input[index] = str(share)
        return Ref(self.builder.append(copy).node, ref.output)

    def _times_weight(self, ref: Ref, power: int, dtype: int, name: str, marks: Mapping[str, AttrValue]) -> Ref:
        """Returns a tensor of a dtype, multiplied by a power of the slice's weight."""
        weight = self.program.roles.slice.weight
        weight = self.builder.cast(weight, dtype_of(self.view, weight), dtype, name=f"{weight.node}/cast")
        for _ in range(abs(power)):
            op = "Mul" if power > 0 else "RealDiv"
            ref = self.builder.add(name, op, [ref, weight], T=dtype_attr(dtype), **marks)
        return ref


def _pruned(graph: GraphDef, roles: Roles) -> GraphDef:
    """Removes replaced nodes."""
    wanted = [roles.loss, *roles.outputs, *(variable.update for variable in roles.variables)]
    wanted += [normalizer.of_whole_batch for normalizer in roles.normalizers]
    used = Graph(graph).ancestors([ref for ref in wanted if ref is not None], control=False)
    used |= {ref.node for ref in (*roles.inputs, *roles.scalars)}
    pruned = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        if node.name in used:
            pruned.node.append(node)
            set_inputs(pruned.node[-1], data_inputs(node), [name for name in control_inputs(node) if name in used])
    return pruned
