"""Graphs as TensorBoard's event files: one run for each in its graph view."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.util import event_pb2

from graph_passes.ir.graph import GraphDef, Ref, control_inputs, data_inputs

EVENTS = "events.out.tfevents.0.graph"
"""Name of the event file in a run's directory."""


def write_events(directory: pathlib.Path, graph: GraphDef) -> pathlib.Path:
    """Writes a run with a graph; returns its file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / EVENTS
    now = time.time()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for event in (
            event_pb2.Event(wall_time=now, file_version="brain.Event:2"),
            event_pb2.Event(wall_time=now, graph_def=graph.SerializeToString()),
        ):
            writer.write(event.SerializeToString())
    return path


def together(graphs: Mapping[str, GraphDef]) -> GraphDef:
    """Merges graphs into one, each with its nodes under ``name/``; of functions with one name, the first stays."""
    merged = GraphDef()
    functions: set[str] = set()
    gradients: set[str] = set()
    for name, graph in graphs.items():
        merged.versions.CopyFrom(graph.versions)
        for original in graph.node:
            node = merged.node.add()
            node.CopyFrom(original)
            node.name = f"{name}/{original.name}"
            del node.input[:]
            node.input.extend(str(Ref(f"{name}/{ref.node}", ref.output)) for ref in data_inputs(original))
            node.input.extend(f"^{name}/{waited}" for waited in control_inputs(original))
        for function in graph.library.function:
            if function.signature.name not in functions:
                functions.add(function.signature.name)
                merged.library.function.add().CopyFrom(function)
        for gradient in graph.library.gradient:
            if gradient.function_name not in gradients:
                gradients.add(gradient.function_name)
                merged.library.gradient.add().CopyFrom(gradient)
    return merged
