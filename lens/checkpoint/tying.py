"""Is the unembedding the embedding? Read from the tensors, never from the config alone."""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torch import nn

from lens.checkpoint.matrices import (
    EQUAL_TO_A_SCALAR,
    EQUAL_VALUES,
    NO_PAIR,
    ONE_TENSOR,
    SHARED_PARAMETER,
    SHARED_STORAGE,
    UNREAD,
    UNTIED,
    NamedMatrix,
    TiePair,
    compare,
    input_matrix,
    max_abs_difference,
    named_matrices,
    output_matrix,
    same_storage,
)
from lens.checkpoint.tie_cost import TieCost
from lens.checkpoint.tie_flags import (
    class_mapping,
    config_flags,
    config_says,
    contradictions,
    files_held,
)

__all__ = [
    "EQUAL_TO_A_SCALAR",
    "EQUAL_VALUES",
    "NO_PAIR",
    "SHARED_PARAMETER",
    "SHARED_STORAGE",
    "UNREAD",
    "UNTIED",
    "TiePair",
    "TieReport",
    "input_matrix",
    "max_abs_difference",
    "output_matrix",
    "report_tie",
]


_HELD = {True: "yes", False: "no", None: "perhaps, under another name"}


@dataclass(frozen=True, kw_only=True)
class TieReport:
    """The verdict on W_E and W_U, and beside it what config, class and files say.

    `verdict` is one of "shared parameter", "shared storage", "equal values, separate", "equal up
    to a scalar", "untied", "separate, values not in memory", "no pair of matrices"; it is that of
    the lookup and the unembedding of the stack that is read. `pairs` holds every pair: one, or
    the three of an encoder-decoder, that one last. `max_abs_difference` is None where widths
    differ. `flags` are the config's, by path; `class_mapping` what the class ties where the flag
    says so; `files_held` says which matrices the files held, None where unknown.
    `parameters_saved` counts V x d for each matrix that is another one's tensor, `parameters_spent`
    for each distinct matrix beyond the first. `contradictions` are sentences.
    """

    verdict: str
    input_name: str | None
    output_name: str | None
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    max_abs_difference: float | None
    cost: TieCost | None
    parameters_saved: int
    parameters_spent: int
    config_says_tied: bool | None
    pairs: tuple[TiePair, ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)
    class_mapping: tuple[tuple[str, str], ...] = ()
    files_held: dict[str, bool | None] | None = None
    contradictions: tuple[str, ...] = ()

    @property
    def is_tied(self) -> bool:
        """True where both are one tensor, so that a change of one is a change of the other."""
        return self.verdict in ONE_TENSOR

    def __str__(self) -> str:
        if self.verdict == NO_PAIR:
            return "no pair of embedding and unembedding matrices to compare"
        facts = f"{self.verdict}: {self.input_name} {list(self.input_shape or ())} and "
        facts += f"{self.output_name} {list(self.output_shape or ())}"
        words = ["one matrix"] if self.is_tied else []
        if not self.is_tied and self.max_abs_difference is not None:
            words.append(f"max |difference| {self.max_abs_difference:.3g}")
        if self.parameters_saved:
            words.append(f"{self.parameters_saved:,} parameters saved")
        if self.parameters_spent:
            words.append(f"{self.parameters_spent:,} parameters spent on further matrices")
        return "; ".join([f"{facts}: {', '.join(words)}", *self.contradictions])

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs: each pair, the flags, the class, the files, the cost."""
        rows = [("tie", str(pair)) for pair in reversed(self.pairs)]
        rows = rows or [("tie", str(self))]
        flags = ", ".join(f"{name} {str(flag).lower()}" for name, flag in self.flags.items())
        rows.append(("config says", flags or "nothing of a tie"))
        mapped = ", ".join(
            f"{name} := {source}" if source else name for name, source in self.class_mapping
        )
        rows.append(("class ties", mapped or "nothing"))
        if self.files_held is not None:
            held = ", ".join(f"{name} {_HELD[there]}" for name, there in self.files_held.items())
            rows.append(("files hold", held or "neither matrix"))
        rows += [("contradiction", sentence) for sentence in self.contradictions]
        if self.cost is not None:
            rows += self.cost.rows(saved=self.parameters_saved, spent=self.parameters_spent)
        return rows


def report_tie(
    model: nn.Module,
    readout: Any,
    *,
    seq2seq: bool,
    checkpoint_keys: frozenset[str] | None = None,
) -> TieReport:
    """Compare all matrices of a model by identity, storage and value; nothing is copied.

    `readout` may be None: then W_U is that of the model's head. `checkpoint_keys` are the tensor
    names of the files that the model came from.
    """
    matrices = named_matrices(model, readout, seq2seq=seq2seq)
    # The pair that is read, decoder lookup and unembedding, comes last.
    pairs = tuple(compare(a, b) for a, b in combinations(matrices, 2))
    complete = bool(pairs) and matrices[-1].role == "unembedding"
    read = pairs[-1] if complete else None
    held = files_held(model, matrices, checkpoint_keys)
    distinct = _distinct(matrices)
    sizes = [m.tensor.numel() for m in matrices]
    cost = _cost(model, matrices, distinct) if complete else None
    return TieReport(
        verdict=read.verdict if read else NO_PAIR,
        input_name=read.first_name if read else None,
        output_name=read.second_name if read else None,
        input_shape=read.first_shape if read else None,
        output_shape=read.second_shape if read else None,
        max_abs_difference=read.max_abs_difference if read else None,
        cost=cost,
        parameters_saved=sum(sizes) - sum(m.tensor.numel() for m in distinct) if read else 0,
        parameters_spent=sum(m.tensor.numel() for m in distinct[1:]) if read else 0,
        config_says_tied=config_says(model),
        pairs=pairs,
        flags=config_flags(model),
        class_mapping=class_mapping(model),
        files_held=held,
        contradictions=contradictions(model, matrices, pairs, checkpoint_keys) if read else (),
    )


def _distinct(matrices: tuple[NamedMatrix, ...]) -> list[NamedMatrix]:
    """One matrix for each place in memory."""
    found: list[NamedMatrix] = []
    for matrix in matrices:
        if not any(_is_one(matrix, other) for other in found):
            found.append(matrix)
    return found


def _is_one(a: NamedMatrix, b: NamedMatrix) -> bool:
    if a.tensor is b.tensor:
        return True
    return a.values is not None and b.values is not None and same_storage(a.values, b.values)


def _cost(
    model: nn.Module, matrices: tuple[NamedMatrix, ...], distinct: list[NamedMatrix]
) -> TieCost:
    """With one matrix and with all: the rest of the model is what it is."""
    each = [m.tensor.numel() for m in matrices]
    held = sum(m.tensor.numel() for m in distinct)
    rest = n_parameters(model) - held
    return TieCost(
        parameters=sum(each) - each[-1],
        n_matrices=len(matrices),
        n_parameters_tied=rest + each[-1],
        n_parameters_untied=rest + sum(each),
        bytes_per_parameter=matrices[-1].tensor.element_size(),
        d_vocab=matrices[-1].tensor.shape[0],
    )


def n_parameters(model: nn.Module) -> int:
    """Parameters of a model, each tensor once."""
    return sum(p.numel() for p in {_place(p): p for p in model.parameters()}.values())


def _place(parameter: nn.Parameter) -> Any:
    if parameter.is_meta or not parameter.numel():
        return id(parameter)
    return (parameter.data_ptr(), tuple(parameter.shape))
