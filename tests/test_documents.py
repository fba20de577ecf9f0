"""README and docs: their commands and examples work, their links lead somewhere, and the site has all of them.

Commands are parsed by the flags of the program that they name; test_install.py runs some of them. Examples in Python
run where a document's first one imports what it needs; else they are run with stand-ins for this package and what they
need (a cluster, a model, data), which check the names and arguments of all calls.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from absl import flags
from program_flags import INSTALLED, ROOT, flags_of, source_of

import dapple_tf as dapple
from dapple_tf.models.registry import find_model
from dapple_tf.tools import keys
from dapple_tf.tools.evaluation.run_document import ExampleError, blocks, pictures, run

DOCS = ROOT / "docs"
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}

SHELLS = {"sh", "bash", "shell", "console"}
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
        case ["tensorboard" | "netron" as program, *_]:
            importlib.metadata.version(program)
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
    model = values["model"].value if "model" in values else None
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
        *("python -m tools.train --model=gtp", "python -m tools.train plan.json", "./train.sh", "make nothing"),
        *("python -m tools.launch -- python -m tools.train --model=gtp", "python docs/examples/nothing.py"),
        *("python docs/examples/train_on_cluster.py --epoch=1", "pip install numpyy", "pip install .[x]"),
        "nft add chain '{",
    ],
)
def test_commands_that_cant_be_run_are_found(line: str) -> None:
    with pytest.raises((UnknownCommandError, flags.Error, ValueError)):
        check(line)


def test_commands_are_called_as_they_are_installed() -> None:
    modules = "|".join(map(re.escape, INSTALLED.values()))
    others = {given.document for given in COMMANDS if re.search(rf"-m (dapple_tf\.)?({modules})\b", given.line)}
    assert others == {"docs/tools.md"}  # says what a checkout has


# ---- examples


def examples(document: str, languages: Sequence[str] = ("python", "py")) -> list[str]:
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    return [block.text for block in blocks(text) if block.language in languages]


WHOLE = [name for name in DOCUMENTS if "import dapple_tf as dapple\n" in "".join(examples(name)[:1])]
PARTS = {
    name: examples(name, ("py",) if name in WHOLE else ("python", "py"))
    for name in DOCUMENTS
    if name == "README.md" or name not in WHOLE
}
ELSEWHERE = {"README.md", "docs/tutorial.md"}
"""Documents whose examples test_install.py and `make examples` run."""


@pytest.mark.parametrize("document", sorted({*WHOLE} - ELSEWHERE))
def test_whole_examples_run_and_print_what_is_shown(
    document: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOCUMENTS[document].read_text(encoding="utf-8")
    printed = run(text, document)
    assert printed == text or document == "docs/getting_started.md"  # which shows losses
    for name in pictures(text):
        assert (tmp_path / name).is_file() or (DOCS / "pictures" / name).is_file(), name


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
        own = self._original if inspect.isclass(self._original) else GIVES.get(self._path)
        return Checked(own, f"{self._path}()")

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


@pytest.mark.parametrize("document", [document for document, parts in PARTS.items() if parts])
def test_parts_of_programs_name_what_there_is_and_call_it_with_what_it_takes(
    document: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of this package is run; models that there are a stand-in for aren't built."""
    monkeypatch.chdir(ROOT)
    known: dict[str, Any] = dict.fromkeys(("model", "dataset", "x", "y", "build_and_compile", "ray"), mock.MagicMock())
    standing_for = {"plan": dapple.Plan, "cluster": dapple.Cluster, "pipelined": dapple.PipelinedModel}
    known |= {name: Checked(original, name) for name, original in {"dapple": dapple, **standing_for}.items()}
    known["print"] = lambda *_: None
    with dapple.deferred_init():  # models of any size
        for number, text in enumerate(PARTS[document]):
            text = text.replace("bert.bert_24(", "bert.bert_24(depth=1, ")  # The slowest to build.
            exec(compile(text, f"{document}, example {number}", "exec"), known)


# ---- programs and notebooks to begin from

EXAMPLES = DOCS / "examples"
PROGRAMS = {
    "bfloat16_gradients": ([], r"weights differ by at most [1-9]\.\de-0[345]"),
    "multi_output_class_weights": ([], r"kind_accuracy: .* shade_loss: (.*\n)*of the rare kind \d\d%"),
    "own_schedule": (["--image=schedules.svg"], r"run_ahead  step .* GiB on the fullest device"),
    "plan_for_other_hardware": (["--folder=."], r"one all-reduce at the end takes \d\.\d\d times as long"),
    "vit_on_images": ([], r"val_accuracy: (0\.[89]|1\.0)"),
}
"""Example -> flags, and its output."""
IN_PROCESSES = {"lora_on_workers", "resume_after_kill", "two_workers", "train_on_cluster"}
"""Examples that start others: `make examples` runs them; test_launch.py has the last."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_example_programs_do_what_they_say(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROGRAMS} | IN_PROCESSES
    arguments, pattern = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(pattern, capsys.readouterr().out)
    assert not arguments or any(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_results_and_show_tables_and_pictures(path: pathlib.Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    names: dict[str, Any] = {}
    shown = {}
    for cell in cells:
        tree = ast.parse("".join(cell["source"]) if cell["cell_type"] == "code" else "")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if hasattr(value, "_repr_html_"):
            shown[type(value)] = value._repr_html_()
    assert {dapple.Plan, dapple.Simulation, dapple.StepProfile, dapple.Verification} <= shown.keys()
    assert all("<table" in text for text in shown.values())
    assert all("<svg" in text for kind, text in shown.items() if kind is not dapple.Verification)


# ---- the program that runs documents

DOCUMENT = """# Example

