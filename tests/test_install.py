"""What `pip install .` installs, and README top to bottom with it, in a folder where others are in the way.

The environment has what the package requires and nothing that only its development does. README's examples run on two
workers. test_documented_commands.py runs the commands of all documents there.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from installed import ROOT, Installed

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.run_document import blocks
from dapple_tf.tools.hosts import free_ports

README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = {
    f"dapple-{name}" for name in ("dump", "keys", "launch", "plan", "profile", "simulate", "train", "what-if", "worker")
}

pytestmark = pytest.mark.slow


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


@pytest.mark.thorough
def test_an_example_plans_from_a_published_profile(installed: Installed) -> None:
    assert "run_ahead " in installed.run("python", "docs/examples/own_schedule.py")


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
