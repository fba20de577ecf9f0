"""Stages of the models that PyTorch trains beside ours: layer for layer those of `models.gpt`, `bert` and `resnet`.

It runs under an interpreter that has PyTorch, which needn't have TensorFlow: it imports nothing of this repository.
Layers have their names in Keras, so that weights are taken over by their paths there; all else is as PyTorch does it
best: attention in one call, images whose channels are last in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_GPT_EPSILON, _BERT_EPSILON, _BATCH_EPSILON = 1e-5, 1e-12, 1e-3


class Attention(nn.Module):
    """Self-attention of several heads on [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape; causal without ``present`` [batch, sequence], 0 at padding."""
        batch, sequence, width = inputs.shape

        def split(values: torch.Tensor) -> torch.Tensor:
            return values.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)

        parts = [split(layer(inputs)) for layer in (self.query, self.key, self.value)]
        mask = None if present is None else present.bool()[:, None, None, :]
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
        return self.attention_output(attended.transpose(1, 2).reshape(batch, sequence, width))


class GptEmbedding(nn.Module):
    """Tokens to vectors, with learned positions."""

    def __init__(self, vocabulary: int, sequence: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(vocabulary, width))
        self.positions = nn.Parameter(torch.zeros(sequence, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, sequence] -> [batch, sequence, width]."""
        return functional.embedding(tokens, self.tokens) + self.positions


class GptBlock(nn.Module):
    """Pre-LN transformer block on [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=_GPT_EPSILON)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=_GPT_EPSILON)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape."""
        middle = inputs + self.attention(self.attention_norm(inputs))
        hidden = functional.gelu(self.expand(self.mlp_norm(middle)), approximate="tanh")
        return middle + self.contract(hidden)


class BertEmbedding(nn.Module):
    """Tokens, positions and segments to normalised vectors."""

    def __init__(self, vocabulary: int, positions: int, width: int) -> None:
        super().__init__()
        rows = {"tokens": vocabulary, "positions": positions, "segments": 2}
        self.tokens, self.positions, self.segments = (
            nn.Parameter(torch.zeros(count, width)) for count in rows.values()
        )
        self.norm = nn.LayerNorm(width, eps=_BERT_EPSILON)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Tokens and segments [batch, sequence] -> [batch, sequence, width]."""
        embedded = functional.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]
        return self.norm(embedded + functional.embedding(segments, self.segments))


class EncoderLayer(nn.Module):
    """Post-LN transformer layer on [batch, sequence, width]."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=_BERT_EPSILON)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=_BERT_EPSILON)

    def forward(self, inputs: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, width] -> the same shape; ``present`` [batch, sequence] is 0 at padding."""
        middle = self.attention_norm(inputs + self.attention(inputs, present))
        return self.output_norm(middle + self.contract(functional.gelu(self.expand(middle), approximate="tanh")))


class Convolution(nn.Conv2d):
    """A convolution without bias, padded as by TensorFlow's "same": behind the image if it is halved."""

    def __init__(self, channels: int, width: int, size: int, stride: int) -> None:
        self.behind = size > 1 and stride > 1
        super().__init__(channels, width, size, stride, 0 if self.behind else size // 2, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> [batch, width, height / stride, width / stride]; the size is 1 or 3."""
        return super().forward(functional.pad(images, (0, 1, 0, 1)) if self.behind else images)


class ResNetBlock(nn.Module):
    """Two convolutions with normalisation, plus a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_0, self.conv_0_norm = Convolution(channels, width, 3, stride), _batch_norm(width)
        self.conv_1, self.conv_1_norm = Convolution(width, width, 3, 1), _batch_norm(width)
        self.shortcut = stride != 1 or channels != width
        if self.shortcut:
            self.skip, self.skip_norm = Convolution(channels, width, 1, stride), _batch_norm(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> [batch, width, height / stride, width / stride]."""
        skipped = self.skip_norm(self.skip(images)) if self.shortcut else images
        hidden = functional.relu(self.conv_0_norm(self.conv_0(images)), inplace=True)
        return functional.relu(self.conv_1_norm(self.conv_1(hidden)) + skipped, inplace=True)


class ChannelsSecond(nn.Module):
    """Images as they cross between stages, [batch, height, width, channels], to those of convolutions, uncopied."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, height, width, channels] -> [batch, channels, height, width], with the channels last in memory."""
        return images.permute(0, 3, 1, 2)


class ChannelsLast(nn.Module):
    """What `ChannelsSecond` takes back: only contiguous tensors are sent, and ScheduleZBVZeroBubble takes no views."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> [batch, height, width, channels]."""
        return images.permute(0, 2, 3, 1).clone()


class Pool(nn.Module):
    """Mean over an image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] -> [batch, channels]."""
        return images.mean((2, 3))


class Stage(nn.Module):
    """Consecutive layers of a model, by their names in Keras."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, *inputs: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
        """The model's inputs, or hidden values -> hidden values, or logits."""
        values = inputs
        for layer in self.layers.values():
            values = (layer(*values, present) if isinstance(layer, EncoderLayer) else layer(*values),)
        return values[0]

    @torch.no_grad()
    def take(self, weights: Mapping[str, np.ndarray]) -> None:
        """Takes over the weights of the Keras model, by their paths there.

        Raises:
            ValueError: a weight of this stage isn't among them, or has another number of elements.
        """
        by_name = {path.replace("/", "_"): value for path, value in weights.items()}
        for name, parameter in self.named_parameters():
            owner, _, kind = name.rpartition(".")
            layer = self.get_submodule(owner)
            if isinstance(layer, nn.LayerNorm | nn.BatchNorm2d):
                kind = {"weight": "gamma", "bias": "beta"}[kind]
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                kind = {"weight": "kernel", "bias": "bias"}[kind]
            key = f"{owner.removeprefix('layers.')}.{kind}".replace(".", "_")
            if key not in by_name or by_name[key].size != parameter.numel():
                actual = f"shape {by_name[key].shape}" if key in by_name else "nothing"
                raise ValueError(f"{name} has shape {tuple(parameter.shape)}, but there is {actual} for {key}")
            value = by_name[key]
            if isinstance(layer, nn.Linear) and kind == "kernel":  # Keras: [in..., out...], e.g. out: (heads, size)
                value = value.reshape(*parameter.shape[::-1]).T
            elif isinstance(layer, nn.Conv2d):  # Keras: [height, width, in, out]
                value = value.transpose(3, 2, 0, 1)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value.reshape(parameter.shape))))


