"""Random models with plans that mix all levels, trained by these and with plain Keras: a search for differences.

A seed gives a small model (GPT with a vocabulary; tables, of which one is read in two stages; branches of convolutions
with a second input; or one of `random_models`), an optimizer, and a plan of any schedule whose stages differ in
replicas, slices and recomputation, with operators that are placed one by one or with shards of some kind, and with
carried updates, relays, backwards in pieces and all-reduces by server. `Plan` refuses many combinations: these
are drawn again. Operators are placed at random, not by search, which would keep operators as small as these together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.operators import step_placer
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.tools.evaluation.random_blocks import LookUp
from dapple_tf.tools.evaluation.random_models import Chain
from dapple_tf.tools.evaluation.random_placements import random_placement
from dapple_tf.tools.evaluation.training_comparison import Batch, Comparison, compare_training

layers, ops = keras.layers, keras.ops

TOLERANCE = 1e-10
"""The most that a variable or slot differs by, relative to what training has changed (see `training_comparison`)."""
_STREAM = 22
"""Tells these draws from those of `random_models` with the same seed."""
_TRIES = 1000
"""The most plans that are drawn for a model until one is allowed."""
_DEVICES = 6
"""The most devices of all stages, before operators are placed on groups and weight gradients elsewhere."""
_WORDS, _USERS = 83, 61
"""Rows of tables: at least 20 for each of three replicas, and never a multiple of their number."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model.

    Attributes:
        about: what it is, in a few words.
        build: function that returns the model, not compiled; equal values for equal seeds of Keras.
        cuts: names of layers after which it may be cut, in order.
        batch: draws inputs, labels and weights of a number of samples.
        losses: function that returns its losses.
    """

    about: str
    build: Callable[[], keras.Model]
    cuts: tuple[str, ...]
    batch: Callable[[np.random.Generator, int], Batch]
    losses: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class MixedPlan:
    """A model to train by a plan.

    Attributes:
        seed: what it was drawn with.
        model: the model.
        optimizer: name of its optimizer, see `OPTIMIZERS`.
        plan: the plan.
        servers: number of devices of each server, for all-reduces.
        sizes: samples of each step's batch.
    """

    seed: int
    model: Drawn
    optimizer: str
    plan: dapple.Plan
    servers: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        own = fields_text(self.plan)
        return f"{self.model.about}; {self.optimizer}; {own}; servers {self.servers}, batches {self.sizes}"

    def build(self) -> keras.Model:
        """Returns the compiled model; the same values each time."""
        keras.utils.set_random_seed(self.seed)
        model = self.model.build()
        noise = np.random.default_rng(self.seed)
        for variable in model.trainable_variables:
            variable.assign(variable.numpy() + noise.normal(scale=0.1, size=variable.shape))
        model.compile(OPTIMIZERS[self.optimizer](), self.model.losses(), jit_compile=False)
        return model

    @property
    def cluster(self) -> dapple.Cluster:
        """Local devices, as if they were on these servers."""
        return local_servers(*self.servers)


def local_servers(*servers: int) -> dapple.Cluster:
    """Returns local devices as if they were on servers of these numbers, with links that needn't be measured."""
    local = dapple.Cluster.local(sum(servers), kind="cpu")
    numbers = [server for server, count in enumerate(servers) for _ in range(count)]
    devices = tuple(
        dataclasses.replace(device, server=server) for device, server in zip(local.devices, numbers, strict=True)
    )
    known = dataclasses.replace(
        local, intra_bandwidth=1e10, intra_latency=1e-6, inter_bandwidth=1e10, inter_latency=1e-6
    )
    return dataclasses.replace(known, devices=devices)


def fields_text(plan: dapple.Plan) -> str:
    """Returns the options of a plan that aren't as by default."""
    simplest = dapple.Plan.data_parallel(1, 1).options
    required = ("cuts", "devices", "micro_batches", "global_batch_size")
    return ", ".join(
        f"{name}={value!r}" for name, value in plan.options.items() if name in required or value != simplest[name]
    )


def compare_plan(seed: int) -> tuple[str, Comparison]:
    """Trains a random model by a random plan and by plain Keras; returns its description, and the comparison.

    The float type must be float64.
    """
    drawn = draw_plan(seed)
    rng = np.random.default_rng([_STREAM, seed, 1])
    batches = [drawn.model.batch(rng, size) for size in drawn.sizes]
    costs = dapple.OperatorCosts() if drawn.plan.operator_devices else None
    with mock.patch.object(step_placer, "fd_dps", random_placement(seed)):
        comparison = compare_training(
            drawn.build,
            lambda model: dapple.transform(model, drawn.cluster, drawn.plan, operator_costs=costs),
            batches,
            most=TOLERANCE,
        )
    return str(drawn), comparison


