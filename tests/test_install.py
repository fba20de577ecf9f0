"""What `pip install .` installs, and README top to bottom with it, in a folder where others are in the way.

The environment has what the package requires and nothing that only its development does. README's examples run on two
workers, and of the commands those that train and launch. Nothing is profiled for long, nor trained for many steps:
other tests do so from a checkout.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from packaging.requirements import Requirement

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.run_document import blocks
from dapple_tf.tools.hosts import free_ports

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = {
    f"dapple-{name}" for name in ("dump", "keys", "launch", "plan", "profile", "simulate", "train", "what-if", "worker")
}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installed:
    """An environment with the package.

    Attributes:
        packages: its ``site-packages``.
        programs: its ``bin``.
        folder: where programs run; has folders ``models`` and ``tools`` of somebody else.
    """

    packages: pathlib.Path
    programs: pathlib.Path
    folder: pathlib.Path

    def run(self, *words: str) -> str:
        """Runs a program of the environment; returns what it printed."""
        own = outer() | {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONNOUSERSITE": "1",
            "DAPPLE_CACHE": str(self.folder / "cache"),
        }
        result = subprocess.run(
            [str(self.programs / words[0]), *words[1:]],
            cwd=self.folder,
            env=own,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result.stdout


def outer() -> dict[str, str]:
    """The environment's variables, without those that let Python find a checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def required(name: str, known: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """A distribution and all that it requires, without extras."""
    if name.lower() in known:
        return
    known.add(name.lower())
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from required(requirement.name, known)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("installed")
    source = base / "source"
    for name in ("dapple_tf", "graph_passes", "models", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = base / "environment"
    venv.create(environment, symlinks=True)
    places = {"base": str(environment), "platbase": str(environment)}
    packages = pathlib.Path(sysconfig.get_path("purelib", "venv", vars=places))
    programs = pathlib.Path(sysconfig.get_path("scripts", "venv", vars=places))
    requirements = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert requirements is not None
    known: set[str] = set()
    for text in re.findall(r'"(.*?)"', requirements.group(1)):
        for distribution in required(Requirement(text).name, known):
            for name in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
                if not (packages / name).exists():
                    (packages / name).symlink_to(pathlib.Path(str(distribution.locate_file(name))))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = base / "wheels"
    alone, clean = ["--no-deps", "--no-index"], outer()
    subprocess.run(
        [*pip, "wheel", *alone, "--no-build-isolation", f"--wheel-dir={wheels}", str(source)],
        check=True,
        env=clean,
    )
    (wheel,) = wheels.iterdir()
    subprocess.run(
        [*pip, f"--python={programs / 'python'}", "install", *alone, str(wheel)],
        check=True,
        env=clean,
    )
    folder = base / "folder"
    for name in ("models", "tools"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('somebody else has a folder {name}')\n")
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    return Installed(packages, programs, folder)


@pytest.mark.thorough
def test_nothing_is_called_tools_or_models(installed: Installed) -> None:
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


@pytest.mark.thorough
def test_the_examples_run_one_after_the_other(installed: Installed) -> None:
    """The parts in the language ``py`` that need no cluster go on from the whole examples."""
    whole, parts = ([block.text for block in blocks(README) if block.language == name] for name in ("python", "py"))
    assert len(whole) == 1 and len(parts) == 1
    automatic = 'transform(model, cluster, global_batch_size=256, schedule="zb_h1")'
    assert automatic in whole[0]
    (first,) = free_ports(1)
    text = whole[0].replace(automatic, automatic[:-1] + ", profile_seconds=2)").replace("epochs=3", "epochs=1")
    for shown, port in (("2222", first), ("2223", first + 1)):
        text = text.replace(shown, str(port))
    (installed.folder / "example.py").write_text(text + parts[0], encoding="utf-8")
    program = ["--workers=2", f"--base_port={first}", "--", str(installed.programs / "python"), "example.py"]
    printed = installed.run("dapple-launch", *program)
    assert "expected step" in printed
    for name in ("model.keras", "profile/timeline.html", "dump/index.html"):
        assert (installed.folder / name).is_file(), name


HELP = """
import importlib.metadata, os, sys
import dapple_tf
for entry in importlib.metadata.entry_points(group="console_scripts"):
    if entry.name in ("dapple-launch", "dapple-train", "dapple-worker"):
        if not (child := os.fork()):  # Some have flags of the same name.
            sys.argv = [entry.name, "--help"]
            entry.load()()
        assert os.waitpid(child, 0)[1] == 0, entry.name
"""


@pytest.mark.thorough
def test_commands_tell_their_flags(installed: Installed) -> None:
    """``dapple-launch --help`` and ``dapple-worker --help`` ended with 1."""
    printed = installed.run("python", "-c", HELP)
    assert all(flag in printed for flag in ("--global_batch_size", "--workers", "--address"))


@pytest.mark.thorough
def test_the_commands_run(installed: Installed) -> None:
    """The first one ended after 37 s with nothing saved: TensorBoard wasn't there, which only development requires."""
    with ThreadPoolExecutor(1) as beside:
        on_workers = ["--workers=2", "--devices=2", "--", "python", "docs/examples/train_on_cluster.py", "--pipeline"]
        launched = beside.submit(installed.run, "dapple-launch", *on_workers)
        plans = (("bert:tiny", "1:1", "steps"), ("vgg:tiny", "2:1", "benchmark_steps"))
        for model, plan, steps in plans:
            flags = (f"--model={model}", f"--plan={plan}", "--global_batch_size=16", f"--{steps}=2", "--nomeasure")
            installed.run("dapple-train", *flags)
        launched.result()
    assert (installed.folder / "runs" / "train" / "model.keras").is_file()
    assert any((installed.folder / "runs" / "train" / "logs" / "train").iterdir())
