"""What passes work on: graphs, programs and tasks; their invariants; and TensorFlow, through one bridge."""
