"""The header of a GGUF file: which tensors it holds, and whether the file is whole.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lens.errors import CorruptCheckpointError, UnsupportedModelStateError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_LIMIT = 1 << 31
"""No count in a header is above this: a larger one is damage, not data."""


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """The architecture, the names of the tensors, and the names of the metadata."""

    architecture: str
    tensors: frozenset[str]
    fields: frozenset[str]

    @property
    def has_unembedding(self) -> bool:
        """False where the embedding is the unembedding too: the format then holds it once."""
        return "output.weight" in self.tensors

    @property
    def has_tokenizer(self) -> bool:
        """Whether the vocabulary is in the file."""
        return "tokenizer.ggml.tokens" in self.fields


def read_header(path: Path) -> GGUFHeader:
    """Read and check a GGUF header. Raises CorruptCheckpointError for another or a cut file,
    UnsupportedModelStateError for one part of a split file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise CorruptCheckpointError(
                f"{path} is no GGUF file: it starts with {magic!r}, not {_MAGIC!r}. Get it again."
            )
        try:
            header, end = _read(file, path)
        except (
            *(struct.error, EOFError, OverflowError, UnicodeDecodeError, KeyError),
            *(TypeError, ZeroDivisionError),  # a field of another kind, an alignment of 0
        ) as error:
            raise CorruptCheckpointError(
                f"The header of {path} is damaged or cut ({error}). Get the file again."
            ) from error
    if end > size:
        raise CorruptCheckpointError(
            f"{path} is truncated: its tensors need {end:,} bytes, the file has {size:,}. "
            "Get the file again."
        )
    return header


def _read(file: BinaryIO, path: Path) -> tuple[GGUFHeader, int]:
    """The header, and the byte at which the last tensor ends."""
    version = _scalar(file, "I")
    if version not in _VERSIONS:
        raise CorruptCheckpointError(
            f"{path} says GGUF version {version}; {_VERSIONS[0]} and {_VERSIONS[1]} can be read. "
            "Get the file again, or convert it."
        )
    n_tensors, n_fields = _count(file), _count(file)
    fields = {}
    for _ in range(n_fields):
        name = _string(file)
        fields[name] = _value(file, _scalar(file, "I"))
    if fields.get("split.count", 1) > 1:
        raise UnsupportedModelStateError(
            f"{path} is one of {fields['split.count']} parts of a split GGUF. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUT.gguf"
        )
    ends, names = [0], []
    for _ in range(n_tensors):
        names.append(_string(file))
        dimensions = [_scalar(file, "Q") for _ in range(_scalar(file, "I"))]
        kind = _scalar(file, "I")
        ends.append(_scalar(file, "Q") + _n_bytes(dimensions, kind))
    alignment = fields.get("general.alignment", _ALIGNMENT)
    start = math.ceil(file.tell() / alignment) * alignment
    header = GGUFHeader(
        architecture=str(fields.get("general.architecture", "unknown")),
        tensors=frozenset(names),
        fields=frozenset(fields),
    )
    return header, start + max(ends)


def _n_bytes(dimensions: list[int], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError as error:
        raise KeyError(f"unknown tensor type {kind}") from error
    return math.prod(dimensions) // block * block_bytes


def _value(file: BinaryIO, kind: int) -> Any:
    """A metadata value; arrays are passed over and give their length."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    inner, length = _scalar(file, "I"), _count(file)
    if inner in _SCALARS:
        _bytes(file, struct.calcsize("<" + _SCALARS[inner]) * length)
    elif inner == _STRING:
        _pass_strings(file, length)
    else:
        for _ in range(length):
            _value(file, inner)
    return length


def _pass_strings(file: BinaryIO, length: int) -> None:
    """Pass over the strings of an array in one loop: a vocabulary has hundreds of thousands."""
    read, count_of = file.read, struct.Struct("<Q").unpack
    for _ in range(length):
        (count,) = count_of(read(8))
        if count > _LIMIT:
            raise OverflowError(f"a count of {count:,}")
        if len(read(count)) < count:
            raise EOFError(f"a string of {count:,} bytes ends behind the file")


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, _bytes(file, struct.calcsize("<" + code)))[0]


def _count(file: BinaryIO) -> int:
    count = _scalar(file, "Q")
    if count > _LIMIT:
        raise OverflowError(f"a count of {count:,}")
    return count


def _string(file: BinaryIO) -> str:
    # Token strings may hold broken UTF-8; names of fields and tensors are ASCII.
    return _bytes(file, _count(file)).decode("utf-8", errors="replace")


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError(f"{count:,} bytes were asked for where {len(data):,} were left")
    return data
