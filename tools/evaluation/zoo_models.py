"""Third-party models for `zoo`: keras.applications and keras_hub, random weights, smallest sizes.

Each model gets a head for each of its float outputs, so that all of it is trained; models that are compiled already
(`zoo_libraries`) stay as they are. Random layers are silenced: draws belong to slices (docs/equivalence.md), so that
there would be nothing to compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import layers_of, nodes_in_order
from dapple_tf.tools.evaluation.training_comparison import Train, train_on_batch

_VOCABULARY = 31
_LENGTH = 6
_RATES = ("rate", "drop_path_rate", "drop_prob", "dropout", "recurrent_dropout", "stddev")
"""Attributes of layers with a random generator that set the strength of its effect."""


Data = Callable[[np.random.Generator, int], np.ndarray]
"""Draws an array of a number of samples."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model to compare.

    Attributes:
        family: "applications", or the library's package.
        backbone: function that returns the model, compiled or without a head.
        image: side of the images, with 3 channels, that stand for inputs whose height and width are open.
        length: length of inputs that are open sequences.
        dtype: the widest float type in which plain Keras trains it.
        data: nested `Data` of the inputs and of the labels; None if the model's inputs and outputs tell them.
        cut: layer to cut after; None if it is where half of the parameters are reached.
        train: trains it on a batch.
    """

    family: str
    backbone: Callable[[], keras.Model]
    image: int = 32
    length: int = _LENGTH
    dtype: str = "float64"
    data: tuple[Any, Any] | None = None
    cut: str | None = None
    train: Train = train_on_batch

    def build(self, seed: int) -> keras.Model:
        """Returns the model, with a head for each float output unless it is compiled. Equal seeds give equal values."""
        keras.utils.set_random_seed(seed)
        model = self.backbone()
        if not model.compiled:
            outputs = [head(tensor, number) for number, tensor in enumerate(_float_outputs(model))]
            inputs = model.inputs
            model = keras.Model(inputs[0] if len(inputs) == 1 else inputs, outputs[0] if len(outputs) == 1 else outputs)
        _silence(model)
        _steady(model)
        _perturb(model, seed)
        return model

    @property
    def library(self) -> str:
        """The package that has to be installed."""
        return "keras" if self.family == "applications" else self.family

    def batch(self, model: keras.Model, rng: np.random.Generator, samples: int) -> tuple[Any, Any]:
        """Returns inputs and labels of ``samples`` samples."""
        if self.data is not None:
            return keras.tree.map_structure(lambda data: data and data(rng, samples), self.data)
        inputs = {tensor.name: self._input(tensor, rng, samples) for tensor in model.inputs}
        leaves = [inputs[tensor.name] for tensor in model.inputs]
        x = leaves[0] if len(leaves) == 1 else leaves
        shapes = [tensor.shape for tensor in keras.tree.flatten(model(x))]
        labels = [rng.normal(size=shape).astype(keras.backend.floatx()) for shape in shapes]
        return x, labels[0] if len(labels) == 1 else labels

    def middle(self, model: keras.Model) -> str:
        """Returns the (first call of the) layer to cut after, by its name for cuts."""
        if self.cut is not None:
            return self.cut
        sizes = np.cumsum([layer.count_params() for layer in model.layers])
        layer = model.layers[int(np.searchsorted(sizes, sizes[-1] / 2))]
        calls = [node for node in nodes_in_order(model) if node.operation is layer]
        return layer.name if len(calls) == 1 else f"{layer.name}#0"

    def _input(self, tensor: Any, rng: np.random.Generator, samples: int) -> np.ndarray:
        name, dtype = tensor.name, keras.backend.standardize_dtype(tensor.dtype)
        open_axis = self.image if len(tensor.shape) == 4 else self.length
        shape = (samples, *(open_axis if size is None else size for size in tensor.shape[1:]))
        if dtype.startswith("float"):
            return rng.normal(size=shape).astype(dtype)
        if "mask" in name:
            lengths = rng.integers(2, shape[1] + 1, size=(samples, 1))
            return (np.arange(shape[1]) < lengths).astype(dtype)
        if "segment" in name:
            return rng.integers(0, 2, size=shape).astype(dtype)
        if "mask_positions" in name or "position" in name:
            return np.broadcast_to(np.arange(shape[1]), shape).astype(dtype)
        return rng.integers(1, _VOCABULARY, size=shape).astype(dtype)


def head(tensor: Any, number: int) -> Any:
    """Returns three numbers of each position, or of the mean over an image."""
    if len(tensor.shape) == 4:
        tensor = keras.layers.GlobalAveragePooling2D(name=f"head_pool_{number}")(tensor)
    return keras.layers.Dense(3, name=f"head_{number}")(tensor)


def normalizes_batches(model: keras.Model) -> bool:
    """Returns whether a training step depends on how its batch is sliced."""
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers_of(model))


def narrowest(model: keras.Model, x: Any, dtype: str) -> str:
    """Returns the float type that bounds a model's rounding: ``dtype``, or a narrower one that its layers cast to."""
    if dtype == "float32":
        return dtype  # There is no tolerance for a narrower one.
    graph = tf.function(lambda batch: model(batch, training=True)).get_concrete_function(x).graph
    casts = [operation for operation in graph.get_operations() if operation.type == "Cast"]
    floats = [dtype]
    for cast in casts:
        source, target = cast.inputs[0].dtype, cast.outputs[0].dtype
        if source.is_floating and target.is_floating and target.size < source.size:
            floats.append(target.name)
    return min(floats, key=lambda name: tf.dtypes.as_dtype(name).size)


