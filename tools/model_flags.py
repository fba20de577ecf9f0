"""Flags that several programs share: the model and its data, the cluster, the profile and the plan.

Each class defines its flags in a `flags.FlagValues`, and returns the objects that they stand for. Mistakes raise
`app.UsageError`, which names the flag and its value.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

import dapple_tf as dapple
from dapple_tf.common.data_files import read_text
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.describe.profile_text import PUBLISHED, load_text
from dapple_tf.models import registry
from dapple_tf.models.datasets import DATASETS, GENERATED, READERS, generated
from dapple_tf.models.sources import DataSource, ModelSource
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.tools.command import blamed, check, line
from dapple_tf.tools.shapes import devices_of, is_shape, parse_shape

if TYPE_CHECKING:
    import keras

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


class ModelFlags:
    """``--model``, ``--mixed_precision`` and ``--seed``; with ``data``, ``--dataset`` and ``--length`` too."""

    def __init__(self, values: flags.FlagValues, *, default: str | None = "gpt", data: bool = False) -> None:
        known = ", ".join(registry.MODELS)
        self._model = flags.DEFINE_string(
            "model",
            default,
            f"The model: one of {known}; package.module:function for a function that returns a compiled Keras model "
            f"(:function after it for its data); or a file model.keras.",
            flag_values=values,
        )
        self._precision = flags.DEFINE_enum(
            "mixed_precision",
            "none",
            ["none", *_POLICIES],
            "Type to compute in; variables stay in float32. Not for models from files, which keep their own.",
            flag_values=values,
        )
        self._seed = flags.DEFINE_integer(
            "seed", 0, "Seed of the weights, the data's order and dropout.", flag_values=values
        )
        self._dataset = self._length = None
        if data:
            self._length = flags.DEFINE_integer(
                "length",
                None,
                f"Length of axes that the model leaves open, in generated data (--dataset={GENERATED.name}, "
                f"the default for models from files). By default 128, or another length that the model can be "
                f"computed for.",
                lower_bound=1,
                flag_values=values,
            )
            self._dataset = flags.DEFINE_string(
                "dataset",
                None,
                f"Data to train on: one of {', '.join(DATASETS)}; files, as READER:PATH?option=value&option=value with "
                f"one of the readers {', '.join(READERS)} (a reader without a path reads a small sample; see "
                f"docs/data.md); package.module:function for a function of the batch size that returns a "
                f"tf.data.Dataset of batches, or arrays (x, y). By default the model's own.",
                flag_values=values,
            )

    @property
    def given(self) -> bool:
        """Whether the flag names a model."""
        return self._model.value is not None

    @property
    def seed(self) -> int:
        """Seed of the weights, the data's order and dropout."""
        return int(self._seed.value)

    def source(self) -> ModelSource:
        """Returns the model's source without building the model.

        Raises:
            app.UsageError: there is no such model.
        """
        check(bool(self._model.value), "--model isn't given; see --help")
        with blamed(f"--model={self._model.value}"):
            source = registry.find_model(self._model.value)
        check(
            source.built_here or self._precision.value == "none",
            f"--mixed_precision={self._precision.value}: {source.name} was saved with a type for each layer, which it "
            f"keeps; leave the flag out",
        )
        return source

    def data(self) -> DataSource:
        """Returns the data to train on.

        Raises:
            app.UsageError: there are no such data.
        """
        if self._dataset is None or self._dataset.value is None:
            data = self.source().data
        else:
            with blamed(f"--dataset={self._dataset.value}"):
                data = registry.find_data(self._dataset.value)
        if self._length is None or self._length.value is None:
            return data
        check(
            data is GENERATED,
            f"--length={self._length.value}: the data {data.name!r} have lengths of their own; give "
            f"--dataset={GENERATED.name}, or leave the flag out",
        )
        return generated(self._length.value)

    def build(self) -> keras.Model:
        """Builds and compiles the model, after setting all seeds.

        Raises:
            app.UsageError: there is no such model, or it can't be built.
        """
        import keras

        source = self.source()
        keras.utils.set_random_seed(self.seed)
        before = keras.config.dtype_policy()
        try:
            if self._precision.value != "none":
                keras.config.set_dtype_policy(_POLICIES[self._precision.value])
            with blamed(f"--model={self._model.value}"):
                return source.build()
        finally:
            keras.config.set_dtype_policy(before)


