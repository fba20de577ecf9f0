"""Steps without the model: simulated event by event, or emulated on TensorFlow's executor."""
