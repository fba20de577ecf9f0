"""Random plans that mix all levels, and the optimizers that a plan allows.

A plan has any schedule, stages that differ in replicas, slices and recomputation, with operators that are placed one by
one or with shards of some kind, and with carried updates, relays, backwards in pieces and all-reduces by server. `Plan`
refuses many combinations: these are drawn again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.tools.evaluation.training_comparison import Batch

_TRIES = 1000
"""The most plans that are drawn for a model until one is allowed."""
_DEVICES = 6
"""The most devices of all stages, before operators are placed on groups and weight gradients elsewhere."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model.

    Attributes:
        about: what it is, in a few words.
        build: function that returns the model, not compiled; equal values for equal seeds of Keras.
        cuts: names of layers after which it may be cut, in order.
        batch: draws inputs, labels and weights of a number of samples.
        losses: function that returns its losses.
        metrics: function that returns its metrics.
    """

    about: str
    build: Callable[[], keras.Model]
    cuts: tuple[str, ...]
    batch: Callable[[np.random.Generator, int], Batch]
    losses: Callable[[], Any]
    metrics: Callable[[], Any] = list


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
        model.compile(
            OPTIMIZERS[self.optimizer](), self.model.losses(), metrics=self.model.metrics(), jit_compile=False
        )
        return model

    @property
    def cluster(self) -> dapple.Cluster:
        """Local devices, as if they were on these servers, with links that needn't be measured."""
        local = dapple.Cluster.local(sum(self.servers), kind="cpu")
        numbers = [server for server, count in enumerate(self.servers) for _ in range(count)]
        pairs = zip(local.devices, numbers, strict=True)
        devices = tuple(dataclasses.replace(device, server=server) for device, server in pairs)
        bandwidth, latency = 1e10, 1e-6
        return dataclasses.replace(
            local,
            devices=devices,
            intra_bandwidth=bandwidth,
            intra_latency=latency,
            inter_bandwidth=bandwidth,
            inter_latency=latency,
        )


def fields_text(plan: dapple.Plan) -> str:
    """Returns the options of a plan that aren't as by default."""
    simplest = dapple.Plan.data_parallel(1, 1).options
    required = ("cuts", "devices", "micro_batches", "global_batch_size")
    return ", ".join(
        f"{name}={value!r}" for name, value in plan.options.items() if name in required or value != simplest[name]
    )


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