def draw_plan(seed: int) -> MixedPlan:
    """Returns the model and the plan of a seed."""
    rng = np.random.default_rng([_STREAM, seed])
    level = _one_of(rng, LEVELS)
    model = _one_of(rng, _MODELS[:2] if level == "rows" else _MODELS)(rng)
    plan, servers = allowed_plan(rng, model.cuts, level)
    optimizer = _one_of(rng, allowed_optimizers(plan))
    batch = plan.global_batch_size
    sizes = (batch, int(rng.integers(1, batch)), batch)
    return MixedPlan(seed, model, optimizer, plan, servers, sizes)


def allowed_plan(rng: np.random.Generator, cuts: Sequence[str], level: str) -> tuple[dapple.Plan, tuple[int, ...]]:
    """Draws plans until one is allowed; returns it, and the number of devices of each server.

    Args:
        rng: the draws.
        cuts: names of layers after which the model may be cut, in order.
        level: one of `LEVELS`.
    """
    for _ in range(_TRIES):
        try:
            return _draw_plan(rng, cuts, level)
        except dapple.PlanError:
            continue
    raise AssertionError(f"none of {_TRIES} plans is allowed")


def allowed_optimizers(plan: dapple.Plan) -> list[str]:
    """Returns the names of the optimizers that a plan allows."""
    refused = set(_COUPLED if plan.shards else ())
    refused |= set(_ALL_TOGETHER if plan.carried_updates else ())
    return [name for name in OPTIMIZERS if name not in refused]


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


# ---- plans


