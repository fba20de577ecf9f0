"""A directory that is filled again and again, and what isn't touched in it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

import pytest

from dapple_tf.dumps.output_folder import LIST, FolderError, filled


def fill(target: pathlib.Path, files: Mapping[str, str]) -> None:
    with filled(target) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def contents(target: pathlib.Path) -> dict[str, str]:
    files = (path for path in target.rglob("*") if path.is_file() and path.name != LIST)
    return {path.relative_to(target).as_posix(): path.read_text() for path in files}


def test_own_files_are_replaced_or_removed_and_others_left(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "new" / "out"
    fill(target, {"a": "1", "sub/b": "2", "sub/deep/c": "3"})
    (target / "mine").write_text("mine")
    (target / "sub" / "deep" / "mine").write_text("mine, too")
    fill(target, {"a": "4", "other/d": "5"})
    assert contents(target) == {"a": "4", "other/d": "5", "mine": "mine", "sub/deep/mine": "mine, too"}
    (target / "sub" / "deep" / "mine").unlink()
    fill(target, {"a": "6"})
    assert contents(target) == {"a": "6", "mine": "mine"}
    assert not (target / "other").exists()


@pytest.mark.parametrize("name", ["a", "sub/b"])
def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(FolderError, match=f"{name} would be overwritten, but isn't what an earlier dump wrote there"):
        fill(tmp_path, {"a": "1", "sub/b": "2"})
    assert contents(tmp_path) == {name: "mine"}


def test_an_own_file_that_was_changed_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    fill(tmp_path, {"plan.json": "1", "b": "2"})
    (tmp_path / "plan.json").write_text("edited")
    with pytest.raises(FolderError, match=r"plan\.json would be overwritten"):
        fill(tmp_path, {"plan.json": "3", "b": "4"})
    fill(tmp_path, {"b": "5"})
    assert contents(tmp_path) == {"plan.json": "edited", "b": "5"}


def test_links_and_folders_in_the_way_are_not_followed(tmp_path: pathlib.Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    target.mkdir()
    (target / "sub").symlink_to(outside)
    with pytest.raises(FolderError, match="sub/b would be overwritten"):
        fill(target, {"sub/b": "2"})
    (target / "sub").unlink()
    (target / "a").symlink_to(outside / "nowhere")
    (target / "c").mkdir()
    with pytest.raises(FolderError, match="a and 1 more would be overwritten"):
        fill(target, {"a": "1", "c": "2"})
    assert list(outside.iterdir()) == []


def test_after_an_error_the_directory_is_what_it_was(tmp_path: pathlib.Path) -> None:
    fill(tmp_path, {"a": "1"})

    def fails() -> None:
        with filled(tmp_path) as folder:
            (folder / "a").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert contents(tmp_path) == {"a": "1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", LIST]


def test_what_was_interrupted_is_done_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"a": "1", "b": "2"})
    replace = os.replace

    def interrupted(source: pathlib.Path, target: pathlib.Path) -> None:
        if pathlib.Path(target).name == "b":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, {"a": "3", "b": "4"})
    monkeypatch.undo()
    assert contents(tmp_path) == {"a": "3", "b": "2"}
    fill(tmp_path, {"a": "5", "b": "6"})
    assert contents(tmp_path) == {"a": "5", "b": "6"}


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="is a file: name a directory"):
        fill(tmp_path / "file", {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"format": "other"}',
        '{"format": "dapple_tf.dump/1", "files": {"a": 3}}',
        "\x00\xff",
        json.dumps({"format": "dapple_tf.dump/1", "files": {"../victim": ["0"]}}),
        json.dumps({"format": "dapple_tf.dump/1", "files": {"/etc/victim": ["0"]}}),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / LIST).write_text(text, encoding="latin-1")
    with pytest.raises(FolderError, match="move it away"):
        fill(tmp_path, {"a": "1"})
    assert not (tmp_path / "a").exists()
