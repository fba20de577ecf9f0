"""From an unmodified Keras model to a flat Program: the model's computation, and the structure of its batches."""
