"""tools.make_data: what it writes can be trained on, and what is damaged is found."""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np
import pytest
import tokenizers
from reading import CLASSES, taken, write_images

from dapple_tf.models.registry import find_data
from dapple_tf.tools import command, make_data

pytestmark = pytest.mark.usefixtures("_cache_of_readers")


def run(*arguments: str) -> int:
    return command.run(make_data.main, make_data.FLAGS, arguments)


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_images(tmp_path / "images")


@pytest.mark.slow
def test_images_to_records_and_back(
    images: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That both give the same pixels is tested with their readers."""
    out = tmp_path / "records"
    assert run(f"--images={images}", f"--output={out}", "--shards=3") == 0
    assert "Wrote 21 images for train and 9 images for validation, of 3 classes" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {f"train-0000{n}-of-00003" for n in range(3)} | {"validation-00000-of-00001", "classes.json"}
    assert json.loads((out / "classes.json").read_text()) == [*CLASSES]
    for kind, place in (("tfrecords", out), ("images", images)):
        assert run(f"--check={kind}:{place}") == 0
        assert capsys.readouterr().out == "30 images of 3 classes can be read\n"


def test_what_is_damaged_is_found(
    images: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records"
    broken = images / "train" / "bee" / "bee_2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    assert run(f"--check=images:{images}") == 1
    assert f"{broken} can't be read" in capsys.readouterr().err
    assert run(f"--images={images}", f"--output={out}", "--shards=1") == 0
    assert run(f"--check=tfrecords:{out}") == 1
    assert f"of {out}/train-00000-of-00001 can't be read" in capsys.readouterr().err
    assert run(f"--check=tfrecords:{out}?first_label=2") == 1
    assert run("--check=text:a") == 1
    assert "what can be checked is images:PATH and tfrecords:PATH" in capsys.readouterr().err
    assert run(f"--check=tfrecords:{images}") == 1
    assert "has no files train-00000-of-00001 and so on" in capsys.readouterr().err


def test_text_to_tokens_and_back(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "the cat sat on the mat, the dog sat on the log\n" * 30
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "book"
    assert run(f"--text={tmp_path}/a.txt", f"--output={out}", "--vocabulary=290", "--held_out=0.25") == 0
    said = capsys.readouterr().out
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    train, valid = (np.fromfile(out / name, "uint16") for name in ("train.bin", "valid.bin"))
    assert tokenizer.decode([*train, *valid]) == text
    assert len(valid) == round(0.25 * (len(train) + len(valid)))
    name = said.partition("--dataset='")[2].partition("'")[0]
    assert name == f"tokens:{out}/train.bin?valid={out}/valid.bin"
    model = keras.Sequential([keras.Input((8,)), keras.layers.Embedding(290, 2), keras.layers.Dense(290)])
    data = find_data(name)
    assert data.held_out is not None
    first = taken(data.held_out(model, 1), 1)[0]
    assert (first[0][0].tolist(), first[1][0].tolist()) == (valid[:8].tolist(), valid[1:9].tolist())
    assert run(f"--text={tmp_path}/a.txt", f"--output={tmp_path}/again", f"--tokenizer={out}/tokenizer.json") == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


def test_a_sample(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sample=pairs", f"--output={tmp_path}/sums") == 0
    names = ["train.sums", "train.totals", "valid.sums", "valid.totals"]
    assert capsys.readouterr().out == f"Wrote {' and '.join(names)} to {tmp_path}/sums\n"
    sums, totals = ((tmp_path / "sums" / name).read_text().splitlines() for name in names[:2])
    assert [sum(map(int, line.split("+"))) for line in sums] == [int(total) for total in totals]
