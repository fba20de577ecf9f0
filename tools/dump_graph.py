r"""Writes what training a model with a plan would run: the graph after every pass, drawings, schedule and timelines.

    dapple-dump --model=gpt --plan=3:1 --global_batch_size=32 --output_dir=runs/graphs
    dapple-dump --model=my.package:build --plan=plan.json --cluster=local:4 --output_dir=runs/graphs
    dapple-dump --model=bert --plan=plan.json --cluster=cluster.json --profile=profile.json \
        --output_dir=runs/graphs

Nothing is run: the cluster may be a description of devices that don't exist, and the model isn't trained. With
--profile, simulated timelines are added; for a cluster with GPUs it is told which operators have no kernels there, and
which copies GPUs wait for. Open index.html in --output_dir first; it describes all files. Files of an earlier dump
there are replaced, others are left; a file in the way is an error.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.model_flags import ClusterFlag, ModelFlags, PlanFlags, ProfileFlags
from dapple_tf.tools.shapes import cuts_by_parameters, cuts_by_profile

FLAGS = flags.FlagValues()

_MODEL = ModelFlags(FLAGS, data=True)
_CLUSTER = ClusterFlag(FLAGS)
_PLAN = PlanFlags(FLAGS, batch=32)
_PROFILE = ProfileFlags(FLAGS, alternative="Without it, nothing is simulated.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Required: the folder to write to.", flag_values=FLAGS)


def main() -> None:
    """Captures the model, writes the dump and prints where it is."""
    from dapple_tf.dumps.dump import dump_model
    from dapple_tf.frontend.batch import spec_of

    command.check(bool(_OUTPUT_DIR.value), "--output_dir isn't given; see --help")
    _PLAN.early_check()
    profile = _PROFILE.profile() if _PROFILE.given else None
    data, cluster = _MODEL.data(), _CLUSTER.cluster()
    model = _MODEL.build()
    _PLAN.check_layers(model)
    if profile is None:
        plan = _PLAN.plan(lambda replicas: cuts_by_parameters(model, replicas))
    else:
        plan = _PLAN.plan(lambda replicas: cuts_by_profile(profile, replicas))
    spec = spec_of(model, *data.example(model, plan.global_batch_size))
    page = dump_model(_OUTPUT_DIR.value, model, cluster, plan, profile, spec=spec)
    told = "".join(f"\n{path.read_text(encoding='utf-8')}" for path in page.parent.glob("train/gpus.txt"))
    sys.stdout.write(f"{plan}\n{told}\nThe dump is in {_OUTPUT_DIR.value}; open {page}\n")


def run() -> NoReturn:
    """Runs the console command."""
    command.start(main, FLAGS)


if __name__ == "__main__":
    run()
