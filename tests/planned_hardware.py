"""A small profile, cluster and plan for tests of tools, as files that their flags name."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor

LAYERS = ("embedding", "block_0", "block_1", "block_2", "block_3", "logits")


def profile() -> Profile:
    """Six layers whose times and sizes are easily told apart."""
    layers = [
        LayerProfile(
            name,
            Cost(1e-4, 1e-3 * (1 + index % 2)),
            Cost(1e-4, 2e-3 * (1 + index % 2)),
            backward_weight=Cost(5e-5, 1e-3 * (1 + index % 2)),
            residual_bytes=Cost(0, 2**20),
            output_bytes=Cost(0, 2**18),
            parameter_bytes=2**22,
            slot_bytes=2**23,
            apply_seconds=1e-4,
        )
        for index, name in enumerate(LAYERS)
    ]
    tensors = [Tensor(index, (index + 1,), Cost(0, 2**18)) for index in range(len(layers) - 1)]
    return Profile("small", "a device", (1, 4), tuple(layers), tuple(tensors), step_seconds=1e-3, task_seconds=1e-5)


def cluster(devices: tuple[int, ...] = (2, 2), memory: int | None = 2**30, **links: float) -> dapple.Cluster:
    """A description of servers with so many devices each."""
    given = {"intra_bandwidth": 1e10, "inter_bandwidth": 1e9, "intra_latency": 1e-5, "inter_latency": 1e-4} | links
    numbered = [(server, index) for server, count in enumerate(devices) for index in range(count)]
    return dapple.Cluster(
        tuple(
            dapple.Device(f"/job:worker/replica:0/task:{server}/device:GPU:{index}", server, memory)
            for server, index in numbered
        ),
        real=False,
        **given,
    )


def plan(**changes: object) -> dapple.Plan:
    """Two stages, three replicas and one."""
    options = {"micro_batches": 4, "global_batch_size": 24} | changes
    return dapple.Plan.manual(["block_3"], [[0, 1, 2], [3]], **options)  # type: ignore[arg-type]


class Files(NamedTuple):
    """Where they are."""

    profile: pathlib.Path
    cluster: pathlib.Path
    plan: pathlib.Path

    @property
    def flags(self) -> list[str]:
        """Flags of all three."""
        return [f"--profile={self.profile}", f"--cluster={self.cluster}", f"--plan={self.plan}"]


def write(folder: pathlib.Path) -> Files:
    """Writes all three into a folder."""
    files = Files(folder / "profile.json", folder / "cluster.json", folder / "plan.json")
    profile().save(files.profile)
    cluster().save(files.cluster)
    plan().save(files.plan)
    return files
