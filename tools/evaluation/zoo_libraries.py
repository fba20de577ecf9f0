"""Models of other people's libraries for `zoo`, small, each compiled as its own documents train it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from dapple_tf.tools.evaluation.training_comparison import Batch
from dapple_tf.tools.evaluation.zoo_models import Architecture, Data

layers = keras.layers


def _floats(*shape: int) -> Data:
    return lambda rng, samples: rng.normal(size=(samples, *shape)).astype(keras.backend.floatx())


def _integers(stop: int, *shape: int, dtype: str = "int32") -> Data:
    return lambda rng, samples: rng.integers(0, stop, size=(samples, *shape)).astype(dtype)


def _of(path: str, *arguments: Any, **options: Any) -> Any:
    """Calls a library's class or function ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _recipe(
    build: Callable[[], keras.Model], data: tuple[Any, Any], how: tuple[Any, Any] = ("mse", None), **options: Any
) -> Architecture:
    """A model that is compiled with loss and metrics; functions make them where they are objects of a model's own."""

    def compiled() -> keras.Model:
        model = build()
        if not model.built:
            model(keras.tree.map_structure(lambda draw: draw(np.random.default_rng(0), 2), data[0]))
        if not model.compiled:
            loss, metrics = (value() if callable(value) else value for value in how)
            model.compile("adam", loss, metrics=metrics, jit_compile=False)
        return model

    return Architecture("", compiled, data=data, **options)


def _logits() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _chain(inputs: Any, *calls: Any) -> keras.Model:
    """A functional model of layers in a row."""
    x = inputs
    for call in calls:
        x = call(x)
    return keras.Model(inputs, x)


def _cross_network() -> keras.Model:
    indices = keras.Input((), dtype="int32", name="indices")
    x0 = layers.Embedding(32, 6)(indices)
    x1 = _of("keras_rs.layers:FeatureCross")(x0, x0)
    return keras.Model(indices, layers.Dense(4)(_of("keras_rs.layers:FeatureCross")(x0, x1)))


def _dlrm() -> keras.Model:
    features = [keras.Input((), dtype="int32", name=f"indices_{number}") for number in range(3)]
    embedded = [layers.Embedding(32, 6)(feature) for feature in features]
    x = _of("keras_rs.layers:DotInteraction")(embedded)
    return keras.Model(features, layers.Dense(4)(layers.Dense(8, "relu")(x)))


def _quantized(*calls: Callable[[Any], Any]) -> keras.Model:
    config = importlib.import_module("hgq.config")
    with (
        config.QuantizerConfigScope(place="all", default_q_type="kbi", overflow_mode="SAT_SYM"),
        config.QuantizerConfigScope(place="datalane", default_q_type="kif", overflow_mode="WRAP"),
        config.LayerConfigScope(enable_ebops=True, beta0=1e-5),
    ):
        return _chain(*(call(importlib.import_module("hgq.layers")) for call in calls))


def _sngp() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, "relu", name="hidden")(inputs)
    gaussian_process = _of("keras_proba.layers:RandomFeatureGaussianProcess", 3, num_inducing=8)
    return keras.Model(inputs, gaussian_process(hidden)[0])


def _darknet(shape: tuple[int, ...]) -> keras.Model:
    sizes = {"stackwise_channels": [4, 8], "stackwise_depth": [1, 1]}
    return _of("keras_cv.models:CSPDarkNetBackbone", input_shape=shape, include_rescaling=False, **sizes)


def _vit(shape: tuple[int, ...]) -> keras.Model:
    sizes = {"patch_size": 16, "num_layers": 4, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
    return _of("medicai.models:ViTBackbone", input_shape=shape, use_class_token=False, **sizes)


def _flow() -> keras.Model:
    networks = importlib.import_module("bayesflow.networks")
    summary = networks.DeepSet(summary_dim=4, embed_dim=6, mlp_widths=(6,), num_heads=2, name="summary")
    flow = networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (8,)})
    model = _of("bayesflow:ContinuousApproximator", inference_network=flow, summary_network=summary)
    model.build({"inference_variables": (None, 2), "summary_variables": (None, 5, 3)})
    model.compile("adam", jit_compile=False)
    return model


