"""Fine-tunes keras_hub's GPT-2 by LoRA, as a pipeline over the workers that TF_CONFIG names.

    dapple-launch --workers=2 -- python docs/examples/lora_on_workers.py

starts two workers on this machine first. It trains a small GPT-2 with random weights, which needs no download;
``--preset=gpt2_base_en`` fine-tunes the published one. Only the small matrices that LoRA adds are trained, and only
their gradients are computed.
"""

import argparse
import pathlib

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--preset", help="of keras_hub, such as gpt2_base_en; by default a small model of random weights")
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
parser.add_argument("--epochs", type=int, default=2)
arguments = parser.parse_args()

# Before the model: it would take the memory of GPUs that a worker on this machine lends.
cluster = dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())

keras.utils.set_random_seed(0)
if arguments.preset:
    backbone = keras_hub.models.GPT2Backbone.from_preset(arguments.preset)
else:
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256, num_layers=4, num_heads=4, hidden_dim=64, intermediate_dim=128, max_sequence_length=64
    )
backbone.enable_lora(arguments.rank)
model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
model.compile(
    keras.optimizers.Adam(1e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    weighted_metrics=["accuracy"],
    sampler="greedy",
)
trained = sum(variable.value.shape.num_elements() for variable in model.trainable_variables)
print(f"{trained:,} of {model.count_params():,} parameters are trained")

# Bytes of this program; GPT2Tokenizer gives tokens for the published model.
text = np.frombuffer(pathlib.Path(__file__).read_bytes() * 3, dtype="uint8").astype("int32")
samples = len(text) // (arguments.length + 1)
rows = text[: samples * (arguments.length + 1)].reshape(samples, -1)
x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}
y = rows[:, 1:]

blocks = backbone.num_layers
cuts = [f"transformer_layer_{blocks * stage // cluster.num_devices - 1}" for stage in range(1, cluster.num_devices)]
plan = dapple.Plan.straight(cuts, global_batch_size=16, micro_batches=4)
with dapple.transform(model, cluster, plan) as pipelined:
    pipelined.fit(x, y, batch_size=16, epochs=arguments.epochs, shuffle=False, verbose=2)  # keras_hub makes batches
