"""The index of a TensorFlow tensor bundle, read without TensorFlow.

TensorFlow's reader allocates whatever an index asks for and trusts the order of its keys. So a checkpoint's index is
first read here, and accepted only if it has exactly the layout of TensorFlow's writer: blocks side by side from
the file's start, entries in ascending order, a restart point (as listed at the block's end) at every entry that is
written in full, and one key in the index block for each data block. TensorFlow then reads the same from such a file as
we did. (TensorFlow verifies the checksums of blocks and tensors whenever it reads them.)

    data block | ... | metaindex block | index block | footer (48 bytes)
    block = entries, restart offsets (uint32), their number (uint32); then 1 byte compression, 4 bytes checksum
    entry = varints (shared, unshared, value bytes), the key's unshared bytes, value
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import tensor_bundle_pb2

_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_RESTART_INTERVAL = 16


class BundleIndexError(ValueError):
    """A file isn't a tensor bundle's index; the text says where."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a bundle.

    Attributes:
        dtype: number of a ``DT_*`` type.
        shape: its shape.
        offset: position of its bytes in the data file.
        size: number of its bytes.
    """

    dtype: int
    shape: tuple[int, ...]
    offset: int
    size: int


def read_index(content: bytes) -> dict[str, Stored]:
    """Returns the tensors of a bundle with one data file, by name.

    Args:
        content: the index file's bytes.

    Raises:
        BundleIndexError: it isn't an index, or not in the layout of TensorFlow's writer.
    """
    entries = list(_entries(content))
    if not entries or entries[0][0] != b"":
        raise BundleIndexError("the bundle's header is missing")
    header = tensor_bundle_pb2.BundleHeaderProto()
    _parse(header, entries[0][1])
    if header.num_shards != 1 or header.endianness != tensor_bundle_pb2.BundleHeaderProto.LITTLE:
        raise BundleIndexError(f"the bundle has {header.num_shards} data files, or isn't little-endian")
    tensors: dict[str, Stored] = {}
    for key, value in entries[1:]:
        entry = tensor_bundle_pb2.BundleEntryProto()
        _parse(entry, value)
        try:
            name = key.decode()
        except UnicodeDecodeError as error:
            raise BundleIndexError(f"a tensor's name isn't text: {error}") from error
        shape = tuple(dim.size for dim in entry.shape.dim)
        if entry.shard_id or entry.slices or entry.shape.unknown_rank or min((0, *shape, entry.offset, entry.size)) < 0:
            raise BundleIndexError(f"tensor {name!r} is in slices, in another file or of an impossible shape")
        if entry.dtype in (types_pb2.DT_INVALID, types_pb2.DT_RESOURCE, types_pb2.DT_STRING):
            raise BundleIndexError(f"tensor {name!r} has a dtype that checkpoints don't hold")
        tensors[name] = Stored(entry.dtype, shape, entry.offset, entry.size)
    return tensors


def _parse(message: tensor_bundle_pb2.BundleEntryProto | tensor_bundle_pb2.BundleHeaderProto, value: bytes) -> None:
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise BundleIndexError(f"an entry can't be parsed: {error}") from error


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of all data blocks, after checking their layout."""
    if len(content) < _FOOTER or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise BundleIndexError("the footer isn't that of a TensorFlow table")
    end = len(content) - _FOOTER
    position = end
    metaindex_start, position = _varint(content, position)
    metaindex_size, position = _varint(content, position)
    index_start, position = _varint(content, position)
    index_size, position = _varint(content, position)
    if any(content[position:-8]):
        raise BundleIndexError("the footer holds more than two handles")
    if metaindex_start + metaindex_size + _TRAILER != index_start or index_start + index_size + _TRAILER != end:
        raise BundleIndexError("blocks aren't side by side")
    if _block(content, metaindex_start, metaindex_size):
        raise BundleIndexError("the metaindex block isn't empty")
    start, last = 0, b""
    index = _block(content, index_start, index_size, interval=1)
    for number, (separator, handle) in enumerate(index):
        own_start, position = _varint(handle, 0)
        size, position = _varint(handle, position)
        if own_start != start or position != len(handle):
            raise BundleIndexError("blocks aren't side by side")
        block = _block(content, start, size)
        if not block or (number and block[0][0] <= last):
            raise BundleIndexError("keys aren't in ascending order")
        yield from block
        start, last = start + size + _TRAILER, separator
        if block[-1][0] > separator:
            raise BundleIndexError("keys aren't in ascending order")
    if start != metaindex_start:
        raise BundleIndexError("blocks aren't side by side")


def _block(content: bytes, start: int, size: int, interval: int = _RESTART_INTERVAL) -> list[tuple[bytes, bytes]]:
    """Returns the keys and values of a block."""
    if size < 8 or start + size + _TRAILER > len(content) - _FOOTER or content[start + size] != 0:
        raise BundleIndexError("a block is beyond the file's end, or compressed")
    block = content[start : start + size]
    (count,) = struct.unpack("<I", block[-4:])
    end = size - 4 * (count + 1)
    if count < 1 or end < 0:
        raise BundleIndexError("a block's restart points are beyond it")
    restarts = struct.unpack(f"<{count}I", block[end:-4])
    entries: list[tuple[bytes, bytes]] = []
    full: list[int] = []
    position, key = 0, b""
    while position < end:
        if len(entries) % interval == 0:
            full.append(position)
        shared, after = _varint(block, position)
        unshared, after = _varint(block, after)
        length, after = _varint(block, after)
        if (full[-1] == position and shared) or shared > len(key) or after + unshared + length > end:
            raise BundleIndexError("an entry is beyond its block, or shares more than there is")
        before, key = key, key[:shared] + block[after : after + unshared]
        if entries and key <= before:
            raise BundleIndexError("keys aren't in ascending order")
        position = after + unshared + length
        entries.append((key, block[position - length : position]))
    if tuple(full or [0]) != restarts:
        raise BundleIndexError("restart points aren't where entries begin")
    return entries


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Returns a number of at most 64 bits, and the position after it."""
    number = 0
    for shift in range(0, 64, 7):
        if position >= len(content):
            break
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number >= 2**63:
                break
            return number, position
    raise BundleIndexError("a number has no end")
