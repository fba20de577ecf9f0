"""Plans that mix all options train as plain Keras does: each value of an option, and each pair that plans allow.

Plans are drawn at random. Those of `SEEDS` have every pair of values that occurs among many draws, in little time: two
steps in float64, and for some a third one with a smaller batch that leaves some slices empty.

    python tests/test_random_plans.py  # prints other seeds, if what can be drawn has changed
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import use_float64
from keras import layers, ops
from test_plan_record import profile_of, through_the_chain

import dapple_tf as dapple
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.operators import step_placer
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.tools.evaluation.random_blocks import LookUp
from dapple_tf.tools.evaluation.random_placements import random_placement
from dapple_tf.tools.evaluation.random_plans import (
    LEVELS,
    OPTIMIZERS,
    Drawn,
    MixedPlan,
    allowed_optimizers,
    allowed_plan,
)
from dapple_tf.tools.evaluation.training_comparison import Batch, largest_difference, train_on_batch
from graph_passes.ir.tasks import Schedule

POOL = 4000
"""Number of plans among which all pairs occur that plans allow."""
CUTS = "abcde"
"""Layers of each model after which it may be cut."""
TOLERANCE = 1e-10
"""The most that a variable or slot differs by, relative to what training has changed (see `training_comparison`)."""
SIZES = (16, 16, 5)
"""Samples of the batches of three steps, or of the first two of these."""
SEEDS = (
    53, 499, 628, 934, 1370, 1409, 1558, 1668, 1751, 1823, 1829, 2130, 2819, 2970, 3033, 3050, 3351, 4081, 4400, 4561,
    4562, 4715, 4729, 4792, 5047, 5498, 5567, 5711, 5751, 5766, 5890, 5938, 6095, 6226, 7037, 7080, 7194, 7195, 7603,
    7731, 7829,
)  # fmt: skip


# ---- models: weights in two stages, skip connections, rows of embeddings, unlike losses and inputs


class Again(layers.Layer):  # type: ignore[misc]
    """Appends rows of an embedding that another layer looks up, too."""

    def __init__(self, embedding: layers.Layer, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any, words: Any) -> Any:
        """[batch, width] and [batch, places] -> [batch, width + places * width of the embedding]."""
        return ops.concatenate([x, layers.Flatten()(self.embedding(words))], axis=1)


def words() -> keras.Model:
    """Sequences and a user; one table is read in the first and in a later layer, another for places."""
    tokens, user = keras.Input((4,), dtype="int32"), keras.Input((1,))
    embedding = layers.Embedding(125, 3, name="embedding")
    places = LookUp(62, 3, lambda table, x: x + table(ops.arange(ops.shape(x)[1]) * 7), name="places")
    x = layers.Flatten(name="a")(places(embedding(tokens)))
    x = layers.Concatenate(name="b")([x, layers.Flatten()(layers.Embedding(67, 2, name="users")(user))])
    x = layers.Dense(4, activation="tanh", name="c")(x)
    x = Again(embedding, name="d")(x, tokens[:, ::2])
    x = layers.Dense(4, activation="gelu", name="e")(x)
    return keras.Model([tokens, user], layers.Dense(3, name="logits")(x))


def image() -> keras.Model:
    """Two inputs by name, convolutions, and two outputs with losses of their own."""
    pixels, vector = keras.Input((4, 4, 2), name="pixels"), keras.Input((3,), name="vector")
    x = layers.Conv2D(3, 2, activation="tanh", name="a")(pixels)
    x = layers.Add(name="b")([x, layers.Conv2D(3, 1, name="beside")(x)])
    x = layers.Flatten()(layers.AveragePooling2D(2, 1)(x))
    x = layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.01), name="c")(x)
    x = layers.LayerNormalization(name="d")(layers.Concatenate()([x, vector]))
    x = layers.Dense(4, activation="gelu", name="e")(x)
    outputs = {"classes": layers.Dense(3, name="classes")(x), "numbers": layers.Dense(2, name="numbers")(x)}
    return keras.Model({"pixels": pixels, "vector": vector}, outputs)


def skips() -> keras.Model:
    """Layers that are read much later, one of them used in three stages."""
    features = keras.Input((4,))
    tied = layers.Dense(4, activation="tanh", name="tied")
    x = early = layers.Activation("linear", name="a")(tied(features))
    x = layers.Dense(4, activation="tanh", name="b")(x)
    x = layers.Add(name="c")([tied(x), early])
    x = layers.Dense(4, activation="tanh", name="d")(x)
    x = layers.Add(name="e")([x, early])
    return keras.Model(features, layers.Dense(2, name="outputs")(tied(x)))


def _words(rng: np.random.Generator, samples: int) -> Batch:
    """Some words count from the end; a few samples have most rows in common."""
    users = rng.integers(0, 9, (samples, 1)).astype("float64")
    return [rng.integers(-20, 20, (samples, 4)).astype("int32"), users], rng.integers(0, 3, samples), None


def _image(rng: np.random.Generator, samples: int) -> Batch:
    x = {"pixels": rng.normal(size=(samples, 4, 4, 2)), "vector": rng.normal(size=(samples, 3))}
    y = {"classes": rng.integers(0, 3, samples), "numbers": rng.normal(size=(samples, 2))}
    return x, y, dict(zip(y, rng.uniform(0.5, 2.0, (2, samples)), strict=True))


def _skips(rng: np.random.Generator, samples: int) -> Batch:
    return rng.normal(size=(samples, 4)), rng.normal(size=(samples, 2)), rng.uniform(0.5, 2.0, samples)


def _classes() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


MODELS = {
    "words": Drawn("words", words, tuple(CUTS), _words, _classes),
    "image": Drawn("image", image, tuple(CUTS), _image, lambda: {"classes": _classes(), "numbers": "huber"}),
    "skips": Drawn("skips", skips, tuple(CUTS), _skips, lambda: "mse"),
}


# ---- plans


def draw(seed: int) -> MixedPlan:
    """Draws a model, an optimizer, and a plan for batches of the same size, which all such models share."""
    rng = np.random.default_rng([43, seed])
    while True:
        plan, servers = allowed_plan(rng, CUTS, LEVELS[seed % len(LEVELS)])
        try:
            plan = dataclasses.replace(plan, global_batch_size=SIZES[0])
            break
        except dapple.PlanError:
            continue
    model = "words" if "rows" in plan.shards else str(rng.choice([*MODELS]))
    optimizer = str(rng.choice(allowed_optimizers(plan)))
    more = not plan.compiled and (plan.carried_updates > 0 or rng.random() < 0.5)
    sizes = SIZES if more else SIZES[:2]
    return MixedPlan(seed, MODELS[model], optimizer, plan, servers, sizes)


FEATURES: Mapping[str, Callable[[dapple.Plan], bool]] = {
    "stages": lambda plan: plan.num_stages > 1,
    "placed operators": lambda plan: bool(plan.spread_stages),
    "replicas of placed operators": lambda plan: bool(plan.spread_stages) and max(plan.replicas) > 1,
    "row_shards": lambda plan: "rows" in plan.shards,
    "optimizer_shards": lambda plan: "optimizer" in plan.shards,
    "unlike recomputation": lambda plan: len({stage.recompute for stage in plan.stages}) > 1,
    "unlike replicas": lambda plan: len(set(plan.replicas)) > 1,
    "unlike slices": lambda plan: any(stage.shares for stage in plan.stages),
    "micro-batches": lambda plan: plan.micro_batches > 1,
    "chunks": lambda plan: len(set(itertools.chain(*plan.devices))) < sum(map(len, plan.devices)),
    "carried_updates": lambda plan: plan.carried_updates > 0,
    "backward_cuts": lambda plan: bool(plan.backward_cuts),
    "relays": lambda plan: bool(plan.relays),
    "all_reduce by server": lambda plan: any(stage.all_reduce != "flat" for stage in plan.stages),
    "reverse_first_k": lambda plan: plan.reverse_first_k > 0,
    "warm_up": lambda plan: plan.warm_up is not None,
    "jit_compile": lambda plan: plan.compiled,
}
"""What plans mix: a name, and whether a plan has it."""


def values_of(drawn: MixedPlan) -> set[tuple[str, str]]:
    """Options with the values that a plan has of them."""
    plan = drawn.plan
    kinds = {name for name, has in FEATURES.items() if has(plan)}
    modes = {stage.recompute for stage in plan.stages}
    even = plan.global_batch_size % (plan.micro_batches * max(plan.replicas)) == 0
    return {
        *(("feature", kind) for kind in kinds),
        *(("recompute", mode) for mode in modes),
        ("policy", str(plan.schedule)),
        ("optimizer", drawn.optimizer),
        ("model", drawn.model.about),
        ("stages", str(min(3, plan.num_stages))),
        ("slices", "even" if even else "uneven"),
        ("steps", str(len(drawn.sizes))),
    }


INNER = {"feature", "recompute"}
"""Options that meet each other, and the others: these know nothing of each other."""
SEPARATE = {("feature", "placed operators"), ("feature", "replicas of placed operators")}
"""They needn't meet a policy, an optimizer, and so on."""
UPDATES = {("feature", name) for name in ("row_shards", "optimizer_shards", "carried_updates")}
"""What optimizers meet."""
COMPILED = ("feature", "jit_compile")
"""It meets nothing: each stage takes much longer."""