def define_workers_per_server(values: flags.FlagValues) -> flags.FlagHolder[int]:
    """Defines ``--workers_per_server``, for `dapple_tf.Cluster.with_workers_per_server`."""
    return flags.DEFINE_integer(
        "workers_per_server",
        1,
        "Number of workers on each machine, whose addresses follow each other: plans then know which links are fast.",
        lower_bound=1,
        flag_values=values,
    )


class ClusterFlag:
    """``--cluster`` and ``--workers_per_server``."""

    def __init__(self, values: flags.FlagValues, *, default: str | None = "local:4", described: bool = True) -> None:
        """Defines the flags.

        Args:
            values: where to define them.
            default: the cluster; None if it must be given.
            described: whether a description without real devices is allowed.
        """
        self._described = described
        files = " or a JSON file that describes one" if described else ""
        self._cluster = flags.DEFINE_string(
            "cluster",
            default,
            f"The devices: local:N (N devices of this machine: GPUs if it has as many, else logical CPU "
            f"devices), cpu:N, gpu:N, host:port,host:port (running workers), tf_config (the workers that TF_CONFIG "
            f"names){files}.",
            flag_values=values,
        )
        self._workers = define_workers_per_server(values)

    @property
    def text(self) -> str:
        """The flag's value."""
        return str(self._cluster.value)

    def cluster(self) -> dapple.Cluster:
        """Returns the cluster.

        Raises:
            app.UsageError: there is no such cluster.
        """
        text = self._cluster.value
        check(bool(text), "--cluster isn't given; see --help")
        with blamed(f"--cluster={text}"):
            cluster = parse_cluster(text)
        if self._workers.value > 1:
            with blamed(f"--workers_per_server={self._workers.value}, --cluster={text}"):
                cluster = cluster.with_workers_per_server(self._workers.value)
        check(
            cluster.real or self._described,
            f"--cluster={text} is a description without devices, but this needs real ones: use local:N or the "
            f"addresses of workers",
        )
        return cluster


def parse_cluster(text: str) -> dapple.Cluster:
    """Parses a cluster: ``local:4``, ``cpu:4``, ``gpu:4``, addresses, ``tf_config`` or a file.

    Raises:
        ClusterError: there is no such cluster.
        OSError: the file can't be read.
    """
    if match := re.fullmatch(r"(local|cpu|gpu):(\d{1,6})", text, re.ASCII):
        kind = "auto" if match[1] == "local" else match[1]
        return dapple.Cluster.local(int(match[2]), kind=kind)
    if text == "tf_config":
        import tensorflow as tf  # heavy, and not needed otherwise

        return dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    if text.endswith(".json") or pathlib.Path(text).is_file():
        return dapple.Cluster.load(text)
    if re.fullmatch(r"[^,/\s]+:\d+(,[^,/\s]+:\d+)*", text):
        return dapple.Cluster.of_servers(text.split(","))
    raise dapple.ClusterError(
        "that is neither local:N, cpu:N, gpu:N, tf_config, a JSON file nor host:port,host:port; is there such a file?"
    )


class ProfileFlags:
    """``--profile`` and ``--profile_batch_size``."""

    def __init__(self, values: flags.FlagValues, *, alternative: str = "") -> None:
        self._profile = flags.DEFINE_string(
            "profile",
            None,
            f"{'The' if alternative else 'Required: the'} model's profile: JSON, as dapple-profile writes it; the text "
            f"format of the DAPPLE authors; or one of those that they published, {', '.join(PUBLISHED)}. {alternative}",
            flag_values=values,
        )
        self._batch_size = flags.DEFINE_integer(
            "profile_batch_size",
            None,
            "Samples that a profile in text format is for; by default N if the file is called ...pbs-N...",
            lower_bound=1,
            flag_values=values,
        )

    @property
    def given(self) -> bool:
        """Whether the flag names a profile."""
        return self._profile.value is not None

    @property
    def path(self) -> str | None:
        """The profile's file."""
        return None if self._profile.value is None else str(self._profile.value)

    @property
    def batch_size(self) -> int | None:
        """The value of ``--profile_batch_size``."""
        return None if self._batch_size.value is None else int(self._batch_size.value)

    def profile(self) -> dapple.Profile:
        """Returns the profile.

        Raises:
            app.UsageError: it isn't given, or isn't valid.
        """
        check(bool(self._profile.value), f"--profile isn't given; {' '.join(line('profile'))} makes one")
        with blamed(f"--profile={self._profile.value}"):
            return load_profile(self._profile.value, self.batch_size)


