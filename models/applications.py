"""Models of keras.applications as they are, with random weights.

The layers that a plan may cut after: of VGG ``block<group>_conv<number>``, ``block<group>_pool``, ``fc1`` and ``fc2``;
of Inception-V3 ``mixed<number>``.
"""

from __future__ import annotations

import keras

from dapple_tf.common.keras_private import names_from_start


def application(name: str, *, image: int = 224, classes: int = 1000) -> keras.Model:
    """Builds a model by its name in keras.applications.

    Inputs are ``[batch, image, image, 3]``, outputs logits ``[batch, classes]``.

    Args:
        name: name of the model, such as ``VGG19``.
        image: height and width of the images.
        classes: number of classes.
    """
    with names_from_start():
        return getattr(keras.applications, name)(
            weights=None, input_shape=(image, image, 3), classes=classes, classifier_activation=None
        )
