"""An environment of its own with what `pip install .` installs, in a folder where others are in the way."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = ("cryptography", "matplotlib", "tokenizers")
"""What documents install besides, by extras."""


@dataclass(frozen=True)
class Installed:
    """An environment with the package.

    Attributes:
        packages: its ``site-packages``.
        programs: its ``bin``.
        folder: where programs run; has folders ``models`` and ``tools`` of somebody else.
        extras: packages that no more than an extra installs, for PYTHONPATH.
    """

    packages: pathlib.Path
    programs: pathlib.Path
    folder: pathlib.Path
    extras: pathlib.Path

    def run(self, *words: str, folder: pathlib.Path | None = None, **variables: str) -> str:
        """Runs a program of the environment, or another; returns what it printed.

        Args:
            words: its name and arguments.
            folder: the folder to run in; None is `folder`.
            variables: more variables of the environment.
        """
        result = subprocess.run(
            self._words(words),
            cwd=folder or self.folder,
            env=self._environment() | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result.stdout

    @contextlib.contextmanager
    def serving(self, *words: str, folder: pathlib.Path, **variables: str) -> Iterator[str]:
        """Runs a program that serves until it is interrupted; gives the line that has its address."""
        environment = self._environment() | variables
        process = subprocess.Popen(self._words(words), cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process:
            try:
                yield next(line for line in process.stdout if re.search(r"\d\.\d:\d", line))
            finally:
                process.send_signal(signal.SIGINT)

    def _words(self, words: Sequence[str]) -> list[str]:
        own = self.programs / words[0]
        return [str(own) if own.exists() else words[0], *words[1:]]

    def _environment(self) -> dict[str, str]:
        return outer() | {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONNOUSERSITE": "1",
            "PYTHONUNBUFFERED": "1",
            "DAPPLE_CACHE": str(self.folder / "cache"),
        }


def outer() -> dict[str, str]:
    """The environment's variables but those by which Python finds a checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def required(name: str, known: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """A distribution and its requirements, without extras."""
    if name.lower() in known:
        return
    known.add(name.lower())
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from required(requirement.name, known)


def install(base: pathlib.Path) -> Installed:
    """Installs the package, and what it requires, below a folder."""
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
    _link([Requirement(text).name for text in re.findall(r'"(.*?)"', requirements.group(1))], packages, known)
    extras = base / "extras"
    extras.mkdir()
    _link(EXTRAS, extras, known)
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
    return Installed(packages, programs, folder, extras)


def _link(names: Sequence[str], folder: pathlib.Path, known: set[str]) -> None:
    """Makes links in a folder to distributions and what they require, but for those that are known."""
    for distribution in [found for name in names for found in required(name, known)]:
        for name in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(pathlib.Path(str(distribution.locate_file(name))))