def load_profile(path: str | os.PathLike[str], batch_size: int | None = None) -> dapple.Profile:
    """Loads a profile from a file, JSON or text, or a published one by its name.

    Raises:
        ProfileError: the file isn't a profile, or is a text whose batch size isn't known.
        OSError: the file can't be read.
    """
    if os.fspath(path) not in PUBLISHED:
        text = read_text(path, dapple.ProfileError, encoding="utf-8-sig")
        if text.lstrip().startswith("{"):
            return dapple.Profile.from_json(text, source=os.fspath(path))
    return load_text(path, batch_size=batch_size)


def check_output(flag: str, path: str | None) -> None:
    """Checks early whether a file can be written there.

    Raises:
        app.UsageError: its folder doesn't exist, or it is a folder itself.
    """
    if path is not None:
        check(pathlib.Path(path).absolute().parent.is_dir(), f"{flag}={path}: there is no such folder")
        check(not pathlib.Path(path).is_dir(), f"{flag}={path} is a folder; give a file's name")


class PlanFlags:
    """``--plan`` and flags that change or constrain it: batch size, micro-batches, schedule, recomputation, XLA."""

    def __init__(
        self, values: flags.FlagValues, *, default: str | None = None, auto: bool = False, batch: int | None = None
    ) -> None:
        """Defines the flags.

        Args:
            values: where to define them.
            default: value of ``--plan``.
            auto: whether ``auto`` may stand for a plan that has to be found.
            batch: samples per step if neither a file nor ``--global_batch_size`` says; None if one of them must.
        """
        self.auto_allowed, self._batch = auto, batch
        automatic = "auto (measure the model and find the best), " if auto else ""
        self._plan = flags.DEFINE_string(
            "plan",
            default,
            f"{'The' if auto or default else 'Required: the'} plan: {automatic}a JSON file, or the replicas of each "
            f"stage, such as 3:1 or 1:1:1:1; cuts are found.",
            flag_values=values,
        )
        self._global_batch_size = flags.DEFINE_integer(
            "global_batch_size",
            None,
            "Samples per step, over all devices" + (f"; by default the plan's, or {batch}." if batch else "."),
            lower_bound=1,
            flag_values=values,
        )
        self._micro_batches = flags.DEFINE_integer(
            "micro_batches", None, "Micro-batches per step.", lower_bound=1, flag_values=values
        )
        self._schedule = flags.DEFINE_enum(
            "schedule", None, [*POLICIES, "auto"] if auto else POLICIES, "The plan's schedule.", flag_values=values
        )
        self._schedule_modules = flags.DEFINE_list(
            "schedule_modules",
            None,
            "Modules whose schedules the plan's file may name, such as my_schedules for my_schedules:RUN_AHEAD.",
            flag_values=values,
        )
        self._recompute = flags.DEFINE_list(
            "recompute",
            None,
            f"What the backward passes recompute, for all stages or for each: {', '.join(RECOMPUTE_MODES)}.",
            flag_values=values,
        )
        self._jit_compile = flags.DEFINE_boolean(
            "jit_compile", None, "Compile each stage with XLA.", flag_values=values
        )

    @property
    def text(self) -> str | None:
        """The value of ``--plan``."""
        return None if self._plan.value is None else str(self._plan.value)

    @property
    def path(self) -> str | None:
        """The plan's file; None if the plan isn't in a file."""
        text = self.text
        return None if text is None or self.automatic or is_shape(text) else text

    @property
    def automatic(self) -> bool:
        """Whether the plan has to be found."""
        return self.auto_allowed and self.text == "auto"

    @property
    def places_operators(self) -> bool:
        """Returns whether the plan is in a file and places single operators.

        Raises:
            app.UsageError: the file can't be read.
        """
        return self.path is not None and self._loaded().operator_devices is not None

    def batch_size(self) -> int:
        """Returns the samples per step.

        Raises:
            app.UsageError: neither a flag nor a file gives them, or the plan's file can't be read.
        """
        given = self._global_batch_size.value
        if given is None and self.path is not None:
            return self._loaded().global_batch_size
        samples = self._batch if given is None else int(given)
        check(samples is not None, f"--plan={self.text} needs --global_batch_size")
        assert samples is not None
        return samples

    @property
    def changes(self) -> dict[str, Any]:
        """Returns the plan's options that flags set."""
        modes = self._recompute.value
        given = {
            "global_batch_size": self._global_batch_size.value,
            "micro_batches": self._micro_batches.value,
            "schedule": self._schedule.value,
            "recompute": modes[0] if modes and len(modes) == 1 else modes,
            "jit_compile": self._jit_compile.value,
        }
        return {name: value for name, value in given.items() if value is not None}

    def early_check(self) -> None:
        """Checks what can be checked without a model.

        Raises:
            app.UsageError: no plan, not a shape, or no such file.
        """
        text = self.text
        check(bool(text), "--plan isn't given; see --help")
        assert text
        self.batch_size()
        modules = self._schedule_modules.value
        check(not modules or self.path is not None, f"--plan={text}: --schedule_modules is for a file's plan")
        for mode in self._recompute.value or ():
            check(mode in RECOMPUTE_MODES, f"--recompute={mode}: unknown; use one of {', '.join(RECOMPUTE_MODES)}")
        if is_shape(text):
            try:
                parse_shape(text)
            except ValueError as error:
                raise app.UsageError(str(error)) from error
            check(self._schedule.value != "auto", f"--schedule=auto is for --plan=auto, not for --plan={text}")
        elif not self.automatic:
            self._loaded()

    def check_devices(self, cluster: dapple.Cluster) -> None:
        """Checks early that a cluster has the devices of a plan that is given.

        Raises:
            app.UsageError: it lacks one.
        """
        if not self.automatic:
            plan = self.plan(lambda replicas: [f"cut {stage}" for stage in range(1, len(replicas))])
            with blamed(f"--plan={self.text}"):
                plan.validate_on(cluster)

    def check_layers(self, model: keras.Model) -> None:
        """Checks early that a model has the layers after which a plan from a file is cut.

        Raises:
            app.UsageError: it lacks one.
        """
        if self.path is None:
            return
        from dapple_tf.common.keras_private import items_of

        known = {item.name for item in items_of(model) if item is not model}
        outer = [layer.name for layer in model.layers if layer.weights]
        for cut in self._loaded().cuts:
            name = cut.partition("#")[0].rpartition("/")[2]
            check(
                name in known,
                f"--plan={self.text} has a cut after layer {cut!r}, but model {model.name!r} has "
                f"{', '.join(outer[:8])}{' and others' if len(outer) > 8 else ''}: give a plan of this model",
            )

    def plan(self, cuts: Callable[[Sequence[int]], Sequence[str]]) -> dapple.Plan:
        """Returns the plan, unless it has to be found.

        Args:
            cuts: function from the replicas of each stage to the layers to cut after.

        Raises:
            app.UsageError: it isn't valid, or contradicts itself.
        """
        self.early_check()
        assert self.text is not None
        if not is_shape(self.text):
            return self._loaded()
        replicas = parse_shape(self.text)
        with blamed(f"--plan={self.text}"):
            values = {"micro_batches": 4, **self.changes, "global_batch_size": self.batch_size()}
            return dapple.Plan.manual(cuts(replicas), devices_of(replicas), **values)

    def _loaded(self) -> dapple.Plan:
        """Returns a file's plan with the changes of the other flags."""
        from dapple_tf.models.registry import user_module
        from dapple_tf.tools.variants import changed

        for module in self._schedule_modules.value or ():
            try:
                user_module(module)
            except (ImportError, TypeError, ValueError) as error:
                raise app.UsageError(f"--schedule_modules={module}: {error}") from error
        with blamed(f"--plan={self.text}"):
            return changed(dapple.Plan.load(str(self.text)), **self.changes)
