"""Measurements of layers, operators, streams, links and whole steps; emulated steps."""
