"""From an unmodified Keras model to a flat Program: what it computes, and what batches of its data look like."""
