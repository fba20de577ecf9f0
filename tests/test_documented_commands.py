"""Every command and example of README and docs works: those of documents to come, too, as they are collected here.

Commands are parsed by the flags of the program that they name. Those in blocks are run, on tiny models, where the
package is installed and there is no checkout. So are examples in Python where a document's first one imports what it
needs; else they are run with stand-ins for this package and what they need (a cluster, a model, data), which check the
names and arguments of all calls.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
from absl import flags
from installed import Installed
from program_flags import INSTALLED, ROOT, flags_of, source_of

import dapple_tf as dapple
from dapple_tf.describe.profile_text import load_text
from dapple_tf.models.registry import find_model
from dapple_tf.tools import keys
from dapple_tf.tools.evaluation.run_document import blocks
from dapple_tf.tools.hosts import free_ports

DOCUMENTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}

RUN_ELSEWHERE = {
    "README.md": "test_install.py",
    "docs/getting_started.md": "test_tutorial.py",
    "docs/tutorial.md": "test_tutorial.py",
    "docs/operators.md": "test_tutorial.py",
}
"""Documents whose examples in the language ``python`` other tests run."""

SHELLS = {"sh", "bash", "shell", "console"}
PROGRAMS = {"tensorboard": "tensorboard", "netron": "netron"}
"""Programs of packages that an extra installs."""
SYSTEM = {"ip", "nft", "scp"}
"""Programs of the system, which change it or others: only their syntax is looked at."""


class Command(NamedTuple):
    """A line for a shell, in a block or between backticks."""

    document: str
    line: str
    in_block: bool

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def commands() -> Iterator[Command]:
    """Those in blocks, and those between backticks that begin with ``python -m``, ``make``, ``pip`` or ours."""
    for name, path in DOCUMENTS.items():
        text = re.sub("^ {4}", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)  # also blocks of lists
        lines = [
            (line.removeprefix("$ ").strip(), True)
            for block in blocks(text)
            if block.language in SHELLS
            for line in block.text.replace("\\\n", " ").splitlines()
        ]
        words = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        ours = re.findall(r"`((?:python -m|make|pip|dapple-[\w-]+) [^`]*)`", words)
        lines += [(" ".join(line.split()), False) for line in ours]
        yield from (Command(name, *line) for line in lines if line[0] and not line[0].startswith("#"))


COMMANDS = list(dict.fromkeys(commands()))


# ---- flags


class UnknownCommandError(Exception):
    """There is no such program, target or file."""


def check(line: str) -> None:
    """Refuses a command that can't be run, without running it.

    Raises:
        UnknownCommandError: there is no such program, module, target or file, or it isn't known here.
        absl.flags.Error: there is no such flag, or not with such a value.
        ModelError: there is no such model.
    """
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):  # variables of the environment
        words = words[1:]
    match words:
        case ["export", *_]:
            _check_syntax(line)
        case ["taskset", "-c", _, *command, "&"]:
            check(shlex.join(command))
        case ["python", "-m", module, *arguments]:
            _check_module(module, arguments)
        case ["python", script, *arguments]:
            _check_script(script, arguments)
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
            if unknown := [target for target in targets if target not in known and "=" not in target]:
                raise UnknownCommandError(f"make has no target {unknown[0]}")
        case ["pip", "install", *packages]:
            for package in packages:
                if package not in ("-e", "--editable"):
                    _check_package(package)
        case [program, *arguments] if program in INSTALLED:
            _check_module(INSTALLED[program], arguments)
        case [program, *_] if program in PROGRAMS:
            importlib.metadata.version(PROGRAMS[program])
        case [program, *_] if program in SYSTEM:
            _check_syntax(line)
        case _:
            raise UnknownCommandError(f"{line!r}: say in this test how such a command is checked")


def _check_syntax(line: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnknownCommandError(done.stderr)


def _check_package(package: str) -> None:
    name, _, extras = package.partition("[")
    if name not in (".", "dapple_tf"):
        raise UnknownCommandError(f"pip install {package}: is it a dependency?")
    known = re.findall(r'^ {8}"(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if unknown := set(filter(None, extras.rstrip("]").split(","))) - set(known):
        raise UnknownCommandError(f"pip install {package}: there is no extra {', '.join(unknown)}")


def _check_script(script: str, arguments: Sequence[str]) -> None:
    """A script of the repository with argparse: its flags are there."""
    path = ROOT / script
    if not path.is_file():
        raise UnknownCommandError(f"there is no file {script}")
    known = re.findall(r"[\"'](--\w+)[\"']", path.read_text(encoding="utf-8"))
    for argument in arguments:
        if argument.partition("=")[0] not in known:
            raise UnknownCommandError(f"{script} has no flag {argument}")


def _check_module(module: str, arguments: Sequence[str]) -> None:
    if not source_of(module).is_file():
        raise UnknownCommandError(f"there is no module {module}")
    values = flags_of(module)
    values.unparse_flags()
    left = values([module, *(argument for argument in arguments if argument not in ("--help", "--helpfull"))])[1:]
    following = list(arguments[arguments.index("--") + 1 :]) if "--" in arguments else []
    if following:
        check(shlex.join(following))
    for argument in left[: len(left) - len(following)]:
        if module == "tools.keys":
            keys.machine_names(argument)
        elif not (ROOT / argument).exists():
            raise UnknownCommandError(f"{module} is given {argument!r}, which isn't there")
    model = values["model"].value if "model" in values and module != "tools.evaluation.check_streams" else None
    if model and not model.startswith("my_"):
        find_model(model)


@pytest.mark.parametrize("given", COMMANDS, ids=str)
def test_commands_can_be_run_as_they_are_written(given: Command) -> None:
    if "NAME" not in given.line:  # any of them
        check(given.line)


@pytest.mark.parametrize(
    "line",
    [
        *("python -m tools.nothing", "python -m tools.train --stepps=3", "python -m tools.train --steps=0"),
        *("python -m tools.train --schedule", "python -m tools.train --model=gtp", "python -m tools.train plan.json"),
        *("python -m dapple_tf.worker --adress=a:1", "python -m tools.launch --workers=0 -- make train"),
        *("python -m tools.launch -- python -m tools.train --model=gtp", "python docs/examples/nothing.py"),
        *(
            "python docs/examples/train_on_cluster.py --epoch=1",
            "make nothing",
            "pip install numpyy",
            "pip install .[x]",
        ),
        *("pip install .[x]", "nft add chain '{", "./train.sh"),
    ],
)
def test_commands_that_cant_be_run_are_found(line: str) -> None:
    with pytest.raises((UnknownCommandError, flags.Error, ValueError)):
        check(line)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40
    assert {"README.md", "docs/tools.md", "docs/cluster.md"} <= {given.document for given in COMMANDS}
    of_readme = {given.line.split("#")[0].strip() for given in COMMANDS if given.document == "README.md"}
    assert {"make train", "make test"} <= of_readme
    assert examples("README.md", ["python"])
    of_tools = {given.line.split()[0] for given in COMMANDS if given.document == "docs/tools.md"}
    assert set(INSTALLED) - {"dapple-keys", "dapple-worker"} <= of_tools


def test_commands_are_called_as_they_are_installed() -> None:
    modules = "|".join(map(re.escape, INSTALLED.values()))
    others = {given.document for given in COMMANDS if re.search(rf"-m (dapple_tf\.)?({modules})\b", given.line)}
    assert others == {"docs/tools.md", "docs/decisions/0025-installed-under-one-name.md"}  # say what a checkout has


# ---- runs

QUICK = {
    "dapple-train": "--model=vgg:tiny --plan=1:1 --nomeasure --noprofile_step",
    "dapple-profile": "--model=vgg:tiny --batch_size=2 --repeats=1 --nocache",
    "dapple-dump": "--model=vgg:tiny",
    "dapple-what-if": "--nobrowser",
}
"""Program -> flags that make it quick."""
RUN = [
    given
    for given in COMMANDS
    if given.in_block and re.search(r"\bdapple-|dapple_tf\.", given.line) and "--gpus" not in given.line
]
"""The commands of this package in blocks, but for those that need GPUs."""


def quick(line: str) -> list[str]:
    """The words of a command, with a smaller model and less work."""
    words = shlex.split(re.sub(r"steps=\d+", "steps=2", line), comments=True)
    program = [word for word in words if word in INSTALLED][-1:]
    kept = {word.partition("=")[0] for word in words if ":tiny" in word or word.startswith("--plan=")}
    flags = " ".join(QUICK.get(name, "") for name in program).split()
    return [*words, *(flag for flag in flags if flag.partition("=")[0] not in kept)]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("document", sorted({given.document for given in RUN}))
def test_commands_run_where_the_package_is_installed(document: str, installed: Installed) -> None:
    """One after the other, each with what those before have left; workers serve until others are started."""
    folder = installed.folder / pathlib.Path(document).stem
    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    description = '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 4}], "intra_bandwidth": 1e10}'
    dapple.Cluster.from_json(description).save(folder / "cluster.json")
    profile = load_text("bert-48")
    profile.save(folder / "profile.json")
    plan = dapple.Plan.manual([profile.layers[20].name], [[0], [1]], 4, 8)
    for name in ("first.json", "plan.json"):
        plan.save(folder / name)
    changes = {
        **dict(zip((":2222", ":2223"), (f":{port}" for port in free_ports(2)), strict=True)),
        **{"10.0.0.": "127.0.0.", "10.77.0.": "127.0.0.", "--tls=keys": "--tls=keys/node1", "$HOME": str(folder)},
    }
    with contextlib.ExitStack() as workers:
        for line in [given.line for given in RUN if given.document == document]:
            words = quick(functools.reduce(lambda text, change: text.replace(*change), changes.items(), line))
            variables = {"PYTHONPATH": str(installed.extras)}
            while "=" in words[0]:
                name, _, variables[name] = words.pop(0).partition("=")
            if "dapple-what-if" in words:
                with installed.serving(*words, folder=folder, **variables) as address:
                    assert "The page is at" in address
            elif "dapple-worker" in words:
                workers.close()
                for host in ("127.0.0.1", "127.0.0.2"):
                    own = [word.replace("127.0.0.1", host) for word in words if word != "&"]
                    workers.enter_context(installed.serving(*own, folder=folder, **variables))
            else:
                installed.run(*words, folder=folder, **variables)


# ---- examples


def examples(document: str, languages: Sequence[str] = ("python", "py")) -> list[str]:
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    return [block.text for block in blocks(text) if block.language in languages]


WHOLE = [
    document
    for document in DOCUMENTS
    if document not in RUN_ELSEWHERE and "import dapple_tf as dapple\n" in "".join(examples(document)[:1])
]
PARTS = {
    document: examples(document, ("py",) if document in RUN_ELSEWHERE else ("python", "py"))
    for document in DOCUMENTS
    if document not in WHOLE
}


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("document", WHOLE)
def test_whole_examples_run_and_print_what_is_shown(document: str, installed: Installed) -> None:
    copy = installed.folder / pathlib.Path(document).name
    shutil.copy(DOCUMENTS[document], copy)
    program = shutil.copy(ROOT / "tools" / "evaluation" / "run_document.py", installed.folder)
    installed.run("python", program, "--write", str(copy), PYTHONPATH=str(installed.extras))
    assert copy.read_text(encoding="utf-8") == DOCUMENTS[document].read_text(encoding="utf-8")


class Checked:
    """Stands for a module, class, function or object: has its attributes, and takes what its calls take.

    Args:
        original: what it stands for; None for what a call gives that isn't told.
        path: what it is called in errors.
    """

    def __init__(self, original: Any, path: str) -> None:
        self._original, self._path = original, path

    def __getattr__(self, name: str) -> Any:
        if self._original is None:
            return Checked(None, f"{self._path}.{name}")
        attribute = inspect.getattr_static(self._original, name, None)
        if attribute is None and not hasattr(self._original, name):
            raise AttributeError(f"{self._path} has no {name}")
        if isinstance(attribute, property | functools.cached_property):
            return Checked(None, f"{self._path}.{name}")
        return Checked(getattr(self._original, name), f"{self._path}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._original is None:
            return Checked(None, f"{self._path}()")
        signature = inspect.signature(self._original)
        first = next(iter(signature.parameters), "")
        signature.bind(*((self, *arguments) if first == "self" else arguments), **named)
        kind = GIVES.get(self._path)
        kind = self._original if inspect.isclass(self._original) else kind
        return Checked(kind, f"{self._path}()")

    def __getitem__(self, key: Any) -> Any:
        return Checked(None, f"{self._path}[{key!r}]")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


GIVES = {
    "dapple.transform": dapple.PipelinedModel,
    "dapple.Cluster.local": dapple.Cluster,
    "dapple.Cluster.of_servers": dapple.Cluster,
    "dapple.Cluster.from_ray": dapple.Cluster,
    "dapple.plan": dapple.Plan,
}
"""What calls give whose results are used on."""


@pytest.mark.slow
@pytest.mark.parametrize("document", [document for document, parts in PARTS.items() if parts])
def test_parts_of_programs_name_what_there_is_and_call_it_with_what_it_takes(
    document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this package is run; models that there are a stand-in for aren't built."""
    monkeypatch.chdir(ROOT)
    known: dict[str, Any] = dict.fromkeys(("model", "dataset", "x", "y", "build_and_compile", "ray"), mock.MagicMock())
    known |= {
        "dapple": Checked(dapple, "dapple"),
        "plan": Checked(dapple.Plan, "plan"),
        "cluster": Checked(dapple.Cluster, "cluster"),
    }
    known |= {"pipelined": Checked(dapple.PipelinedModel, "pipelined"), "print": lambda *_: None}
    with dapple.deferred_init():  # models of any size
        for number, text in enumerate(PARTS[document]):
            text = text.replace("bert.bert_24(", "bert.bert_24(depth=1, ")  # The slowest to build.
            exec(compile(text, f"{document}, example {number}", "exec"), known)
