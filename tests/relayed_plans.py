"""Plans whose stages hand on what they read, and profiles with tensors that many stages read."""

from __future__ import annotations

import dataclasses
import random

from test_simulator import random_case

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor


def relayed_case(seed: int) -> tuple[Plan, Profile, Cluster]:
    """A case of `random_case`, with tensors that several layers read and stages that hand them on."""
    plan, profile, cluster = random_case(seed)
    draw = random.Random(seed)
    count = len(profile.layers)
    tensors = [*profile.tensors]
    for _ in range(draw.randrange(1, 4) if count > 2 else 0):
        maker = draw.randrange(count - 2)
        readers = tuple(sorted(draw.sample(range(maker + 1, count), draw.randrange(2, count - maker))))
        size = Cost(draw.choice([0.0, 2.0]), draw.uniform(1, 20))
        tensors.append(Tensor(maker, readers, size, differentiable=draw.random() < 0.7))
    relays = draw.choice([range(plan.num_stages), draw.sample(range(plan.num_stages), (plan.num_stages + 1) // 2)])
    profile = dataclasses.replace(profile, tensors=tuple(tensors))
    return dataclasses.replace(plan, relays=tuple(relays)), profile, cluster
