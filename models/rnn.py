"""A stack of LSTMs that continues a text, as an ordinary Keras functional model, and its layer.

RNN-16 of the Out-Of-Order BackProp paper (table 1: "RNN (16 Cell)", trained on IWSLT; section 8.4.1: the i-th cell goes
to GPU i mod 4). The paper says no more. Here a cell is a layer of a stack, with its own weights; cells are LSTMs of
1024 units, each but the first with a residual connection, without which 16 of them hardly learn; and tokens are
bytes, so that any text will do.

The layers that a plan may cut after are named ``embedding``, ``cell_0`` to ``cell_{depth - 1}`` and ``logits``.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import keras

from dapple_tf.models.sizes import check_sizes

_logger = logging.getLogger(__name__)


def lstm_parameters(inputs: int, width: int) -> int:
    """Returns the number of parameters of an LSTM: kernels of the four gates for inputs and state, and their biases."""
    return 4 * width * (inputs + width + 1)


@keras.saving.register_keras_serializable(package="dapple_models")
class RecurrentLayer(keras.layers.Layer):
    """A layer of a stack of LSTMs: dropout of the input, an LSTM in one or both directions, a residual connection.

    ``x -> x + lstm(concat(dropout(x), context))``. The input's mask applies to the LSTM, which passes masked
    positions without changing its state, and to the output.
    """

    def __init__(
        self, width: int, *, bidirectional: bool = False, residual: bool = False, dropout: float = 0.0, **kwargs: Any
    ) -> None:
        """Makes the layer.

        Args:
            width: Units of the LSTM; of each of the two, if it is bidirectional, whose outputs are concatenated.
            bidirectional: Whether a second LSTM reads from the end to the beginning.
            residual: Whether the input is added to the output; it must be as wide.
            dropout: Fraction of the input that is dropped.
            kwargs: Those of any layer.
        """
        super().__init__(**kwargs)
        self.supports_masking = True
        self.width = width
        self.bidirectional = bidirectional
        self.residual = residual
        self.rate = dropout

    def build(self, inputs_shape: Any, context_shape: Any = None) -> None:
        """Makes and builds the sublayers for inputs [batch, sequence, n], and a context [batch, sequence, m] or none.

        Raises:
            ValueError: the input can't be added to the output.
        """
        outputs = self.width * (2 if self.bidirectional else 1)
        if self.residual and inputs_shape[-1] != outputs:
            raise ValueError(
                f"layer {self.name}: an input of {inputs_shape[-1]} numbers can't be added to an output of {outputs}; "
                f"leave residual out"
            )
        self.dropout = keras.layers.Dropout(self.rate, name="dropout", dtype=self.dtype_policy)
        lstm = keras.layers.LSTM(self.width, return_sequences=True, name="lstm", dtype=self.dtype_policy)
        if self.bidirectional:
            self.lstm = keras.layers.Bidirectional(lstm, name="bidirectional", dtype=self.dtype_policy)
        else:
            self.lstm = lstm
        features = inputs_shape[-1] + (0 if context_shape is None else context_shape[-1])
        self.lstm.build((*inputs_shape[:-1], features))

    def call(
        self,
        inputs: Any,
        context: Any = None,
        mask: Any = None,
        inputs_mask: Any = None,
        training: bool | None = None,
    ) -> Any:
        """Vectors [batch, sequence, n], and context [batch, sequence, m] or none -> [batch, sequence, outputs].

        Keras passes the input's mask as ``mask`` if there is no context, and as ``inputs_mask`` if there is.
        """
        mask = inputs_mask if mask is None else mask
        hidden = self.dropout(inputs, training=training)
        if context is not None:
            hidden = keras.ops.concatenate([hidden, context], axis=-1)
        hidden = self.lstm(hidden, mask=mask, training=training)
        if self.residual:
            return hidden + inputs
        # After a loop the number of samples is no longer known; it is that of the input.
        return keras.ops.reshape(hidden, (*keras.ops.shape(inputs)[:-1], hidden.shape[-1]))

    def get_config(self) -> dict[str, Any]:
        """Returns arguments that make an equal layer."""
        own = {"width": self.width, "bidirectional": self.bidirectional, "residual": self.residual}
        return {**super().get_config(), **own, "dropout": self.rate}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RnnConfig:
    """Size and options of a stack of LSTMs; by default RNN-16.

    Attributes:
        vocabulary: Number of distinct tokens.
        sequence: Tokens per sample.
        depth: Number of cells.
        width: Units of each cell, and size of the embedding.
        dropout: Fraction dropped of each cell's input.
        residual: Whether each cell but the first adds its input to its output.
    """

    vocabulary: int = 256
    sequence: int = 64
    depth: int = 16
    width: int = 1024
    dropout: float = 0.0
    residual: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "sequence", "depth", "width")

    @property
    def parameters(self) -> int:
        """Number of trainable parameters, without building the model."""
        cells = self.depth * lstm_parameters(self.width, self.width)
        return 2 * self.vocabulary * self.width + self.vocabulary + cells


TINY = RnnConfig(sequence=8, depth=2, width=16)
"""For tests: trains in seconds."""


def build(config: RnnConfig, name: str = "rnn") -> keras.Model:
    """Builds a stack of LSTMs: int32 tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""
    tokens = keras.Input((config.sequence,), dtype="int32", name="tokens")
    hidden = keras.layers.Embedding(config.vocabulary, config.width, name="embedding")(tokens)
    for index in range(config.depth):
        residual = config.residual and index > 0
        layer = RecurrentLayer(config.width, residual=residual, dropout=config.dropout, name=f"cell_{index}")
        hidden = layer(hidden)
    model = keras.Model(tokens, keras.layers.Dense(config.vocabulary, name="logits")(hidden), name=name)
    _logger.info("built %s: %d parameters", name, model.count_params())
    return model


def rnn_16(**changes: Any) -> keras.Model:
    """Builds RNN-16, with the fields of `RnnConfig` in ``changes`` replaced."""
    return build(RnnConfig(**changes), name="rnn_16")


def rnn_tiny(**changes: Any) -> keras.Model:
    """Builds `TINY`, with the fields in ``changes`` replaced."""
    return build(dataclasses.replace(TINY, **changes), name="rnn_tiny")
