"""A digest of weights, so that results of other weights are told apart."""

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lens.checkpoint.quantized import plain_parts

_PART_BYTES = 1 << 24
_SUMMED_WORDS = 512
"""Words of 64 bits that one number stands for in `summed`: 4 KiB."""

_ROWS_AT_ONCE = 256

_WORD_BYTES = 8


@dataclass(frozen=True, eq=False)
class HashedTensor:
    """A tensor, and what `fingerprint` takes of it: dtype, shape and the digests of its parts."""

    tensor: Tensor
    version: int
    digests: bytes

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is that very tensor, not changed in place since."""
        return self.tensor is tensor and self.version == _version(tensor)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """32 hex digits over the dtypes, shapes and every byte of these tensors, in order.

    A tensor that is not in memory (offloaded) counts by its shape alone. Parts are hashed in two
    threads and their digests hashed again, so the value does not depend on the number of threads.
    """
    return joined(hashed(tensor).digests for tensor in tensors)


def hashed(tensor: Tensor) -> HashedTensor:
    """A tensor with what `fingerprint` takes of it."""
    version, head = _version(tensor), f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    parts = [] if tensor.is_meta else [p for plain in plain_parts(tensor) for p in _parts(plain)]
    if len(parts) < 2:
        return HashedTensor(tensor, version, head + b"".join(map(_digest, parts)))
    with ThreadPoolExecutor(2) as pool:
        return HashedTensor(tensor, version, head + b"".join(pool.map(_digest, parts)))


def joined(digests: Iterable[bytes]) -> str:
    """The fingerprint of tensors that are hashed."""
    whole = hashlib.blake2b(digest_size=16)
    for each in digests:
        whole.update(each)
    return whole.hexdigest()


def summed(tensor: Tensor) -> bytes:
    """dtype, shape, and a digest of one number for every 4 KiB, near the speed of reading them.

    The number is the sum of their words of 64 bits, each times another odd number, modulo 2^64: no
    byte can change alone, and no two words can be exchanged. For weights that are too many to be
    hashed whole.
    """
    whole = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    for plain in [] if tensor.is_meta else plain_parts(tensor):
        flat = plain.detach().contiguous().flatten().view(torch.uint8)
        even = flat.numel() - flat.numel() % (_SUMMED_WORDS * _WORD_BYTES)
        words = flat[:even].clone() if flat.storage_offset() % _WORD_BYTES else flat[:even]
        rows = words.view(torch.int64).view(-1, _SUMMED_WORDS)
        odd = torch.arange(1, 2 * _SUMMED_WORDS, 2, device=rows.device)
        sums = [(part * odd).sum(dim=1) for part in rows.split(_ROWS_AT_ONCE)]
        for part in (p for one in (*sums, flat[even:]) for p in _parts(one)):
            whole.update(part)
    return whole.digest()


def _version(tensor: Tensor) -> int:
    """Counts changes in place; an inference tensor, which has no count, is not changed."""
    return -1 if tensor.is_inference() else tensor._version


def _parts(tensor: Tensor) -> list[memoryview]:
    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    view = memoryview(flat)  # type: ignore[arg-type]
    return [view[i : i + _PART_BYTES] for i in range(0, len(view), _PART_BYTES)]


def _digest(part: memoryview) -> bytes:
    return hashlib.blake2b(part, digest_size=16).digest()


class ModelHashes:
    """The digests of a model, taken anew where its weights have changed, and only of those.

    A change is seen by the identity, place and version of parameters and buffers: a write through
    `.data` is not.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._key: tuple[Any, ...] | None = None
        self._outside: tuple[HashedTensor, ...] = ()
        self._whole: str | None = None

    def of_model(self) -> str:
        """What stands outside the blocks byte by byte, the blocks by `summed`."""
        outside = self._hashed()
        if self._whole is None:
            ids = {id(part.tensor) for part in outside}
            state = self._model.state_dict(keep_vars=True).values()
            inside = {id(t): t for t in state if isinstance(t, Tensor) and id(t) not in ids}
            digests = [part.digests for part in outside]
            self._whole = joined([*digests, *map(summed, inside.values())])
        return self._whole

    def of_matrix(self, matrix: Tensor) -> str:
        """The fingerprint of one matrix, which is not read twice where it is a parameter."""
        known = (part.digests for part in self._hashed() if part.is_of(matrix))
        return joined([next(known, None) or hashed(matrix).digests])

    def _hashed(self) -> tuple[HashedTensor, ...]:
        """The parameters outside the blocks."""
        key = tuple(map(_mark, (*self._model.parameters(), *self._model.buffers())))
        if key != self._key:
            inside = {id(p) for block in self._blocks for p in block.parameters()}
            known = {id(part.tensor): part for part in self._outside}
            self._outside = tuple(
                known[id(p)] if id(p) in known and known[id(p)].is_of(p) else hashed(p)
                for p in self._model.parameters()
                if id(p) not in inside
            )
            self._key, self._whole = key, None
        return self._outside


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    try:
        return id(tensor), _version(tensor), tensor.data_ptr()
    except RuntimeError:  # no memory of its own
        return id(tensor), _version(tensor), -1
