"""Installs dapple_tf; the settings of the development tools are in pyproject.toml."""

from __future__ import annotations

import pathlib
import runpy

from setuptools import find_packages, setup

_ROOT = pathlib.Path(__file__).parent
_INSIDE = ("models", "tools")
"""Folders of a checkout that are installed as packages of dapple_tf, so that nobody else's folders have their names."""
_EVALUATION = "tools.evaluation"
"""Programs of our own evaluation, which need a checkout: not installed."""
_COMMANDS = ("dump", "keys", "launch", "plan", "profile", "simulate", "train", "what_if")
"""Programs of `tools` that do without a checkout."""
_LIBRARIES = (
    *("bayesflow", "csbdeep", "hgq2", "k3im", "keras-bio", "keras-climate", "keras-cv", "keras-proba", "keras-rs"),
    *("keras-sciml", "keras-tcn", "medicai", "zeromodels"),
)
"""Libraries of models in tools/evaluation/zoo_libraries.py."""
_MODULES = {"dump": "dump_graph"}
_VERSION = runpy.run_path(str(_ROOT / "dapple_tf" / "version.py"))["VERSION"]


def _packages() -> list[str]:
    """All packages by the names that they are installed with."""
    outer = [
        name
        for name in find_packages(include=["dapple_tf", "dapple_tf.*", "graph_passes", "graph_passes.*"])
        if not name.startswith(tuple(f"dapple_tf.{inner}" for inner in _INSIDE))  # a checkout's names for these
    ]
    inside = [
        name
        for inner in _INSIDE
        for name in (inner, *(f"{inner}.{sub}" for sub in find_packages(inner)))
        if name != _EVALUATION
    ]
    return [*outer, *(f"dapple_tf.{name}" for name in inside)]


def _command(name: str) -> str:
    return f"dapple-{name.replace('_', '-')} = dapple_tf.tools.{_MODULES.get(name, name)}:run"


setup(
    name="dapple_tf",
    version=_VERSION,
    description="Pipelined data-parallel training for TensorFlow 2 and Keras 3, as a sequence of graph passes",
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the dapple_tf authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pipeline parallelism", "data parallelism", "distributed training", "TensorFlow", "Keras", "DAPPLE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=_packages(),
    package_dir={f"dapple_tf.{name}": name for name in _INSIDE},
    entry_points={"console_scripts": [*map(_command, _COMMANDS), "dapple-worker = dapple_tf.worker:run"]},
    package_data={"dapple_tf.describe": ["profiles/*"], "dapple_tf.view": ["assets/*"]},
    python_requires=">=3.11",
    install_requires=["tensorflow>=2.18", "keras>=3.8", "numpy", "protobuf", "absl-py", "networkx", "tqdm"],
    extras_require={
        "images": ["matplotlib"],
        "data": ["tokenizers"],  # for data that are read as tokens of text; see docs/data.md
        "tls": ["cryptography"],  # for dapple-keys alone, which makes certificates
        "ray": ["ray"],  # for Cluster.from_ray alone
        "torch": ["torch>=2.6"],  # for tools.evaluation.bench_torch alone
        "zoo": ["keras-hub", *_LIBRARIES],  # for tools.evaluation.zoo, which trains their models beside plain Keras
        "docs": ["zensical", "mkdocstrings-python", "ruff"],  # for the site of the documentation, `make docs`
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "keras-hub",
            "tensorboard",
            "matplotlib",
            "pyyaml",
            "cryptography",
            "tokenizers",
            "selenium",
            "netron",
            "kubernetes-validate",  # has the published schemas of Kubernetes
            "wheel",  # to try what is installed
        ],
    },
)