```python
numbers = [1, 2]
print(sum(numbers))
```

```text
old
```

Words, and a block that isn't output:

```text
kept
```

```python
import pathlib
pathlib.Path("drawn.svg").write_text(str(numbers))
print("a\\n  b  ")
```
```text
```

![drawn](pictures/drawn.svg) and ![other](pictures/other.png)
"""


def test_outputs_follow_their_examples_and_a_failing_one_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = run(DOCUMENT, "example.md")
    assert [block.text for block in blocks(document) if block.language == "text"] == ["3\n", "kept\n", "a\n  b\n"]
    assert run(document, "example.md") == document
    assert document.replace("3\n", "old\n", 1).replace("a\n  b\n", "") == DOCUMENT
    assert (tmp_path / "drawn.svg").read_text() == "[1, 2]"
    assert pictures(document) == ["drawn.svg", "other.png"]
    with pytest.raises(ExampleError, match=r"the example in example.md, line 4 failed: IndexError: list index"):
        run(DOCUMENT.replace("sum(numbers)", "numbers[7]"), "example.md")


def test_commands_of_documents_run_in_processes_and_those_in_the_background_end(tmp_path: pathlib.Path) -> None:
    document = "```sh\npython -m calendar 2026 2  # shows\nmake nothing\n```\n```text\n```\n"
    assert "February 2026" in run(document, "example.md")
    with pytest.raises(ExampleError, match=r"`python -m tools.nothing` in example.md, line 2 failed with 1"):
        run("```sh\npython -m tools.nothing\n```\n", "example.md")
    serving = f"```sh\npython -m http.server 0 --directory={tmp_path} &\n```\n```python\nprint(__name__)\n```\n"
    running = set(pathlib.Path("/proc/self/task").glob("*/children"))
    before = [path.read_text() for path in running]
    assert run(serving, "example.md") == serving
    assert [path.read_text() for path in running] == before


# ---- the site


def _site() -> Any:
    spec = importlib.util.spec_from_file_location("pages", DOCS / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = _site()


def _leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(inner)


def test_navigation_has_each_page_and_the_reference_each_public_name_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(_leaves(settings["nav"])) == sorted(pages.sources())
    texts = [path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")]
    names = Counter(name for text in texts for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))
    assert not [name for name, count in names.items() if count > 1]
    assert {f"dapple_tf.{name}" for name in dapple.__all__} <= set(names)


def test_all_pages_are_laid_out(tmp_path: pathlib.Path) -> None:
    """With links that lead to files."""
    target = tmp_path / "docs"
    (target / "old").mkdir(parents=True)
    pages.lay_out(target)
    assert set(pages.sources()) == {path.relative_to(target).as_posix() for path in target.rglob("*.md")}
    assert (target / "style.css").exists() and (target / "pictures" / "what_if.png").exists()
    assert not (target / "site").exists() and not (target / "old").exists()


@pytest.mark.parametrize(
    ("source", "page", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/architecture.md#the-passes)", "[a](architecture.md#the-passes)"),
        ("README.md", "index.md", "![a](docs/pictures/what_if.png)", "![a](pictures/what_if.png)"),
        ("README.md", "index.md", "[a](docs/examples), [b](CHANGELOG.md)", "a, [b](changelog.md)"),
        ("docs/tools.md", "tools.md", "[`[a]`](../README.md) [b](../tools/train.py)", "[`[a]`](index.md) b"),
        ("docs/cluster.md", "cluster.md", "[a](deploy/ssh.sh)", "[a](deploy/ssh.sh.md)"),
        ("docs/results/speed.md", "results/speed.md", "[a](../cluster.md)", "[a](../cluster.md)"),
        ("docs/tools.md", "tools.md", "[a](https://doi.org/1) [b](#models)", "[a](https://doi.org/1) [b](#models)"),
        ("docs/tools.md", "tools.md", "`[a](b)`\n```py\n[a](b)\n```", "`[a](b)`\n```py\n[a](b)\n```"),
    ],
)
def test_links_lead_to_the_same_files(source: str, page: str, text: str, expected: str) -> None:
    assert pages.linked(text, page, ROOT / source) == expected


def test_a_link_to_nothing_is_an_error_and_programs_are_shown_as_code() -> None:
    with pytest.raises(pages.LinkError, match=r"^docs/tools.md has a link to pictures/none.png, which doesn't exist$"):
        pages.linked("![a](pictures/none.png)", "tools.md", DOCS / "tools.md")
    assert pages.program_page("a.sh", "ls\n") == "# a.sh\n\n````bash\nls\n````\n"
    cells = [{"cell_type": "markdown", "source": ["# A\n", "b"]}, {"cell_type": "code", "source": ["c"]}]
    assert pages.program_page("a.ipynb", json.dumps({"cells": cells})) == "# A\nb\n\n````python\nc\n````\n"


def test_lists_are_lists_on_the_site() -> None:
    """The site's Markdown is stricter than others, and shows as text what it doesn't take for a part of a list."""
    for page, source in pages.sources().items():
        text = source.read_text(encoding="utf-8") if source.suffix == ".md" else ""
        text = re.sub(r"^( *)```.*?^ *```$", r"\1code", text, flags=re.DOTALL | re.MULTILINE)
        for block in re.split(r"\n\s*\n", text):
            first, *others = block.strip("\n").split("\n")
            assert not re.match(r" {1,3}\S", first), f"{page}: indent a list's part by four spaces: {first}"
            if not re.match(r"([*-]|\d+\.) ", first):
                items = [line for line in others if re.match(r" {0,3}([*-]|\d+\.) ", line)]
                assert not items, f"{page}: leave a line free before a list: {items[0]}"
