"""An order of tasks of one's own: checked, simulated and drawn beside the built-in ones.

    python docs/examples/own_schedule.py --image=schedules.svg

A policy is a function that says for each device which job comes after which; docs/extending.md explains it. This one is
1F1B whose stages run ahead by one more micro-batch than `dapple_a` does. Whether that pays depends on how long
transfers take; it costs memory for sure.
"""

import argparse
import dataclasses

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.schedules.policy import Job, Orders, Phase, Policy, ScheduleRequest
from dapple_tf.view.image import draw_timelines
from dapple_tf.view.text import timeline_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--image", help="draw the timelines here, as .svg or .png")
arguments = parser.parse_args()

STAGES, MICRO_BATCHES = 4, 8


def run_ahead(request: ScheduleRequest) -> Orders:
    """1F1B in which every stage but the last begins with a forward more."""
    orders: Orders = {}
    for stage, devices in enumerate(request.devices):
        left = request.stages - stage
        warm_up = request.limit(stage, left + 1 if left > 1 else 1)
        forwards = [Job(stage, Phase.FORWARD, number) for number in range(request.micro_batches)]
        order = forwards[:warm_up]
        for number in range(request.micro_batches):
            order += [Job(stage, Phase.BACKWARD, number), *forwards[warm_up + number : warm_up + number + 1]]
        orders |= {device: order for device in devices}
    return orders


RUN_AHEAD = Policy("run_ahead", run_ahead)

profile = load_text("bert-48")
cluster = dapple.Cluster.from_json('{"format": "dapple_tf.cluster/1", "servers": [{"devices": 4}]}')
layers = [layer.name for layer in profile.layers]
cuts = [layers[len(layers) * stage // STAGES - 1] for stage in range(1, STAGES)]
plan = dapple.Plan.straight(cuts, MICRO_BATCHES * 2, MICRO_BATCHES)

timelines = []
for schedule in ("gpipe", "dapple_a", RUN_AHEAD):
    step = dapple.simulate(dataclasses.replace(plan, schedule=schedule), profile, cluster)
    peak = max(step.peak_bytes.values()) / 2**30
    print(f"{schedule!s:<10} step {step.latency * 1e3:7.1f} ms, {peak:.2f} GiB on the fullest device")
    timelines.append(step.drawn(str(schedule)))
print(timeline_text(timelines[1:]))
if arguments.image:
    draw_timelines(timelines, arguments.image, title="Schedules of four stages and eight micro-batches")