def make_stage(family: str, size: Mapping[str, Any], blocks: range) -> Stage:
    """Returns a stage with some of a model's blocks, of zeros or random weights.

    Args:
        family: one of `FAMILIES`.
        size: arguments of the Keras model's function or class.
        blocks: the blocks; the stage with the first also has what precedes it, that with the last what follows it.
    """
    stage = Stage(FAMILIES[family](size, blocks))
    return stage.to(memory_format=torch.channels_last) if family == "resnet" else stage


def gpt_layers(size: Mapping[str, Any], blocks: range) -> dict[str, nn.Module]:
    """Returns layers of `models.gpt.build`."""
    width = size["width"]
    layers: dict[str, nn.Module] = {}
    if blocks.start == 0:
        layers["embedding"] = GptEmbedding(size["vocabulary"], size["sequence"], width)
    layers |= {f"block_{index}": GptBlock(width, size["heads"]) for index in blocks}
    if blocks.stop == size["depth"]:
        layers["final_norm"] = nn.LayerNorm(width, eps=_GPT_EPSILON)
        layers["logits"] = nn.Linear(width, size["vocabulary"], bias=False)
    return layers


def bert_layers(size: Mapping[str, Any], blocks: range) -> dict[str, nn.Module]:
    """Returns layers of `models.bert.build` with the head for masked tokens, not tied."""
    width = size["width"]
    layers: dict[str, nn.Module] = {}
    if blocks.start == 0:
        layers["embedding"] = BertEmbedding(size["vocabulary"], size["positions"], width)
    layers |= {f"layer_{index}": EncoderLayer(width, size["heads"], size["inner"]) for index in blocks}
    if blocks.stop == size["depth"]:
        layers["transform"] = nn.Linear(width, width)
        layers["gelu"] = nn.GELU(approximate="tanh")
        layers["transform_norm"] = nn.LayerNorm(width, eps=_BERT_EPSILON)
        layers["logits"] = nn.Linear(width, size["vocabulary"])
    return layers


def resnet_layers(size: Mapping[str, Any], blocks: range) -> dict[str, nn.Module]:
    """Returns layers of `models.resnet.resnet`."""
    width = size["width"]
    groups = [group for group, count in enumerate(size["blocks"]) for _ in range(count)]
    layers: dict[str, nn.Module] = {"received": ChannelsSecond()}
    if blocks.start == 0:
        layers["stem_conv"], layers["stem_conv_norm"] = Convolution(size["channels"], width, 3, 1), _batch_norm(width)
        layers["stem"] = nn.ReLU(inplace=True)
    for index in blocks:
        group, before = groups[index], groups[max(index - 1, 0)]
        layers[f"block_{index}"] = ResNetBlock(width * 2**before, width * 2**group, 2 if group > before else 1)
    if blocks.stop == len(groups):
        layers["pool"] = Pool()
        layers["logits"] = nn.Linear(width * 2 ** groups[-1], size["classes"])
    else:
        layers["sent"] = ChannelsLast()
    return layers


FAMILIES: Mapping[str, Callable[[Mapping[str, Any], range], dict[str, nn.Module]]] = {
    "gpt": gpt_layers,
    "bert": bert_layers,
    "resnet": resnet_layers,
}
"""Models' layers by the name of the model's module."""


def _batch_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=_BATCH_EPSILON)
