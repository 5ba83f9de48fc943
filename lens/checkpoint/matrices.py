"""The embedding and unembedding matrices: which they are, and how two of them compare."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.quantized import dequantized, is_plain

SHARED_PARAMETER = "shared parameter"
SHARED_STORAGE = "shared storage"
EQUAL_VALUES = "equal values, separate"
EQUAL_TO_A_SCALAR = "equal up to a scalar"
UNTIED = "untied"
UNREAD = "separate, values not in memory"
NO_PAIR = "no pair of matrices"

ONE_TENSOR = (SHARED_PARAMETER, SHARED_STORAGE)
"""Verdicts under which a change of one matrix is a change of the other."""

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class NamedMatrix:
    """One of the two or three matrices with a row for each token.

    `role` is "embedding", "encoder embedding", "decoder embedding" or "unembedding"; `name` the
    parameter's path in the model, `aliases` all paths that lead to it; `tensor` the model's own,
    which may be on the meta device; `values` what it holds, None where that is not in memory.
    """

    role: str
    name: str | None
    aliases: frozenset[str]
    tensor: Tensor
    values: Tensor | None


@dataclass(frozen=True, kw_only=True)
class TiePair:
    """Two matrices compared, by identity first and by value after.

    `max_abs_difference` is the largest |difference| over the rows that both have, None where the
    widths differ or a matrix is not in memory. `scalar` is the factor from the first to the second
    of a pair that is equal up to one. `rows_compared` is below the larger number of rows where
    one of the matrices is padded.
    """

    first_role: str
    second_role: str
    verdict: str
    first_name: str | None
    second_name: str | None
    first_shape: tuple[int, ...]
    second_shape: tuple[int, ...]
    max_abs_difference: float | None
    scalar: float | None
    rows_compared: int

    @property
    def is_tied(self) -> bool:
        """True where both are one tensor."""
        return self.verdict in ONE_TENSOR

    def __str__(self) -> str:
        text = f"{self.first_role} {self.first_name} {list(self.first_shape)} and "
        text += f"{self.second_role} {self.second_name} {list(self.second_shape)}: {self.verdict}"
        if self.scalar is not None:
            text += f" (x {self.scalar:.6g})"
        if not self.is_tied and self.max_abs_difference is not None:
            text += f", max |difference| {self.max_abs_difference:.3g}"
        if self.first_shape[-1] != self.second_shape[-1]:
            text += ", of different widths"
        elif self.first_shape[0] != self.second_shape[0]:
            text += f", compared on the first {self.rows_compared:,} rows"
        return text


def input_matrix(model: Any, *, seq2seq: bool) -> Tensor | None:
    """W_E [d_vocab, d]: the lookup of the stack that is read (the decoder's in a seq2seq)."""
    return _rows_of(_lookup(model, seq2seq=seq2seq))


def output_matrix(model: Any, readout: Any) -> Tensor | None:
    """W_U [d_vocab, d]: the matrix of the direct readout, else that of the model's head."""
    unembedding = getattr(readout, "unembedding", None)
    if unembedding is not None:
        return unembedding.weight
    return _rows_of(head_of(model))


def head_of(model: Any) -> Any:
    """The module that holds W_U: the model's output embeddings, or their inner product."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # t5gemma keeps its product one module deeper.
    return head if _rows_of(head) is not None else getattr(head, "out_proj", head)


def named_matrices(model: Any, readout: Any, *, seq2seq: bool) -> tuple[NamedMatrix, ...]:
    """Each matrix that has a row for each token, inputs first; absent ones are left out."""
    found: list[NamedMatrix] = []
    if seq2seq:
        encoder = model.get_encoder() if hasattr(model, "get_encoder") else None
        # An encoder of sounds or images has no rows for tokens.
        lookup = _own_lookup(encoder)
        if isinstance(lookup, nn.Embedding):
            found.append(_named(model, lookup, lookup.weight, "encoder embedding"))
    lookup = _lookup(model, seq2seq=seq2seq)
    w_e = _rows_of(lookup)
    if w_e is not None:
        role = "decoder embedding" if seq2seq else "embedding"
        found.append(_named(model, lookup, w_e, role))
    w_u = output_matrix(model, readout)
    if w_u is not None:
        found.append(_named(model, head_of(model), w_u, "unembedding"))
    return tuple(found)


def compare(first: NamedMatrix, second: NamedMatrix) -> TiePair:
    """Compare by identity, storage and value, streamed over rows; nothing is copied."""
    verdict, difference, scalar = _verdict(first, second)
    return TiePair(
        first_role=first.role,
        second_role=second.role,
        verdict=verdict,
        first_name=first.name,
        second_name=second.name,
        first_shape=tuple(first.tensor.shape),
        second_shape=tuple(second.tensor.shape),
        max_abs_difference=difference,
        scalar=scalar,
        rows_compared=min(first.tensor.shape[0], second.tensor.shape[0]),
    )


def max_abs_difference(a: Float[Tensor, "d_vocab d"], b: Float[Tensor, "d_vocab d"]) -> float:
    """The largest |a - b|, a block of rows at a time."""
    return _largest_difference(a, b, 1.0)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """True where both begin at one place in memory and step through it alike."""
    # A quantised tensor is a shell around others: all shells have the address 0.
    if a.is_meta or b.is_meta or a.device != b.device or not (is_plain(a) and is_plain(b)):
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def _verdict(first: NamedMatrix, second: NamedMatrix) -> tuple[str, float | None, float | None]:
    if first.tensor is second.tensor:
        return SHARED_PARAMETER, 0.0, None
    a, b = first.values, second.values
    if a is None or b is None:
        return UNREAD, None, None
    if a.shape[-1] != b.shape[-1]:
        return UNTIED, None, None
    if same_storage(a, b):
        return SHARED_STORAGE, 0.0, None
    rows = min(a.shape[0], b.shape[0])
    a, b = a[:rows], b[:rows]
    difference = _largest_difference(a, b, 1.0)
    if difference == 0:
        return EQUAL_VALUES, 0.0, None
    scalar = _scalar(a, b)
    return (UNTIED if scalar is None else EQUAL_TO_A_SCALAR), difference, scalar


def _scalar(a: Tensor, b: Tensor) -> float | None:
    """The factor s with b = s a up to rounding, None where there is none or s is 1."""
    product = square = largest = 0.0
    for rows in _blocks(a):
        x, y = a[rows].detach().double(), b[rows].detach().to(a.device).double()
        product += float((x * y).sum())
        square += float((x * x).sum())
        largest = max(largest, float(y.abs().max()))
    if square == 0 or product == 0:
        return None
    scalar = product / square
    # b was rounded once from s a; the estimate of s adds less than another rounding.
    rounding = 2 * max(torch.finfo(t.dtype).eps for t in (a, b))
    if abs(scalar - 1) <= rounding:
        return None
    return scalar if _largest_difference(a, b, scalar) <= rounding * largest else None


def _largest_difference(a: Tensor, b: Tensor, scalar: float) -> float:
    largest = 0.0
    for rows in _blocks(a):
        x, y = a[rows].detach().double(), b[rows].detach().to(a.device).double()
        largest = max(largest, float((scalar * x - y).abs().max()))
    return largest


def _blocks(matrix: Tensor) -> list[slice]:
    return [slice(s, s + _ROWS_AT_ONCE) for s in range(0, matrix.shape[0], _ROWS_AT_ONCE)]


def _lookup(model: Any, *, seq2seq: bool) -> Any:
    """The lookup module of the stack that is read."""
    if seq2seq and hasattr(model, "get_decoder"):
        found = _own_lookup(model.get_decoder())
        if found is not None:
            return found
    return _own_lookup(model)


def _own_lookup(stack: Any) -> Any:
    if stack is None or getattr(stack, "get_input_embeddings", None) is None:
        return None
    return stack.get_input_embeddings()


def _rows_of(module: Any) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


def _named(model: nn.Module, module: Any, tensor: Tensor, role: str) -> NamedMatrix:
    aliases = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is tensor or same_storage(parameter, tensor)
    )
    beneath = [path for path, one in model.named_modules() if one is module]
    # By its own module where that holds it, else by any name that it has.
    own = [name for path in beneath for name in sorted(aliases) if name.startswith(f"{path}.")]
    name = next(iter([*own, *sorted(aliases)]), None)
    return NamedMatrix(role, name, aliases, tensor, _in_memory(module, tensor))


def _in_memory(module: Any, tensor: Tensor) -> Tensor | None:
    """The values of a matrix; accelerate keeps those of an offloaded one beside its hook."""
    if not tensor.is_meta:
        if not is_plain(tensor):
            return dequantized(tensor)
        return tensor if tensor.is_floating_point() else None
    hook = getattr(module, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        kept = getattr(one, "weights_map", None)
        with suppress(KeyError):
            if kept is not None:
                return kept["weight"]
    return None
