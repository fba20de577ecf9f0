"""Passes in order, with the verifier and instruments between them."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import ClassVar

import pytest
from google.protobuf import text_format
from programs import HOST, apply, copied, layout, owners, staged, step_of, two_layers, two_stages, unchanged

from dapple_tf.execution.step_passes import PASSES, pipeline
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import Program
from graph_passes.ir.text import graph_text
from graph_passes.pass_manager import Dump, Pass, Timing, run_passes
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat

STAGE_PASSES: tuple[Pass, ...] = (AssignStages(("a",)), BuildForward(), BuildBackward(), Partition())


@dataclasses.dataclass(frozen=True)
class Fails:
    """Can't do what it was asked to."""

    name: ClassVar[str] = "fails"

    def run(self, program: Program) -> Program:
        raise PassError("it can't")


@dataclasses.dataclass(frozen=True)
class Breaks:
    """Leaves a node behind that reads nothing that exists."""

    name: ClassVar[str] = "breaks"

    def run(self, program: Program) -> Program:
        broken = copied(program)
        broken.graph.node.add(name="broken", op="Identity", input=["nowhere"])
        return broken


def test_passes_run_one_after_another_and_the_input_stays() -> None:
    program = two_layers()
    with unchanged(program):
        result = run_passes(program, STAGE_PASSES)
    assert result == staged(program, "a")


def test_no_passes_give_the_program_itself() -> None:
    assert run_passes(two_layers(), []) is two_layers()


def test_an_error_names_the_pass_and_those_that_had_run() -> None:
    with pytest.raises(PassError) as caught:
        run_passes(two_layers(), [*STAGE_PASSES[:2], Fails(), *STAGE_PASSES[2:]])
    assert str(caught.value) == "pass fails (after assign_stages, build_forward): it can't"
    assert str(caught.value.__cause__) == "it can't"


def test_an_error_of_the_first_pass_names_it_alone() -> None:
    with pytest.raises(PassError) as caught:
        run_passes(two_layers(), [AssignStages(("c",))])
    assert str(caught.value) == "pass assign_stages: cut 'c' names no layer of the model; its layers are 'a', 'b'"


def test_a_pass_that_breaks_an_invariant_is_named() -> None:
    text = "node 'broken' (Identity) reads nowhere, but there is no node 'nowhere'"
    with pytest.raises(PassError) as caught:
        run_passes(two_layers(), [STAGE_PASSES[0], Breaks()])
    assert str(caught.value) == f"pass breaks (after assign_stages): {text}"


def test_verification_may_be_left_out() -> None:
    assert graph_text(run_passes(two_layers(), [Breaks()], verified=False).graph).endswith(
        "broken = Identity(nowhere)\n"
    )


def test_instruments_see_each_pass_in_order_with_its_number_result_and_seconds() -> None:
    seen: list[tuple[int, str, int, bool]] = []

    def note(number: int, item: Pass, program: Program, seconds: float) -> None:
        seen.append((number, item.name, len(program.stages), seconds >= 0))

    run_passes(two_layers(), STAGE_PASSES, instruments=[note], first=3)
    names = ("assign_stages", "build_forward", "build_backward", "partition")
    assert seen == [(number, name, 2, True) for number, name in enumerate(names, start=3)]


def test_instruments_do_not_see_a_pass_that_failed() -> None:
    timing = Timing()
    with pytest.raises(PassError):
        run_passes(two_layers(), [STAGE_PASSES[0], Breaks()], instruments=[timing])
    assert list(timing.seconds) == ["assign_stages"]


def test_timing_adds_up_the_seconds_of_passes_of_one_name() -> None:
    timing = Timing()
    for seconds in (1.0, 2.0):
        timing(1, Fails(), two_layers(), seconds)
    timing(2, Breaks(), two_layers(), 0.5)
    assert timing.seconds == {"fails": 3.0, "breaks": 0.5}


def parsed(path: pathlib.Path) -> GraphDef:
    return text_format.Parse(path.read_text(), GraphDef())


def test_a_dump_has_the_graph_after_each_pass_and_the_stages_while_they_are_built(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "new" / "folder"
    program = run_passes(two_layers(), STAGE_PASSES, instruments=[Dump(target)])
    step = Replicate(layout([1, 1], 2), HOST, owners(program))
    run_passes(program, [step, SplitConcat()], instruments=[Dump(target)], first=pipeline().number(step))
    names = sorted(path.name for path in target.iterdir())
    assert names == [
        "01_assign_stages.pbtxt",
        *(
            f"{name}{part}.pbtxt"
            for name in ("02_build_forward", "03_build_backward", "04_partition")
            for part in ("", ".stage0", ".stage1")
        ),
        "05_replicate.pbtxt",
        "06_split_concat.pbtxt",
    ]
    assert parsed(target / "01_assign_stages.pbtxt") == apply(two_layers(), AssignStages(("a",))).graph
    assert parsed(target / "03_build_backward.stage1.pbtxt") == two_stages().stages[1].graph
    functions = parsed(target / "04_partition.stage1.pbtxt").library.function
    assert [function.signature.name for function in functions] == ["stage1_forward", "stage1_backward"]
    step_graph = apply(two_stages(), step).graph
    assert parsed(target / "05_replicate.pbtxt") == step_graph
    assert parsed(target / "05_replicate.pbtxt").library.function


def test_a_dumped_graph_tells_layers_and_stages() -> None:
    text = text_format.MessageToString(apply(two_layers(), AssignStages(("a",))).graph)
    again = text_format.Parse(text, GraphDef())
    roles = {each.name: (each.attr["_dapple_layer"].s, each.attr["_dapple_stage"].i) for each in again.node}
    assert roles["a/tanh"] == (b"a", 0)
    assert roles["b/matmul"] == (b"b", 1)


def test_passes_are_frozen_dataclasses_named_as_their_files() -> None:
    for slot in PASSES:
        assert dataclasses.is_dataclass(slot.pass_type)
        assert slot.pass_type.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert f"graph_passes.passes.{slot.name}" == slot.pass_type.__module__


def test_the_step_that_passes_build_has_no_schedule_before_one_is_given() -> None:
    program = apply(two_stages(), Replicate(layout([1, 1], 2), HOST, owners(two_stages())))
    assert step_of(program).schedule is None