def meet(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two values are to be drawn together."""
    pair, kinds = {one, other}, {one[0], other[0]}
    if COMPILED in pair or not kinds & INNER:
        return False
    return bool(pair & UPDATES) if "optimizer" in kinds else kinds <= INNER or not pair & SEPARATE


def pairs_of(drawn: MixedPlan) -> set[Any]:
    """These values and their pairs."""
    values = sorted(values_of(drawn))
    return {*values, *(pair for pair in itertools.combinations(values, 2) if meet(*pair))}


def seconds(drawn: MixedPlan) -> float:
    """About how long it takes to train by a plan."""
    plan, model = drawn.plan, {"skips": 0.0, "words": 0.5, "image": 0.7}[drawn.model.about]
    tasks = plan.micro_batches * sum(plan.replicas)
    each = (0.4 if plan.operator_devices else 0.01) + 0.1 * plan.compiled
    return 0.3 * len(drawn.sizes) + model + each * tasks


def choose(count: int) -> list[int]:
    """Seeds of plans that have all pairs of the pool: greedily, of so many, then without those that add none."""
    plans = [draw(seed) for seed in range(count)]
    pairs = [pairs_of(drawn) for drawn in plans]
    wanted = set().union(*pairs[:POOL])
    missing, own = set(wanted), [0.3 + seconds(drawn) for drawn in plans]
    queue = [(-math.inf, seed) for seed in range(count)]
    seeds: list[int] = []
    while missing:
        _, seed = heapq.heappop(queue)
        gain = -len(pairs[seed] & missing) / own[seed] ** 0.6
        if queue and gain > queue[0][0]:
            heapq.heappush(queue, (gain, seed))
            continue
        missing -= pairs[seed]
        seeds.append(seed)
    for seed in sorted(seeds, key=own.__getitem__, reverse=True):
        others = set().union(*(pairs[other] for other in seeds if other != seed))
        if pairs[seed] & wanted <= others:
            seeds.remove(seed)
    return seeds


# In an order in which plain Keras trains each model once.
PLANS = sorted(map(draw, SEEDS), key=lambda drawn: (drawn.model.about, drawn.optimizer, len(drawn.sizes)))
DRAWN = [pytest.param(drawn, id=str(drawn.seed)) for drawn in PLANS]


# ---- training


class Plain:
    """A model that plain Keras trains, as many steps as are asked for."""

    def __init__(self, drawn: MixedPlan) -> None:
        plan = dapple.Plan.data_parallel(1, SIZES[0])
        self.model = dataclasses.replace(drawn, seed=0, plan=plan, servers=(1,)).build()
        self.model.run_eagerly = True  # A few steps take less time than a trace.
        self.before = [variable.numpy() for variable in self.model.variables]
        self.batches = batches(drawn.model)
        self.logs: list[Mapping[str, Any]] = []

    def train(self, steps: int) -> None:
        while len(self.logs) < steps:
            self.logs.append(train_on_batch(self.model, self.batches[len(self.logs)]))


PLAIN: dict[tuple[str, str], Plain] = {}


def plain(drawn: MixedPlan) -> Plain:
    """The model after as many steps, the same one for all plans."""
    key, steps = (drawn.model.about, drawn.optimizer), len(drawn.sizes)
    if key not in PLAIN or len(PLAIN[key].logs) > steps:
        PLAIN[key] = Plain(drawn)
    PLAIN[key].train(steps)
    return PLAIN[key]


def batches(model: Drawn) -> list[Batch]:
    rng = np.random.default_rng(43)
    return [model.batch(rng, samples) for samples in SIZES]


def trained_orders(drawn: MixedPlan, cluster: dapple.Cluster) -> list[Schedule]:
    """Trains by a plan on a cluster, compares with plain Keras, and returns the orders in which steps ran tasks."""
    about = f"seed {drawn.seed}: {drawn}"
    own = dataclasses.replace(drawn, seed=0).build()
    costs = dapple.OperatorCosts() if drawn.plan.operator_devices else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_placer, "fd_dps", random_placement(drawn.seed, share=0.2))
        pipelined = dapple.transform(own, cluster, drawn.plan, operator_costs=costs)
        logs = [train_on_batch(pipelined, batch) for batch in batches(drawn.model)[: len(drawn.sizes)]]
    pipelined.sync()
    builds = pipelined._engine.builder.builds.values()
    orders = [made.step.schedule for built in builds for made in built.steps.values()]
    pipelined.close(sync=False)
    expected = plain(drawn)
    difference, where = largest_difference(own, expected.model, expected.before, "float64")
    assert difference <= TOLERANCE, f"{where} differs by {difference:.2g}: {about}"
    for log, other in zip(logs, expected.logs, strict=True):
        assert log == pytest.approx(other, rel=2e-5), f"Keras' metrics are float32 whatever the model is: {about}"
    return orders


@pytest.mark.parametrize("drawn", DRAWN)
def test_every_pair_of_options_trains_as_plain_keras(drawn: MixedPlan) -> None:
    use_float64()
    orders = trained_orders(drawn, drawn.cluster)
    profile = profile_of([*CUTS, "last"], random.Random(drawn.seed))
    assert through_the_chain(drawn.plan, profile, drawn.cluster).costs.schedule in orders, str(drawn)


@pytest.mark.parametrize("drawn", DRAWN)
def test_every_plan_is_emulated_in_the_simulated_order(drawn: MixedPlan) -> None:
    plan = drawn.plan.with_options(operator_devices=None)
    profile = profile_of([*CUTS, "last"], random.Random(drawn.seed))
    simulated = through_the_chain(plan, profile, drawn.cluster)
    emulated = dapple.emulate(plan, profile, drawn.cluster, steps=1, scale=1e-2 / simulated.latency)
    assert emulated.order.orders == simulated.costs.schedule.orders


def test_each_value_of_an_option_and_each_pair_is_drawn() -> None:
    drawn = set().union(*map(values_of, PLANS))
    assert {value for name, value in drawn if name == "feature"} == {*FEATURES}
    assert {value for name, value in drawn if name == "policy"} == {policy.name for policy in BUILT_IN}
    assert {value for name, value in drawn if name == "optimizer"} == {*OPTIMIZERS}
    assert {value for name, value in drawn if name == "recompute"} == {*RECOMPUTE_MODES}
    pairs = set().union(*map(pairs_of, PLANS))
    lacking = {pair for seed in range(POOL) for pair in pairs_of(draw(seed)) if pair not in pairs}
    assert not lacking, "choose other seeds: python tests/test_random_plans.py"


if __name__ == "__main__":
    print(choose(2 * POOL))
