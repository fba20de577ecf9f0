"""Models that nobody here wrote, and random ones, train as plain Keras does: the smallest of `make zoo`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import use_float64

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation import zoo
from dapple_tf.tools.evaluation.random_blocks import IMAGE, SEQUENCE, VECTOR
from dapple_tf.tools.evaluation.random_models import Chain, compare_draw, draw
from dapple_tf.tools.evaluation.training_comparison import compare_training, largest_difference, train_on_batch
from dapple_tf.tools.evaluation.zoo_libraries import LIBRARIES
from dapple_tf.tools.evaluation.zoo_models import ARCHITECTURES, narrowest

# keras_hub's models say this of themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning"),
    pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match:UserWarning"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_models_train_as_plain_keras(seed: int) -> None:
    use_float64()
    about, comparison = compare_draw(seed)
    exact = draw(seed).chain.exact
    assert comparison.verdict == "equal" or (comparison.passed and not exact), f"{about}: {comparison}"


@pytest.mark.parametrize("name", ["Bert", "Mixtral"])
def test_models_of_others_train_as_plain_keras(name: str) -> None:
    """Two stages, two replicas and one, two micro-batches. A loss that balances experts compares samples: it's told."""
    (row,) = zoo.rows_of(name, [2], ["adamw"])
    assert row["verdict"] == ("listed" if name == "Mixtral" else "equal"), row


def test_random_models_are_of_all_forms() -> None:
    chains = [Chain(np.random.default_rng(seed)) for seed in range(200)]
    assert {chain.form for chain in chains} == {"vector", "sequence", "tokens", "image"}
    assert {block for chain in chains for block in chain.blocks} == {*VECTOR, *SEQUENCE, *IMAGE}
    assert {chain.end for chain in chains} == {"one output", "one in a list", "two heads", "rows"}
    assert sum(chain.exact for chain in chains) > 80


# ---- what a comparison finds


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "tanh", name="a"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def _batches(count: int) -> list[tuple[Any, Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(4, 2)), rng.normal(size=(4, 1)), None) for _ in range(count)]


def _pipeline(model: keras.Model, cut: str = "a") -> dapple.PipelinedModel:
    plan = dapple.Plan.manual([cut], [[0], [1]], 2, 4)
    return dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)


def _boasting(trainer: Any, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
    """A training whose log is a little too small, but only where it is pipelined."""
    logs = train_on_batch(trainer, batch)
    return {name: value * (1 - 1e-6 * isinstance(trainer, dapple.PipelinedModel)) for name, value in logs.items()}


def _forgetful(trainer: Any, batch: tuple[Any, Any, Any]) -> Any:
    """A training whose slots lose a little, but only where it is pipelined."""
    logs = train_on_batch(trainer, batch)
    if isinstance(trainer, dapple.PipelinedModel):
        trainer.sync()
        slot = trainer.model.optimizer.variables[2]
        slot.assign(slot.numpy() * (1 + 1e-6))
        trainer.load()
    return logs


@pytest.mark.parametrize(
    ("transform", "train", "verdict", "where"),
    [
        (_pipeline, None, "equal", ""),
        (functools.partial(_pipeline, cut="nowhere"), None, "refused", "nowhere"),
        (_pipeline, _forgetful, "differs", "momentum"),
        (_pipeline, _boasting, "differs", "log loss"),
    ],
    ids=["equal", "refused", "differs", "log differs"],
)
def test_verdicts(
    transform: Callable[[keras.Model], dapple.PipelinedModel], train: Any, verdict: str, where: str
) -> None:
    use_float64()
    options = {} if train is None else {"train": train}
    comparison = compare_training(_model, transform, _batches(2), **options)
    assert comparison.verdict == verdict, comparison
    assert where in comparison.where
    assert comparison.passed == (verdict != "differs")


def test_differences_are_relative_to_what_training_has_changed() -> None:
    """A weight of 1 that should have moved by 0.1 and is 0.002 off: that is 2 %, not 0.2."""
    own, plain = _model(), _model()
    before = [np.ones((2, 3)), *(variable.numpy() for variable in own.variables[1:])]
    for model, value in ((own, 1.102), (plain, 1.1)):
        model.variables[0].assign(np.full((2, 3), value))
    difference, where = largest_difference(own, plain, before, "float32")
    assert difference == pytest.approx(0.02, rel=1e-3) and where.endswith("a/kernel")


def test_random_draws_excuse_nothing() -> None:
    """Those of a layer that drops nothing are noted, but make no difference."""
    use_float64()

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        dropout = keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="a"), dropout, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    assert compare_training(build, _pipeline, _batches(1)).verdict == "differs"


# ---- architectures


def test_rounding_is_that_of_the_narrowest_type_inside() -> None:
    use_float64()
    inputs = keras.Input((2,))
    plain = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    casting = keras.Model(inputs, keras.layers.Dense(2)(keras.ops.cast(keras.ops.cast(inputs, "float32"), "float64")))
    x = np.ones((2, 2))
    assert [narrowest(model, x, "float64") for model in (plain, casting)] == ["float64", "float32"]


def test_every_architecture_of_keras_applications_is_there() -> None:
    """In its smallest size: names differ in numbers and sizes behind the architecture's own."""
    named = [name for name in dir(keras.applications) if name[0].isupper()]
    families = [name for name in ARCHITECTURES if ARCHITECTURES[name].family == "applications"]
    for name in named:
        stem = re.sub(r"(XLarge|Base|Large|Small|Tiny)?[0-9]*(V2)?$", "", name)
        assert any(family.startswith(stem[:9]) for family in families), name
    assert sum(each.family == "keras_hub" for each in ARCHITECTURES.values()) >= 20


def test_libraries_that_are_not_installed_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(LIBRARIES) >= 20
    monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda name: None)
    assert command.run(zoo.main, zoo.FLAGS, ["--models=k3im.CaiT,tcn.TCN", "--draws=0"]) == 0
    printed = capsys.readouterr()
    assert "k3im.CaiT: skipped, as k3im isn't installed: pip install" in printed.err
    assert "2 skipped" in printed.out