def _one_of(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


LEVELS = ("placed", "placed", "rows", "rows", "shards", "shards", "stages")
"""What stages have besides replicas, some more often than others: placed operators, or shards of rows or of all."""


def _draw_plan(rng: np.random.Generator, places: Sequence[str], level: str) -> tuple[dapple.Plan, tuple[int, ...]]:
    """Draws a plan and its servers.

    Raises:
        PlanError: there is no such plan.
    """
    devices = _devices(rng, chunks=level != "placed" and rng.random() < 0.4, most=len(places) + 1)
    stages = len(devices)
    cuts = sorted(rng.choice(len(places), stages - 1, replace=False).tolist())
    names = [places[cut] for cut in cuts]
    micro_batches = int(rng.integers(1, 6))
    options: dict[str, Any] = {}

    def perhaps(chance: float, name: str, value: Callable[[], Any]) -> None:
        if rng.random() < chance:
            options[name] = value()

    modes = ("none", "none", "boundary", "min_cut") + (("none", "boundary", "min_cut") if level != "placed" else ())
    perhaps(0.8, "recompute", lambda: [_one_of(rng, modes) for _ in devices])
    perhaps(0.4, "carried_updates", lambda: int(rng.integers(1, 4)))
    perhaps(0.3, "reduction_order", lambda: "first_layers")
    perhaps(0.5, "bucket_bytes", lambda: int(rng.integers(32, 600)))
    perhaps(0.4, "shares", lambda: [[int(rng.integers(1, 4)) for _ in own] for own in devices])
    perhaps(0.2, "warm_up", lambda: sorted(rng.integers(1, micro_batches + 1, stages).tolist(), reverse=True))
    perhaps(0.2, "wait_free", lambda: False)
    perhaps(0.2, "reverse_first_k", lambda: int(rng.integers(1, stages + 1)))
    perhaps(0.08, "jit_compile", lambda: True)
    count = 1 + max(itertools.chain(*devices))
    if level == "placed":
        groups, count = _groups(rng, devices)
        devices = [[group[0] for group in own] for own in groups]
        options["operator_devices"] = groups
    else:
        perhaps(0.4, "backward_cuts", lambda: [name for name in places if name not in names and rng.random() < 0.5])
        perhaps(0.4, "relays", lambda: [stage for stage in range(stages) if rng.random() < 0.6])
        perhaps(0.4, "all_reduce", lambda: [_one_of(rng, ["hierarchical", "hierarchical", "flat"]) for _ in devices])
        rng.random()  # was for an option that is gone; what follows stays as it was drawn
    options |= {"row_shards": True} if level == "rows" else {}
    if level == "shards" or (level == "rows" and rng.random() < 0.4):
        options |= {"optimizer_shards": True}
        rng.integers(2)  # the same
    samples = micro_batches * int(rng.integers(max(map(len, devices)), 6)) + int(rng.integers(0, micro_batches + 1))
    plan = dapple.Plan.manual(names, devices, micro_batches, max(2, samples), _schedule(rng, devices), **options)
    first = int(rng.integers(1, count + 1))
    return plan, (first, count - first) if first < count else (count,)


def _schedule(rng: np.random.Generator, devices: Sequence[Sequence[int]]) -> str:
    """Draws a schedule, among those for a V where the plan has one."""
    vees = len(devices) > 1 and list(devices) == list(devices[::-1]) and rng.random() < 0.7
    return str(
        _one_of(rng, ["zb_v", "v_min", "v_half", "dualpipe_v"] if vees else [policy.name for policy in BUILT_IN])
    )


def _devices(rng: np.random.Generator, *, chunks: bool, most: int) -> list[list[int]]:
    """Draws the devices of each stage, in chunks there and back or in rounds, or each stage on its own."""
    places = int(rng.integers(1, min(4, most) + 1)) if not chunks else int(rng.integers(1, 4))
    replicas = [int(rng.integers(1, 4)) for _ in range(places)]
    while sum(replicas) > _DEVICES:
        replicas[replicas.index(max(replicas))] -= 1
    numbers = iter(range(_DEVICES))
    own = [list(itertools.islice(numbers, count)) for count in replicas]
    if chunks and 2 * places <= most:
        return own + (own[::-1] if rng.integers(2) else own)
    return own


def _groups(rng: np.random.Generator, devices: Sequence[Sequence[int]]) -> tuple[list[list[list[int]]], int]:
    """Gives each replica of a stage a group of devices; returns these, and the number of devices."""
    sizes = [int(rng.integers(1, 4)) for _ in devices]
    sizes[int(rng.integers(len(sizes)))] = 2
    numbers = itertools.count()
    groups = [[list(itertools.islice(numbers, size)) for _ in own] for own, size in zip(devices, sizes, strict=True)]
    return groups, next(numbers)


# ---- models


def _positions(x: Any) -> Any:
    """Adds rows that all samples have in common to ``x``, [batch, places, width]."""
    return LookUp(62, x.shape[-1], lambda table, x: x + table(ops.arange(ops.shape(x)[1]) * 7), name="positions")(x)


class Again(keras.layers.Layer):
    """Appends rows of an embedding that another layer looks up, too."""

    def __init__(self, embedding: keras.layers.Layer, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any, words: Any) -> Any:
        """[batch, width] and [batch, places] -> [batch, width + places * width of the embedding]."""
        return ops.concatenate([x, layers.Flatten()(self.embedding(words))], axis=1)


class TiedLogits(keras.layers.Layer):
    """Logits from the embedding's own table."""

    def __init__(self, embedding: keras.layers.Layer, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        """[batch, places, width] -> [batch, places, words]."""
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def _gpt(rng: np.random.Generator) -> Drawn:
    """Blocks of attention under a vocabulary, whose head is a layer of its own or the embedding's table."""
    blocks, tied = int(rng.integers(1, 3)), bool(rng.integers(3) == 0)

    def build() -> keras.Model:
        tokens = keras.Input((4,), dtype="int32")
        embedding = layers.Embedding(_WORDS, 4, name="embedding")
        x = _positions(embedding(tokens))
        for number in range(blocks):
            y = layers.LayerNormalization(name=f"norm_{number}")(x)
            # A bias of keys has only rounding as its gradient, which some optimizers make as large as any other.
            attention = layers.MultiHeadAttention(2, 2, use_bias=False, name=f"attention_{number}")
            x = layers.Add(name=f"attended_{number}")([x, attention(y, y, use_causal_mask=True)])
            y = layers.Dense(6, activation="gelu", name=f"wide_{number}")(x)
            x = layers.Add(name=f"block_{number}")([x, layers.Dense(4, name=f"narrow_{number}")(y)])
        x = layers.LayerNormalization(name="norm")(x)
        head = TiedLogits(embedding, name="logits") if tied else layers.Dense(_WORDS, name="logits")
        return keras.Model(tokens, head(x))

    def batch(rng: np.random.Generator, samples: int) -> Batch:
        x, y = rng.integers(0, _WORDS, (2, samples, 4)).astype("int32")
        return x, y, None

    inner = [name for number in range(blocks) for name in (f"attended_{number}", f"block_{number}")]
    about = f"GPT of {blocks} blocks{', tied' if tied else ''}"
    return Drawn(about, build, ("positions", *inner, "norm"), batch, _classes)


def _tables(rng: np.random.Generator) -> Drawn:
    """Two tables and plain features; one table is read in the first and in a later layer."""
    penalty = bool(rng.integers(2))

    def build() -> keras.Model:
        words, users = keras.Input((6,), dtype="int32", name="words"), keras.Input((1,), name="users")
        features = keras.Input((3,), name="features")
        embedding = layers.Embedding(_WORDS, 3, name="embedding")
        x = layers.Flatten()(_positions(embedding(words)))
        user = layers.Flatten()(layers.Embedding(_USERS, 2, name="user")(users))
        x = layers.Concatenate(name="joined")([x, user, features])
        own = keras.regularizers.L2(0.01) if penalty else None
        x = layers.Dense(7, activation="tanh", kernel_regularizer=own, name="hidden")(x)
        x = Again(embedding, name="again")(x, words[:, ::2])
        x = layers.Dense(5, activation="gelu", name="merged")(x)
        early = layers.Dense(2, name="early")(x)
        x = layers.Dense(4, activation="tanh", name="last")(x)
        return keras.Model([words, users, features], [early, layers.Dense(3, name="logits")(x)])

    def batch(rng: np.random.Generator, samples: int) -> Batch:
        words = rng.integers(-20, 20, (samples, 6)).astype("int32")
        x = [words, rng.integers(0, _USERS, (samples, 1)).astype("float64"), rng.normal(size=(samples, 3))]
        weights = rng.uniform(0.5, 2.0, (2, samples))
        return x, [rng.normal(size=(samples, 2)), rng.integers(0, 3, samples)], [*weights]

    cuts = ("positions", "joined", "hidden", "again", "merged", "last")
    return Drawn("tables", build, cuts, batch, lambda: ["mse", _classes()])


def _convolutions(rng: np.random.Generator) -> Drawn:
    """Branches of convolutions that are joined and added to what they began with, and a vector beside the image."""
    blocks = int(rng.integers(1, 3))

    def build() -> keras.Model:
        image, vector = keras.Input((6, 6, 2), name="image"), keras.Input((3,), name="vector")

        def conv(x: Any, channels: int, size: int, name: str) -> Any:
            return layers.Conv2D(channels, size, padding="same", activation="tanh", name=name)(x)

        x = conv(image, 4, 3, "stem")
        for number in range(blocks):
            left = conv(conv(x, 3, 1, f"reduce_{number}"), 2, 3, f"left_{number}")
            right = conv(x, 1, 1, f"right_{number}")
            pooled = conv(layers.AveragePooling2D(3, 1, padding="same")(x), 1, 1, f"pooled_{number}")
            joined = layers.Concatenate(name=f"joined_{number}")([left, right, pooled])
            x = layers.Add(name=f"block_{number}")([x, layers.GroupNormalization(2)(joined)])
        x = layers.GlobalAveragePooling2D(name="pool")(x)
        x = layers.Concatenate(name="both")([x, layers.Dense(2, activation="gelu", name="beside")(vector)])
        x = layers.Dense(5, activation="tanh", name="hidden")(x)
        return keras.Model({"image": image, "vector": vector}, layers.Dense(3, name="logits")(x))

    def batch(rng: np.random.Generator, samples: int) -> Batch:
        x = {"image": rng.normal(size=(samples, 6, 6, 2)), "vector": rng.normal(size=(samples, 3))}
        return x, rng.integers(0, 3, samples), rng.uniform(0.5, 2.0, samples)

    inner = [name for number in range(blocks) for name in (f"joined_{number}", f"block_{number}")]
    return Drawn(f"{blocks} blocks of branches", build, ("stem", *inner, "pool", "both", "hidden"), batch, _classes)


def _chain(rng: np.random.Generator) -> Drawn:
    """A model of `random_models`."""
    while not (chain := Chain(rng)).exact:
        pass
    cuts = tuple(f"block_{number}" for number in range(len(chain.blocks) - 1))
    about = f"{chain.form}: {', '.join(chain.blocks)}; {chain.loss}"
    return Drawn(about, chain.build, cuts, chain.batch, chain.losses)


def _classes() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


_MODELS: tuple[Callable[[np.random.Generator], Drawn], ...] = (_gpt, _tables, _convolutions, _chain)

OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "plain sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd, clipped together": lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True, global_clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3, amsgrad=True),
    "adam, clipped one by one": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3, clipnorm=0.1),
    "adam, scheduled, clipped values": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(1e-2, 1, 0.5), epsilon=1e-3, clipvalue=0.05
    ),
    "adamw, clipped together, averaged": lambda: keras.optimizers.AdamW(
        1e-2, weight_decay=0.01, epsilon=1e-3, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, centered=True, momentum=0.9, epsilon=1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "nadam": lambda: keras.optimizers.Nadam(1e-2, epsilon=1e-3),
    "adam, accumulating": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3, gradient_accumulation_steps=2),
    "adam, scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2, epsilon=1e-3), initial_scale=8.0
    ),
    "lamb": lambda: keras.optimizers.Lamb(1e-2, epsilon=1e-3),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1, epsilon=1e-3),
    "adamax": lambda: keras.optimizers.Adamax(1e-2, epsilon=1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-2),
}
_COUPLED = ("adam, clipped one by one", "lamb")
"""Optimizers that update an element by others of its array, which no shard has all of."""
_ALL_TOGETHER = ("sgd, clipped together", "adamw, clipped together, averaged", "adam, scaled")
"""Optimizers that need all gradients before they update anything, so that no update can be carried on."""
