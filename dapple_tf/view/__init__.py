"""Timelines and task graphs, drawn as text, images, pages and traces."""
