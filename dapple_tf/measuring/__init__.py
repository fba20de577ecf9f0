"""Measurements of layers, operators, links and whole steps; emulated steps."""
