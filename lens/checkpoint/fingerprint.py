"""A digest of weights, so that results of other weights are told apart."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lens.checkpoint.quantized import plain_parts

_PART_BYTES = 1 << 24


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """32 hex digits over the dtypes, shapes and every byte of these tensors, in order.

    A tensor that is not in memory (offloaded) counts by its shape alone. Parts are hashed in two
    threads and their digests hashed again, so the value does not depend on the number of threads.
    """
    whole = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(2) as pool:
        for tensor in tensors:
            whole.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            if tensor.is_meta:
                continue
            for plain in plain_parts(tensor):
                for digest in pool.map(_digest, _parts(plain)):
                    whole.update(digest)
    return whole.hexdigest()


def _parts(tensor: Tensor) -> list[memoryview]:
    flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    view = memoryview(flat)  # type: ignore[arg-type]
    return [view[i : i + _PART_BYTES] for i in range(0, len(view), _PART_BYTES)]


def _digest(part: memoryview) -> bytes:
    return hashlib.blake2b(part, digest_size=16).digest()
