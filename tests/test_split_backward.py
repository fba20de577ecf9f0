"""Bx and Bw: what computes the gradients of received tensors, and what is left for those of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from program_text import read_program
from programs import (
    GRADIENT,
    RESIDUAL,
    attention,
    connected,
    layout,
    mlp,
    node,
    staged,
    stateful_layers,
    step_of,
    tied_layers,
    two_layers,
)

from graph_passes.ir.program import Program, Stage, StageFunction, ValueKind
from graph_passes.ir.tasks import Phase, Task

PROGRAMS: dict[str, tuple[Callable[[], Program], tuple[str, ...]]] = {
    "two layers": (two_layers, ("a",)),
    "mlp": (mlp, ("dense_0",)),
    "attention": (attention, ("norm", "residual")),
    "tied in a stage": (lambda: tied_layers(4), ("layer_1",)),
    "stateful": (stateful_layers, ("a",)),
}
programs = pytest.mark.parametrize("name", PROGRAMS)
policies = pytest.mark.parametrize("recompute", ["none", "boundary", "min_cut"])


def split(name: str, recompute: str = "none") -> Program:
    make, cuts = PROGRAMS[name]
    return staged(make(), *cuts, recompute=recompute, split=range(len(cuts) + 1))


def parts(stage: Stage) -> list[StageFunction]:
    return [function for _, function in stage.phases[1:] if function is not None]


def operations(function: StageFunction) -> set[str]:
    """The nodes of a function, constants apart."""
    return {each.name for each in function.function.node_def if each.op != "Const"}


@policies
@programs
def test_the_parts_together_are_the_whole(name: str, recompute: str) -> None:
    program = split(name, recompute)
    received = {boundary.ref for boundary in program.boundaries}
    for stage in program.stages:
        assert stage.backward is None and stage.forward is not None
        partial = {value for function in parts(stage) for value in function.outputs if value.kind is ValueKind.PARTIAL}
        gradients = {value for value in stage.results if value.kind is not ValueKind.FORWARD}
        sent = {value for value in gradients if value.kind is GRADIENT and value.ref in received}
        if stage.input_grad is not None:
            assert set(stage.input_grad.outputs) == sent | partial
            assert not any(value.kind is ValueKind.PARTIAL for value in stage.input_grad.inputs)
        else:
            assert not sent and not partial
        if stage.weight_grad is not None:
            assert set(stage.weight_grad.outputs) == gradients - sent
            assert partial <= set(stage.weight_grad.inputs)
        else:
            assert gradients == sent
        kept = {value for value in stage.forward.outputs if value.kind is RESIDUAL}
        assert kept == {value for function in parts(stage) for value in function.inputs if value.kind is RESIDUAL}


@programs
def test_nothing_is_computed_twice(name: str) -> None:
    for stage in split(name).stages:
        assert stage.forward is not None
        functions = [stage.forward, *parts(stage)]
        assert sum(len(operations(function)) for function in functions) == len(set().union(*map(operations, functions)))


def test_a_stage_without_parameters_has_no_bw_and_the_first_no_bx() -> None:
    program = read_program("x[?, 2], w[2, 3]\na/matmul = MatMul(x, w)\nb/tanh = Tanh(a/matmul)\nloss = L2Loss(b/tanh)")
    program = staged(program, "a", split=(0, 1))
    first, second = program.stages
    assert (first.input_grad, second.weight_grad) == (None, None)
    assert first.weight_grad is not None and second.input_grad is not None
    # Their tasks are there all the same, for schedules that don't know.
    after = connected(program, layout([1, 1], 4, 2))
    for task in (Task(0, Phase.INPUT_GRAD, 1), Task(1, Phase.WEIGHT_GRAD, 0)):
        assert node(after, step_of(after).entry[task]).op == "NoOp"


def test_bytes_between_bx_and_bw_are_those_that_bw_reads() -> None:
    """h (3 float64) and dy (1) of a slice; the first stage keeps x (2) and the gradient of h (3)."""
    first, second = split("two layers").stages
    assert second.delayed_bytes == ((3 + 1) * 8, 0)
    assert second.residual_bytes.per_sample == (3 + 1) * 8
    assert first.delayed_bytes == ((3 + 3) * 8, 0)
