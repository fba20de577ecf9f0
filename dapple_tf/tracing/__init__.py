"""Measured steps: traced, split by task, monitored during training, and compared with predictions."""
