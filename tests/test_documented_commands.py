"""Every command and example of README and docs works: those of documents to come, too, as they are collected here.

Commands are parsed by the flags of the program that they name; those that are done in no time are run, on tiny models.
Examples in Python are run where a document's first one imports what it needs; else they are run with stand-ins for this
package and what they need (a cluster, a model, data), which check the names and arguments of all calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import pathlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
from absl import flags
from program_flags import INSTALLED, ROOT, flags_of, imported, source_of

import dapple_tf as dapple
from dapple_tf.models.registry import find_model
from dapple_tf.tools import command, keys
from dapple_tf.tools.evaluation.run_document import blocks, run

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
SYSTEM = {"nft", "scp"}
"""Programs of the system, which change it or others: only their syntax is looked at."""


class Command(NamedTuple):
    """A line for a shell."""

    document: str
    line: str

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def commands() -> Iterator[Command]:
    """Those in blocks, and those between backticks that begin with ``python -m``, ``make``, ``pip`` or ours."""
    for name, path in DOCUMENTS.items():
        text = path.read_text(encoding="utf-8")
        lines = [
            line.removeprefix("$ ").strip()
            for block in blocks(text)
            if block.language in SHELLS
            for line in block.text.replace("\\\n", " ").splitlines()
        ]
        words = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        lines += [
            " ".join(line.split()) for line in re.findall(r"`((?:python -m|make|pip|dapple-[\w-]+) [^`]*)`", words)
        ]
        yield from (Command(name, line) for line in lines if line and not line.startswith("#"))


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

TINY = {
    "--model=gpt": "--model=vgg:tiny",
    "--model=gnmt:tiny": "--model=vgg:tiny",
    "--steps=20": "--steps=2",
    "--benchmark_steps=20": "--benchmark_steps=2",
    "--batch_size=2,8": "--batch_size=2",
    "--output_dir=runs/graphs": "--output_dir=graphs",
}
"""What is smaller when commands are run."""


def start(line: str) -> int:
    """Runs a program of this package in this process."""
    match shlex.split(line, comments=True):
        case ["python", "-m", module, *arguments]:
            module = module.removeprefix("dapple_tf.")
        case [program, *arguments]:
            module = INSTALLED[program]
    program = importlib.import_module(imported(module))
    quick = ["--repeats=1", "--nocache"] if module == "tools.profile" else []
    return command.run(program.main, program.FLAGS, [*(TINY.get(word, word) for word in arguments), *quick])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_commands_for_profiles_plans_timelines_and_graphs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, each with what the one before has left; the cluster is a description of four devices."""
    monkeypatch.chdir(tmp_path)
    description = '{"format": "dapple_tf.cluster/1", "servers": [{"devices": 4}], "intra_bandwidth": 1e10}'
    dapple.Cluster.from_json(description).save("cluster.json")
    wanted = ("dapple-profile", "dapple-plan", "dapple-simulate", "dapple-dump")
    lines = [given.line for given in COMMANDS if given.document == "docs/tools.md"]
    lines = [line for line in lines if line.split()[0] in wanted and "=" in line]
    assert len(lines) >= 5
    for line in lines:
        assert start(line) == 0, f"{line}\n{capsys.readouterr().err}"
    assert pathlib.Path("plan.json").is_file() and pathlib.Path("runs/simulated").is_dir()
    assert pathlib.Path("graphs/index.html").is_file()


def runnable(line: str) -> bool:
    """Whether a command makes data, or trains a tiny model by a plan: test_train_models.py plans every model."""
    return re.match(r"python -m dapple_tf.tools.make_data |dapple-train .*:tiny .*--plan=", line) is not None


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says this of few data to evaluate on.
@pytest.mark.parametrize("document", sorted({given.document for given in COMMANDS if runnable(given.line)}))
def test_the_commands_that_make_data_and_train_tiny_models(
    document: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a document one after the other; without measuring."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path / "cache"))
    for line in [given.line for given in COMMANDS if given.document == document and runnable(given.line)]:
        quick = " --nomeasure --noprofile_step" if "dapple-train " in line else ""
        assert start(line.partition("#")[0] + quick) == 0, f"{line}\n{capsys.readouterr().err}"


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
def test_whole_examples_run_and_print_what_is_shown(
    document: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    assert run(text, document) == text


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
