"""A vision transformer, trained as a pipeline on a folder of images with one folder for each class.

    python docs/examples/vit_on_images.py --images=my_images --size=64

Without ``--images`` it draws some first: stripes across and down. Patches and positions are embedded as on keras.io.
"""

import argparse
import pathlib
import tempfile

import keras
import numpy as np

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--images", help="a folder that has one folder of images for each class")
parser.add_argument("--size", type=int, default=32, help="images are made so wide and high")
parser.add_argument("--patch", type=int, default=8)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()


def draw_images(folder: pathlib.Path, count: int = 160) -> None:
    """Stripes of any width and brightness, across or down."""
    draw = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32]
    for name, places in (("across", rows), ("down", columns)):
        (folder / name).mkdir()
        for number in range(count):
            wave = np.sin(places * draw.uniform(0.5, 1.5) + draw.uniform(0, 6))
            grey = 128 + draw.uniform(40, 100) * wave + draw.normal(scale=20, size=wave.shape)
            image = np.repeat(grey.clip(0, 255)[..., None], 3, axis=2)
            keras.utils.save_img(folder / name / f"{number}.png", image, scale=False)


@keras.saving.register_keras_serializable("examples")
class PatchEncoder(keras.layers.Layer):
    """Adds an embedding of its place to each patch: [batch, patches, width]."""

    def __init__(self, patches: int, width: int, **options) -> None:
        super().__init__(**options)
        self.patches, self.width = patches, width
        self.positions = keras.layers.Embedding(patches, width)

    def call(self, patches):
        """The patches with their places."""
        return patches + self.positions(keras.ops.arange(self.patches))

    def get_config(self):
        """What ``load_model`` makes the layer from."""
        return {**super().get_config(), "patches": self.patches, "width": self.width}


def vision_transformer(classes: int) -> keras.Model:
    """Patches by a convolution, blocks of attention, and the mean of what comes out."""
    width = arguments.width
    images = keras.Input((arguments.size, arguments.size, 3))
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    x = keras.layers.Conv2D(width, arguments.patch, arguments.patch, name="patches")(x)
    x = keras.layers.Reshape((-1, width))(x)
    x = PatchEncoder(x.shape[1], width, name="positions")(x)
    for number in range(arguments.blocks):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(4, width // 4)(y, y)
        x = keras.layers.Add()([x, y])
        y = keras.layers.Dense(2 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add(name=f"block_{number}")([x, keras.layers.Dense(width)(y)])
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(images, keras.layers.Dense(classes, name="logits")(x))


with tempfile.TemporaryDirectory() as drawn:
    if arguments.images is None:
        draw_images(pathlib.Path(drawn))
    folder = arguments.images or drawn
    data = {"image_size": (arguments.size, arguments.size), "batch_size": 16, "seed": 0, "verbose": False}
    training, held_out = keras.utils.image_dataset_from_directory(folder, validation_split=0.25, subset="both", **data)

    keras.utils.set_random_seed(0)
    model = vision_transformer(len(training.class_names))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3), loss, metrics=["accuracy"])

    # Two stages of equal blocks; the first, which sees the images, with two replicas.
    half = f"block_{arguments.blocks // 2 - 1}"
    plan = dapple.Plan.manual([half], [[0, 1], [2]], micro_batches=4, global_batch_size=16)
    with dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan) as pipelined:
        pipelined.fit(training, validation_data=held_out, epochs=arguments.epochs, shuffle=False, verbose=2)
