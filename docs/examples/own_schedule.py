"""An order of tasks of one's own: checked, simulated and drawn beside the built-in ones.

    python docs/examples/own_schedule.py --image=schedules.svg

A schedule is plain data: for each device, its tasks in order. This one is 1F1B whose first stage runs ahead by one
more micro-batch than `dapple_a` does. Whether that pays depends on how long transfers take; it costs memory for sure.
"""

import argparse

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.schedules.schedules import make_schedule, validate
from dapple_tf.view.image import draw_timelines
from dapple_tf.view.text import timeline_text
from graph_passes.ir.tasks import Phase, Schedule, Task

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--profile", default="docs/profiles/bert-48-pbs-2.txt", help="a profile in the DAPPLE format")
parser.add_argument("--image", help="draw the timelines here, as .svg or .png")
arguments = parser.parse_args()

STAGES, MICRO_BATCHES = 4, 8


def run_ahead(stages: int, micro_batches: int, extra: int) -> Schedule:
    """1F1B in which every stage but the last begins with ``extra`` forwards more."""
    orders = {}
    for stage in range(stages):
        warm_up = min(stages - stage + (extra if stage < stages - 1 else 0), micro_batches)
        forwards = [Task(stage, Phase.FORWARD, number, 0) for number in range(micro_batches)]
        backwards = [Task(stage, Phase.BACKWARD, number, 0) for number in range(micro_batches)]
        order = forwards[:warm_up]
        for number, backward in enumerate(backwards):
            order += [backward, *forwards[warm_up + number : warm_up + number + 1]]
        orders[stage] = tuple(order)
    return Schedule("run_ahead", orders)


profile = load_text(arguments.profile, batch_size=2)
cluster = dapple.Cluster.from_json('{"format": "dapple_tf.cluster/1", "servers": [{"devices": 4}]}')
layers = [layer.name for layer in profile.layers]
cuts = [layers[len(layers) * stage // STAGES - 1] for stage in range(1, STAGES)]
plan = dapple.Plan.straight(cuts, MICRO_BATCHES * 2, MICRO_BATCHES)

own = run_ahead(STAGES, MICRO_BATCHES, extra=1)
validate(own, plan.devices, MICRO_BATCHES)  # finds what is missing, twice, or waits for itself
timelines = []
for name in ("gpipe", "dapple_a", "run_ahead"):
    order = own if name == "run_ahead" else make_schedule(name, plan.devices, MICRO_BATCHES)
    step = dapple.simulate(plan, profile, cluster, schedule=order)
    peak = max(step.peak_bytes.values()) / 2**30
    print(f"{name:<10} step {step.latency * 1e3:7.1f} ms, {peak:.2f} GiB on the fullest device")
    timelines.append(step.drawn(name))
print(timeline_text(timelines[1:]))
if arguments.image:
    draw_timelines(timelines, arguments.image, title="Schedules of four stages and eight micro-batches")
