"""`pip install .` in an environment of its own: its content, its commands, and README top to bottom.

The environment has the package's requirements and nothing that only its development needs. Programs run in a folder
that has folders `models` and `tools` of somebody else.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.run_document import blocks
from dapple_tf.tools.hosts import free_ports

ROOT = pathlib.Path(__file__).parents[1]
COMMANDS = {
    f"dapple-{name}" for name in ("dump", "keys", "launch", "plan", "profile", "simulate", "train", "what-if", "worker")
}
# Variables of the environment but those by which Python finds a checkout.
OUTER = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


class Installed(NamedTuple):
    """An environment with the package: its ``site-packages``, its ``bin``, and a folder to run programs in."""

    packages: pathlib.Path
    programs: pathlib.Path
    folder: pathlib.Path

    def run(self, program: str, *arguments: str) -> str:
        """Runs a program of the environment; returns its output."""
        variables = OUTER | {"PYTHONNOUSERSITE": "1", "DAPPLE_CACHE": str(self.folder / "cache")}
        variables["PATH"] = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        line = [str(self.programs / program), *arguments]
        done = subprocess.run(line, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    source, environment, wheels, folder = (base / name for name in ("source", "environment", "wheels", "folder"))
    for name in ("dapple_tf", "graph_passes", "models", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(environment, symlinks=True)
    places = {"base": str(environment), "platbase": str(environment)}
    packages, programs = (
        pathlib.Path(sysconfig.get_path(kind, "venv", vars=places)) for kind in ("purelib", "scripts")
    )
    requirements = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert requirements is not None
    known: set[str] = set()
    for text in re.findall(r'"(.*?)"', requirements.group(1)):
        for found in _required(Requirement(text).name, known):
            for name in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
                if not (packages / name).exists():
                    (packages / name).symlink_to(pathlib.Path(str(found.locate_file(name))))
    pip, alone = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"], ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *alone, "--no-build-isolation", f"--wheel-dir={wheels}", str(source)]
    subprocess.run(build, check=True, env=OUTER)
    (wheel,) = wheels.iterdir()
    into = [*pip, f"--python={programs / 'python'}", "install", *alone, str(wheel)]
    subprocess.run(into, check=True, env=OUTER)
    for name in ("models", "tools"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('somebody else has a folder {name}')\n")
    return Installed(packages, programs, folder)


def _required(name: str, known: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """A distribution and its requirements, without extras."""
    if name.lower() in known:
        return
    known.add(name.lower())
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _required(requirement.name, known)


def test_a_wheel_has_two_packages_with_their_files_and_nothing_called_tools_or_models(installed: Installed) -> None:
    files = importlib.metadata.Distribution.at(next(installed.packages.glob("dapple_tf-*.dist-info"))).files or []
    tops = {path.parts[0] for path in files} - {".."}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"dapple_tf", "graph_passes"}
    names = {path.as_posix() for path in files}
    assert {
        "dapple_tf/tools/train.py",
        "dapple_tf/describe/profiles/bert-48-pbs-2.txt",
        "dapple_tf/models/readers/options.py",
        "dapple_tf/view/assets/what_if.js",
    } <= names
    assert not any(name.startswith("dapple_tf/tools/evaluation") for name in names)  # needs a checkout
    assert {path.name for path in installed.programs.glob("dapple-*")} == COMMANDS
    assert set(command.CONSOLE.values()) == COMMANDS - {"dapple-worker"}


PLANNED = ("--profile=bert-48", "--cluster=cpu:2", "--global_batch_size=4")


@pytest.mark.parametrize(
    ("line", "last"),
    [
        (("dapple-worker", "--help"), r"--tls: "),
        (("dapple-plan", *PLANNED, "--micro_batches=2", "--schedule=gpipe", "--output=p.json"), r"--plan=p\.json "),
        (
            ("dapple-train", "--model=ffnn:tiny", "--plan=1:1", "--cluster=cpu:2", "--nomeasure", "--steps=1"),
            r"summary\.json",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_installed_commands_end_with_what_they_promise(line: tuple[str, ...], last: str, installed: Installed) -> None:
    """``dapple-worker --help`` ended with 1."""
    assert re.search(last, "\n".join(installed.run(*line).splitlines()[-9:]))


def test_the_examples_of_readme_run_one_after_the_other(installed: Installed) -> None:
    """The parts in the language ``py`` that need no cluster go on from the whole example, on two workers."""
    found = [*blocks((ROOT / "README.md").read_text(encoding="utf-8"))]
    whole, parts = ([block.text for block in found if block.language == name] for name in ("python", "py"))
    assert len(whole) == 1 and len(parts) == 1
    automatic = 'transform(model, cluster, global_batch_size=256, schedule="zb_h1")'
    assert automatic in whole[0]
    (first,) = free_ports(1)
    text = whole[0].replace(automatic, automatic[:-1] + ", profile_seconds=1)").replace("epochs=3", "epochs=1")
    for shown, own in (("2222", first), ("2223", first + 1), ("2048", 128), ("range(8)", "range(4)")):
        assert shown in text
        text = text.replace(shown, str(own))
    (installed.folder / "example.py").write_text(text + parts[0], encoding="utf-8")
    program = ["--workers=2", f"--base_port={first}", "--", str(installed.programs / "python"), "example.py"]
    assert "expected step" in installed.run("dapple-launch", *program)
    for name in ("model.keras", "profile/timeline.html", "dump/index.html"):
        assert (installed.folder / name).is_file(), name
