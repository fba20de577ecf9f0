"""What things really cost: layers, operators, streams, links and whole steps, measured; and emulated steps."""
