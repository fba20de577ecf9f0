"""The trial for a machine with a GPU, on logical processors."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from dapple_tf.tools import command, gpu_trial

FEW = ("equivalence of embeddings", "recurrent", "timeline")


def tried(folder: pathlib.Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, record and page of a trial."""
    folder = folder / "trial"
    status = command.run(gpu_trial.main, gpu_trial.FLAGS, ["--tiny", f"--output_dir={folder}", *arguments])
    return status, json.loads((folder / "trial.json").read_text()), (folder / "page.md").read_text()


@pytest.mark.parametrize("parts", [FEW, pytest.param((), marks=pytest.mark.thorough)], ids=["few", "all"])
def test_a_trial_on_processors(parts: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    status, record, page = tried(tmp_path, *([f"--parts={','.join(parts)}"] if parts else []))
    assert (status, [part["error"] for part in record["parts"]]) == (0, [""] * len(parts or range(10)))
    assert all(part["rows"] for part in record["parts"]) and page.startswith(
        "# Trial on 4 logical devices of processors"
    )
    assert (tmp_path / "trial" / "timeline" / "timeline.html").exists()


def test_a_part_that_fails_is_told_and_the_rest_goes_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Iterator[gpu_trial.Row]:
        """Gives a row before it fails."""
        yield {"before": 1.0}
        raise RuntimeError("out of memory")

    def works(*_: Any) -> Iterator[gpu_trial.Row]:
        yield {"ms": 2.5}

    monkeypatch.setattr(gpu_trial, "layouts", fails)
    monkeypatch.setattr(gpu_trial, "memory", works)
    fails.__name__, works.__name__ = "layouts", "memory"
    status, record, page = tried(tmp_path, "--parts=layouts,memory")
    assert status == 1 and record["parts"][1]["rows"] == [{"ms": 2.5}]
    assert "layouts: failed" in page and "| 1 |" in page and "out of memory" in page and "| 2.5 |" in page
    assert command.run(gpu_trial.main, gpu_trial.FLAGS, ["--tiny", f"--output_dir={tmp_path}", "--parts=none"]) == 1