def _fit(trainer: Any, batch: Batch) -> Mapping[str, Any]:
    samples = len(batch[0]["inference_variables"])
    data = _of("bayesflow:OfflineDataset", batch[0], samples, None, shuffle=False)
    return trainer.fit(dataset=data, verbose=0).history


_CLASSES = (_logits, ["accuracy"])

_RECIPES: Mapping[str, Architecture] = {
    "k3im.CaiT": _recipe(
        lambda: _of("k3im.cait:CaiTModel", (8, 8), (4, 4), 3, 8, 2, 2, 12, 1, channels=1, dim_head=4),
        (_floats(8, 8, 1), _integers(3)),
        _CLASSES,
    ),
    "k3im.ConvMixer3D": _recipe(
        lambda: _of("k3im.convmixer_3d:ConvMixer3DModel", 8, 4, 6, 2, 3, 3, num_classes=3, num_channels=1),
        (_floats(4, 8, 8, 1), _integers(3)),
        _CLASSES,
    ),
    "k3im.ViTokenLearner": _recipe(
        lambda: _of("k3im.token_learner:ViTokenLearner", 8, 2, 3, 8, 4, 2, 12, 4, channels=1),
        (_floats(8, 8, 1), _integers(3)),
        _CLASSES,
    ),
    "keras_climate.PatchTST": _recipe(
        lambda: _of("keras_climate.forecasting:PatchTST", 16, 4, 2, 4, 2, 8, 1, 2),
        (_floats(16, 2), _floats(4, 2)),
        ("mse", ["mae"]),
    ),
    "keras_climate.TimesNet": _recipe(
        lambda: _of("keras_climate.forecasting:TimesNet", 12, 4, 2, 8, 12, 1, 2, 2),
        (_floats(12, 2), _floats(4, 2)),
        ("mse", ["mae"]),
    ),
    "keras_climate.ConvLSTMNowcaster": _recipe(
        lambda: _of("keras_climate.weather:ConvLSTMNowcaster", (3, 6, 6, 1), 2, (4, 4)),
        (_floats(3, 6, 6, 1), _floats(2, 6, 6, 1)),
    ),
    "keras_sciml.FNO1D": _recipe(
        lambda: _of("keras_sciml.models:FNO1D", 3, 6, 2, out_channels=1),
        (_floats(12, 2), _floats(12, 1)),
        cut="fno_block_0",
    ),
    "keras_sciml.DeepONet": _recipe(
        lambda: _of("keras_sciml.models:DeepONet", latent_dim=6, mode="pointwise", hidden_layers=2, hidden_units=8),
        ([_floats(5), _floats(2)], _floats(1)),
        cut="branch_net",
    ),
    "keras_rs.FeatureCross": _recipe(_cross_network, (_integers(32), _floats(4))),
    "keras_rs.DotInteraction": _recipe(_dlrm, ([_integers(32)] * 3, _floats(4))),
    "keras_rs.PairwiseHingeLoss": _recipe(
        lambda: _chain(keras.Input((5, 4)), layers.Dense(8, "relu"), layers.Dense(1), layers.Flatten()),
        (_floats(5, 4), _integers(4, 5, dtype="float32")),
        (lambda: _of("keras_rs.losses:PairwiseHingeLoss"), lambda: [_of("keras_rs.metrics:NDCG")]),
    ),
    "tcn.TCN": _recipe(
        lambda: _chain(keras.Input((8, 2)), _of("tcn:TCN", 4, 3, dilations=[1, 2]), layers.Dense(1)),
        (_floats(8, 2), _floats(1)),
    ),
    "tcn.TCN sequences": _recipe(
        lambda: _chain(
            keras.Input((8, 2)),
            _of("tcn:TCN", 4, 3, 2, [1, 2], return_sequences=True, use_layer_norm=True),
            layers.Dense(3),
        ),
        (_floats(8, 2), _integers(3, 8)),
        _CLASSES,
    ),
    "hgq.QConv2D": _recipe(
        lambda: _quantized(
            lambda hgq: keras.Input((8, 8, 1)),
            lambda hgq: hgq.QConv2D(4, (3, 3), activation="relu", name="convolution"),
            lambda hgq: layers.MaxPooling2D(),
            lambda hgq: layers.Flatten(),
            lambda hgq: hgq.QDense(3),
        ),
        (_floats(8, 8, 1), _integers(3)),
        _CLASSES,
        cut="convolution",
    ),
    "hgq.QDense": _recipe(
        lambda: _quantized(
            lambda hgq: keras.Input((6,)),
            lambda hgq: hgq.QDense(8, activation="relu"),
            lambda hgq: hgq.QDense(3),
        ),
        (_floats(6), _integers(3)),
        _CLASSES,
    ),
    "keras_bio.ESM2": _recipe(
        lambda: _of(
            "keras_bio.protein:ESM2ForSequenceClassification",
            _of(
                "keras_bio.protein:ESM2Config", 33, 8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
            ),
        ),
        ({"input_ids": _integers(29, 6)}, {"logits": _integers(2)}),
        (lambda: {"logits": _logits()}, None),
        cut="esm",
    ),
    "zeromodels.GPT2": _recipe(
        lambda: _of("zeromodels.models.gpt2:GPT2TextGenerate", 31, 8, 12, 2, 2, 16),
        ({"input_ids": _integers(31, 6), "attention_mask": _integers(2, 6)}, {"logits": _integers(31, 6)}),
        (lambda: {"logits": _logits()}, None),
    ),
    "zeromodels.MLPMixer": _recipe(
        lambda: _of("zeromodels.models.mlp_mixer:MLPMixerImageClassify", 4, 8, 2, image_size=8, num_classes=3),
        (_floats(8, 8, 3), _integers(3)),
        _CLASSES,
    ),
    "medicai.UNETR": _recipe(
        lambda: _of("medicai.models:UNETR", encoder=_vit((32, 32, 1)), feature_size=4),
        (_floats(32, 32, 1), _integers(2, 32, 32, 1)),
        (lambda: _of("medicai.losses:BinaryDiceCELoss", from_logits=True, num_classes=1), None),
    ),
    "csbdeep.CARE": _recipe(
        lambda: _of("csbdeep.internals.nets:common_unet", n_depth=1, n_first=4, prob_out=True)((8, 8, 1)),
        (_floats(8, 8, 1), _floats(8, 8, 1)),
        (
            lambda: _of("csbdeep.internals.losses:loss_laplace"),
            lambda: [_of(f"csbdeep.internals.losses:loss_{name}") for name in ("mse", "mae")],
        ),
    ),
    "keras_cv.ImageClassifier": _recipe(
        lambda: _of("keras_cv.models:ImageClassifier", _darknet((16, 16, 3)), num_classes=3),
        (_floats(16, 16, 3), _integers(3)),
        ("sparse_categorical_crossentropy", ["accuracy"]),
    ),
    "keras_proba.GaussianHead": _recipe(
        lambda: _chain(keras.Input((4,)), layers.Dense(8, "relu"), _of("keras_proba.layers:GaussianHead", 1)),
        (_floats(4), _floats(1)),
        (lambda: _of("keras_proba.losses:GaussianNLL"), None),
    ),
    "keras_proba.SNGP": _recipe(_sngp, (_floats(4), _integers(3)), _CLASSES, cut="hidden", dtype="float32"),
    "bayesflow.CouplingFlow": _recipe(
        _flow,
        ({"inference_variables": _floats(2), "summary_variables": _floats(5, 3)}, None),
        cut="summary",
        train=_fit,
        dtype="float32",
    ),
}
LIBRARIES = {name: dataclasses.replace(own, family=name.partition(".")[0]) for name, own in _RECIPES.items()}
"""Library and model -> architecture."""
