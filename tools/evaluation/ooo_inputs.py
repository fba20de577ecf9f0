"""What is put into Out-Of-Order BackProp's experiments: the paper's hardware, models and batches, and our guesses."""

from __future__ import annotations

import dataclasses
from typing import Any

from dapple_tf.tools.evaluation.ooo_models import (
    BERTS,
    FFNN_WIDTH,
    FINE_TUNED,
    FOUR,
    GPT_3_MEDIUM,
    PRIV_A,
    PRIV_B,
    PUB_A,
    PUB_B,
    RNN_TOKENS,
    RNN_WIDTH,
    Hardware,
    Transformer,
)
from dapple_tf.tools.evaluation.ooo_pipelines import BATCHES, SCRIPTS, STRONG


def inputs() -> dict[str, dict[str, Any]]:
    """Returns name -> its numbers, as they are stored beside the results."""
    described: dict[str, Hardware | Transformer] = {
        **{hardware.name: hardware for hardware in (PRIV_A, PRIV_B, PUB_A, PUB_B)},
        **{f"section 8.4.1, {network}": hardware for network, hardware in FOUR.items()},
        "fine-tuning": FINE_TUNED,
        **{model.name: model for model in (*BERTS.values(), GPT_3_MEDIUM)},
    }
    return {
        **{name: dataclasses.asdict(one) for name, one in described.items()},
        "FFNN": {"width": FFNN_WIDTH},
        "RNN": {"width": RNN_WIDTH, "tokens": RNN_TOKENS},
        "scripts: blocks, batch, micro-batches": {f"{gpus} GPUs": [*numbers] for gpus, numbers in SCRIPTS.items()},
        "strong scaling: batch, micro-batches": {f"{blocks} blocks": [*numbers] for blocks, numbers in STRONG.items()},
        "pre-training": {"batches": [*BATCHES]},
    }