def _float_outputs(backbone: keras.Model) -> list[Any]:
    outputs = keras.tree.flatten(backbone.output)
    return [tensor for tensor in outputs if keras.backend.is_float_dtype(tensor.dtype) and len(tensor.shape) >= 2]


def _silence(model: keras.Model) -> None:
    """Switches off all dropout and noise."""
    for layer in layers_of(model):
        for name in _RATES if getattr(layer, "_seed_generators", ()) else ():
            if isinstance(getattr(layer, name, None), (int, float)):
                setattr(layer, name, 0.0)


def _steady(model: keras.Model) -> None:
    """Raises epsilons: variances of two samples may be almost 0, and dividing by them amplifies rounding without bound.

    Plain Keras' own result then depends on the order of a batch's samples: in ResNet50 momenta differ by 3 after two
    steps in float64, with an epsilon of 0.1 by 1e-12.
    """
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.epsilon = 0.1


def _perturb(model: keras.Model, seed: int) -> None:
    """Changes biases and scales: starting at 0 or 1, they would hide that they are lost or left out."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        noise = rng.normal(scale=0.02, size=variable.shape)
        variable.assign(np.asarray(variable.numpy() + noise, dtype=keras.backend.standardize_dtype(variable.dtype)))


def _application(name: str, image: int = 32) -> Architecture:
    def backbone() -> keras.Model:
        make = getattr(keras.applications, name)
        return make(weights=None, include_top=False, input_shape=(image, image, 3))

    return Architecture("applications", backbone, image)


_SMALLEST: Mapping[str, int] = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Large": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}
"""Each architecture of keras.applications in its smallest size, and the smallest images that it takes."""


def _hub(name: str, *, dtype: str = "float64", length: int = _LENGTH, **options: Any) -> Architecture:
    def backbone() -> keras.Model:
        import keras_hub

        return getattr(keras_hub.models, name)(**options)

    return Architecture("keras_hub", backbone, length=length, dtype=dtype)


def _transformer(name: str, **options: Any) -> Architecture:
    sizes = {"vocabulary_size": _VOCABULARY, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12}
    return _hub(name, **(sizes | options))


def _clip() -> keras.Model:
    """Returns both encoders of CLIP side by side; its own outputs compare the samples of a batch with each other."""
    import keras_hub

    sizes = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "intermediate_dim": 12}
    vision = keras_hub.models.CLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), name="vision", **sizes)
    text = keras_hub.models.CLIPTextEncoder(
        vocabulary_size=_VOCABULARY, embedding_dim=8, max_sequence_length=_LENGTH, name="text", **sizes
    )
    inputs = [keras.Input(tensor.shape[1:], dtype=tensor.dtype) for tensor in (*vision.inputs, *text.inputs)]
    return keras.Model(inputs, [vision(inputs[0]), text(inputs[1])])


_HEADS = {"num_heads": 2}
_SHORT = {"num_heads": 2, "max_sequence_length": 16}
_GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}

ARCHITECTURES: Mapping[str, Architecture] = {
    **{name: _application(name, image) for name, image in _SMALLEST.items()},
    "Albert": _transformer("AlbertBackbone", embedding_dim=4, **_SHORT),
    "Bart": _transformer("BartBackbone", **_SHORT),
    "Bert": _transformer("BertBackbone", **_SHORT),
    "Bloom": _transformer("BloomBackbone", **_HEADS),
    "CLIP": Architecture("keras_hub", _clip),
    "DebertaV3": _transformer("DebertaV3Backbone", bucket_size=4, **_SHORT),
    "DistilBert": _transformer("DistilBertBackbone", **_SHORT),
    "Falcon": _transformer("FalconBackbone", num_attention_heads=2),
    "FNet": _transformer("FNetBackbone", max_sequence_length=16),
    "GPT2": _transformer("GPT2Backbone", **_SHORT),
    "GPTNeoX": _transformer("GPTNeoXBackbone", rotary_percentage=0.5, **_SHORT),
    "Gemma": _transformer("GemmaBackbone", head_dim=4, **_GROUPED),
    "Gemma3": _transformer("Gemma3Backbone", head_dim=4, image_size=16, **_GROUPED),
    "Llama": _transformer("LlamaBackbone", **_GROUPED),
    "MiT": _hub(
        "MiTBackbone",
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=(16, 16, 3),
        hidden_dims=[4, 8],
    ),
    "Mistral": _transformer("MistralBackbone", **_GROUPED),
    "Mixtral": _transformer("MixtralBackbone", num_experts=2, top_k=1, dtype="float32", **_GROUPED),
    "OPT": _transformer("OPTBackbone", **_SHORT),
    "Phi3": _transformer("Phi3Backbone", **_GROUPED),
    "Qwen": _transformer("QwenBackbone", **_GROUPED),
    "ResNet (hub)": _hub(
        "ResNetBackbone",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 8],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    ),
    "Roberta": _transformer("RobertaBackbone", **_SHORT),
    "T5": _transformer("T5Backbone", dtype="float32", **_HEADS),
    "ViT": _hub(
        "ViTBackbone", image_shape=(8, 8, 3), patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=12
    ),
    "Whisper": _transformer(
        "WhisperBackbone",
        num_mels=4,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=8,
        length=8,
        **_HEADS,
    ),
}
"""Name -> architecture."""
