"""Memory from a trace: each buffer once, peaks beyond what stays, and no tensor taken for another."""

from __future__ import annotations

import pytest
import zoo
from profiled import captured
from programs import HOST, layout, staged, step_of, two_layers, updated
from tensorflow.core.framework import step_stats_pb2, types_pb2

from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.frontend.capture import build
from dapple_tf.frontend.layer_cuts import with_functions, with_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.layer_memory import StepTrace, kept_tensors, static_sizes, variable_bytes
from dapple_tf.measuring.timed_step import LAST
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.tasks import Phase, Task

SAMPLES, ADDRESS = 3, 100


class Written:
    """A trace of ``two_layers`` cut in two, written by hand: a task every 100 microseconds, from 1000 on."""

    def __init__(self) -> None:
        self.program = updated(staged(two_layers(), "a"), layout([1, 1], 4, 2))
        self.step = step_of(self.program)
        self.stats = step_stats_pb2.StepStats()
        self.device = self.stats.dev_stats.add(device=HOST)
        tasks = ((0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD))
        self.start = {Task(*task, LAST): 1000 + 100 * index for index, task in enumerate(tasks)}
        self.nodes = {}
        for task, start in self.start.items():
            node = self.device.node_stats.add(node_name=f"x/{self.step.entry[task]}", all_start_micros=start)
            node.all_end_rel_micros = 90
            self.nodes[task] = node
            stage = self.program.stages[task.stage]
            forward = task.phase is Phase.FORWARD
            function = stage.forward if forward else stage.backward
            assert function is not None
            for slot in range(len(function.outputs)):
                tensor = node.output.add(slot=slot).tensor_description
                tensor.dtype = types_pb2.DT_FLOAT
                tensor.shape.dim.add(size=10)
                tensor.allocation_description.ptr = ADDRESS + forward * task.stage  # all of a task share one buffer

    def allocate(self, task: Task, after: int, size: int) -> None:
        used = self.nodes[task].memory.add(allocator_name="cpu")
        used.allocation_records.add(alloc_micros=self.start[task] + after, alloc_bytes=size)

    def read(self) -> StepTrace:
        return StepTrace(self.stats, self.program, self.step, HOST, "x", SAMPLES)


def test_a_buffer_counts_for_the_first_stage_that_keeps_it() -> None:
    written = Written()
    kept = [kept_tensors(written.program, stage) for stage in (0, 1)]
    assert all(kept)
    assert written.read().kept_bytes(kept) == [40, 40]
    for output in written.nodes[Task(1, Phase.FORWARD, LAST)].output:  # The second only hands on what it was given.
        output.tensor_description.allocation_description.ptr = ADDRESS
    assert written.read().kept_bytes(kept) == [40, 0]


def test_peaks_are_beyond_what_stays_and_what_is_handed_on() -> None:
    written = Written()
    forward, backward = Task(1, Phase.FORWARD, LAST), Task(1, Phase.BACKWARD, LAST)
    for after, size in ((0, 1000), (10, 300), (20, -1000)):  # 300 stay
        written.allocate(forward, after, size)
    assert written.read().temporary_bytes(1) == 1000
    for after, size in ((0, 2000), (10, 40), (20, -2000)):  # a gradient of 40 bytes goes to the first stage
        written.allocate(backward, after, size)
    assert written.read().temporary_bytes(1) == 2000
    assert written.read().temporary_bytes(0) == 0


def test_results_that_were_removed_are_not_mistaken_for_others() -> None:
    written = Written()
    del written.nodes[Task(1, Phase.FORWARD, LAST)].output[0]
    with pytest.raises(ProfileError, match=r"'stage1_forward' has \d+ results, but a trace shows \d+"):
        written.read()


def test_a_trace_of_another_device_tells_nothing() -> None:
    written = Written()
    written.device.device = "/job:localhost/replica:0/task:0/device:GPU:7"
    with pytest.raises(ProfileError, match="doesn't tell the size"):
        written.read().kept_bytes([kept_tensors(written.program, 0)])


def test_static_sizes_are_those_of_the_slice() -> None:
    program = staged(two_layers(), "a", recompute="min_cut")
    few, many = (static_sizes(program, [(2,)], samples) for samples in (2, 4))
    assert few and few.keys() == many.keys()
    assert all(size <= many[key] <= 2 * size for key, size in few.items())


def test_each_variable_counts_once() -> None:
    model = zoo.tied()
    spec = ExampleBatch.of(model).spec
    table = VariableTable(model)
    build(model, table, spec)
    cuts = ("embedding", "shared#0", "middle", "shared#1", "last")
    program = with_functions(with_gradients(captured(model), cuts), "stages_")
    counted = variable_bytes(program, group_updates(model, table, program), table)
    sizes = [4 * int(variable.value.numpy().size) for variable in model.trainable_variables]
    assert sum(counted.parameters) + sum(group.parameter_bytes for group in counted.shared) == sum(sizes)
    # Adagrad has one slot for each, and scalars of its own that belong to no layer.
    assert sum(counted.slots) + sum(group.slot_bytes for group in counted.shared) == sum(sizes)
    assert [group.layers for group in counted.shared] == [(0, 5), (1, 3)]
    assert sum(counted.state) == 0
