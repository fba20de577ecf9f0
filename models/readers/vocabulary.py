"""Tokenizers of Hugging Face's library ``tokenizers``: files in its JSON format, or trained on the data themselves."""

from __future__ import annotations

import collections
import importlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from dapple_tf.models.readers.cache import digest, digest_of_files, kept
from dapple_tf.models.sources import ModelError

TokenizerKind = Literal["byte_bpe", "bpe", "wordpiece"]

MOST_LEARNT = 32_000
"""Default number of tokens of a trained tokenizer, if the model knows as many."""

_VERSION = 1
_BYTES = 256
_AT_ONCE = 1000
_MOST_BYTES = 64 * 2**20

SPECIAL: dict[TokenizerKind, tuple[str, ...]] = {
    "byte_bpe": ("<end>",),
    "bpe": ("<pad>", "<unk>", "<start>", "<end>"),
    "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
"""First tokens of tokenizers that are trained here, by kind."""

ALIASES = {
    "<pad>": ("<pad>", "[PAD]"),
    "<unk>": ("<unk>", "[UNK]"),
    "<start>": ("<start>", "<s>", "[CLS]", "<bos>"),
    "<end>": ("<end>", "</s>", "[SEP]", "<eos>", "<|endoftext|>"),
    "[CLS]": ("[CLS]", "<s>"),
    "[SEP]": ("[SEP]", "</s>"),
    "[MASK]": ("[MASK]", "<mask>"),
    "[PAD]": ("[PAD]", "<pad>"),
}
"""Other names of special tokens."""


def library() -> Any:
    """Returns the package ``tokenizers``.

    Raises:
        ModelError: it isn't installed.
    """
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ModelError("these data need the package tokenizers: pip install 'dapple_tf[data]'") from error


def load(path: pathlib.Path, text: str) -> Any:
    """Loads a tokenizer from a file.

    Raises:
        ModelError: there is no such file, or it isn't a tokenizer. The error begins with ``text``.
    """
    if not path.is_file():
        raise ModelError(f"{text}: there is no tokenizer {path}")
    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(f"{text}: {path} is larger than {_MOST_BYTES:,} bytes, the most that a tokenizer may have")
    try:
        return library().Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise ModelError(f"{text}: {path} isn't a tokenizer's JSON file: {error}") from error


def trained(kind: TokenizerKind, size: int, files: Sequence[pathlib.Path], lines: Callable[[], Iterable[str]]) -> Any:
    """Returns a tokenizer trained on text; cached.

    Args:
        kind: byte_bpe (any text, as merged bytes), bpe (words from ``<unk>`` and characters), wordpiece
            (BERT's, lower case).
        size: maximum number of tokens.
        files: files of the text, to detect changes.
        lines: function that returns the text.

    Raises:
        ModelError: the tokens are too few.
    """
    least = len(SPECIAL[kind]) + (_BYTES if kind == "byte_bpe" else 2)
    if size < least:
        raise ModelError(f"a vocabulary of {size} is too small for a tokenizer of kind {kind}; use at least {least}")
    package = library()

    def make(folder: pathlib.Path) -> None:
        tokenizer = train(kind, size, lines)
        tokenizer.save(str(folder / "tokenizer.json"))

    key = digest([_VERSION, package.__version__, kind, size, digest_of_files(files)])
    return load(kept(f"tokenizer_{key}", make) / "tokenizer.json", kind)


def train(kind: TokenizerKind, size: int, lines: Callable[[], Iterable[str]]) -> Any:
    """Trains a tokenizer; see `trained`. Equal texts give equal tokenizers."""
    package = library()
    special = list(SPECIAL[kind])
    left = size - len(special)
    common = {"vocab_size": size, "special_tokens": special, "show_progress": False}
    models, before, after = package.models, package.pre_tokenizers, package.decoders
    if kind == "byte_bpe":
        tokenizer = package.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = before.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = after.ByteLevel()
        trainer = package.trainers.BpeTrainer(initial_alphabet=before.ByteLevel.alphabet(), **common)
    elif kind == "bpe":
        tokenizer = package.Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = before.Metaspace()
        tokenizer.decoder = after.Metaspace()
        alphabet = _alphabet(("▁" + line.replace(" ", "▁") for line in lines()), left)
        trainer = package.trainers.BpeTrainer(initial_alphabet=alphabet, limit_alphabet=len(alphabet), **common)
    else:
        tokenizer = package.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = package.normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = before.BertPreTokenizer()
        tokenizer.decoder = after.WordPiece()
        # Each character may begin a word or continue one. The trainer numbers the latter differently every time,
        # unless they exist before.
        alphabet = _alphabet((tokenizer.normalizer.normalize_str(line) for line in lines()), left // 2)
        inner = [f"##{character}" for character in alphabet]
        trainer = package.trainers.WordPieceTrainer(
            initial_alphabet=alphabet, limit_alphabet=len(alphabet), **{**common, "special_tokens": special + inner}
        )
    tokenizer.train_from_iterator(lines(), trainer)
    if kind == "wordpiece":
        tokenizer = _without_added(tokenizer, special)
    return tokenizer


def _alphabet(lines: Iterable[str], most: int) -> list[str]:
    """Returns the most frequent characters, in order; among equally frequent ones, the first."""
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        counts.update(line)
    characters = [character for character in counts if not character.isspace()]
    return sorted(sorted(characters, key=lambda character: (-counts[character], character))[:most])


def _without_added(tokenizer: Any, special: Sequence[str]) -> Any:
    """Returns a tokenizer of words whose only special tokens are these."""
    package = library()
    made = package.Tokenizer(package.models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    made.decoder = tokenizer.decoder
    made.add_special_tokens(list(special))
    return made


def token(tokenizer: Any, name: str, text: str) -> int:
    """Returns the number of a special token, by its name in `ALIASES`.

    Raises:
        ModelError: the tokenizer has none.
    """
    for alias in ALIASES[name]:
        if (number := tokenizer.token_to_id(alias)) is not None:
            return int(number)
    raise ModelError(f"{text}: the tokenizer has none of the tokens {', '.join(ALIASES[name])}; add one to it")


def size_of(tokenizer: Any) -> int:
    """One more than the largest token."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encoded(tokenizer: Any, lines: Iterable[str]) -> Iterator[list[int]]:
    """Yields the tokens of each line, without special ones."""
    held: list[str] = []
    for line in lines:
        held.append(line)
        if len(held) == _AT_ONCE:
            yield from (encoding.ids for encoding in tokenizer.encode_batch(held, add_special_tokens=False))
            held = []
    yield from (encoding.ids for encoding in tokenizer.encode_batch(held, add_special_tokens=False))
