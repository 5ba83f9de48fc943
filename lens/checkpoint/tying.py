"""Is the unembedding the embedding? Read from the tensors, never from the config alone."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

SHARED_PARAMETER = "shared parameter"
SHARED_STORAGE = "shared storage"
EQUAL_VALUES = "equal values, separate"
UNTIED = "untied"
NO_PAIR = "no pair of matrices"

_ROWS_AT_ONCE = 8192


@dataclass(frozen=True, kw_only=True)
class TieReport:
    """The verdict on W_E and W_U, and what the config says beside it.

    `verdict` is one of "shared parameter", "shared storage", "equal values, separate", "untied",
    "no pair of matrices". `max_abs_difference` is the largest |W_E - W_U|, None where the shapes
    differ. `parameters_saved` counts what sharing saves (d_vocab * d), `parameters_spent` what a
    second matrix costs; one of them is 0. `contradictions` are sentences.
    """

    verdict: str
    input_name: str | None
    output_name: str | None
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    max_abs_difference: float | None
    parameters_saved: int
    parameters_spent: int
    config_says_tied: bool | None
    contradictions: tuple[str, ...] = ()

    @property
    def is_tied(self) -> bool:
        """True where both are one tensor, so that a change of one is a change of the other."""
        return self.verdict in (SHARED_PARAMETER, SHARED_STORAGE)

    def __str__(self) -> str:
        if self.verdict == NO_PAIR:
            return "no pair of embedding and unembedding matrices to compare"
        facts = f"{self.input_name} {list(self.input_shape or ())} and {self.output_name} "
        facts += f"{list(self.output_shape or ())}"
        if self.is_tied:
            end = f"one matrix, {self.parameters_saved:,} parameters saved"
        elif self.max_abs_difference is None:
            end = f"different shapes, {self.parameters_spent:,} parameters spent on the second"
        else:
            end = f"max |difference| {self.max_abs_difference:.3g}, "
            end += f"{self.parameters_spent:,} parameters spent on the second"
        return "; ".join([f"{self.verdict}: {facts}: {end}", *self.contradictions])


def input_matrix(model: Any, *, seq2seq: bool) -> Tensor | None:
    """W_E [d_vocab, d]: the lookup of the stack that is read (the decoder's in a seq2seq)."""
    owner = model
    if seq2seq and hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
        if decoder is not None and getattr(decoder, "get_input_embeddings", None):
            owner = decoder
    embedding = owner.get_input_embeddings() or model.get_input_embeddings()
    return getattr(embedding, "weight", None)


def output_matrix(model: Any, readout: Any) -> Tensor | None:
    """W_U [d_vocab, d]: the matrix of the direct readout, else that of the model's head."""
    unembedding = getattr(readout, "unembedding", None)
    if unembedding is not None:
        return unembedding.weight
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return getattr(head, "weight", None)


def report_tie(model: nn.Module, readout: Any, *, seq2seq: bool) -> TieReport:
    """Compare W_E with W_U by identity, storage and value; V x d is streamed, nothing is copied."""
    w_e, w_u = input_matrix(model, seq2seq=seq2seq), output_matrix(model, readout)
    config_says = _config_flag(model)
    if w_e is None or w_u is None:
        return TieReport(
            verdict=NO_PAIR,
            input_name=None,
            output_name=None,
            input_shape=None,
            output_shape=None,
            max_abs_difference=None,
            parameters_saved=0,
            parameters_spent=0,
            config_says_tied=config_says,
        )
    verdict, difference = _verdict(w_e, w_u)
    tied = verdict in (SHARED_PARAMETER, SHARED_STORAGE)
    return TieReport(
        verdict=verdict,
        input_name=_name(model, w_e),
        output_name=_name(model, w_u, last=True),
        input_shape=tuple(w_e.shape),
        output_shape=tuple(w_u.shape),
        max_abs_difference=difference,
        parameters_saved=w_u.numel() if tied else 0,
        parameters_spent=0 if tied else w_u.numel(),
        config_says_tied=config_says,
        contradictions=_contradictions(config_says, tied=tied),
    )


def _verdict(w_e: Tensor, w_u: Tensor) -> tuple[str, float | None]:
    if w_e is w_u:
        return SHARED_PARAMETER, 0.0
    if w_e.is_meta or w_u.is_meta:
        return UNTIED, None
    same_place = w_e.untyped_storage().data_ptr() == w_u.untyped_storage().data_ptr()
    if same_place and w_e.shape == w_u.shape and w_e.storage_offset() == w_u.storage_offset():
        return SHARED_STORAGE, 0.0
    if w_e.shape != w_u.shape:
        return UNTIED, None
    difference = max_abs_difference(w_e, w_u)
    return (EQUAL_VALUES, 0.0) if difference == 0 else (UNTIED, difference)


def max_abs_difference(a: Float[Tensor, "d_vocab d"], b: Float[Tensor, "d_vocab d"]) -> float:
    """The largest |a - b|, a block of rows at a time."""
    largest = 0.0
    for start in range(0, a.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        gap = (a[rows].detach().float() - b[rows].detach().to(a.device).float()).abs().max()
        largest = max(largest, float(gap))
    return largest


def _config_flag(model: nn.Module) -> bool | None:
    config = getattr(model, "config", None)
    flag = getattr(config, "tie_word_embeddings", None)
    return None if flag is None else bool(flag)


def _contradictions(config_says: bool | None, *, tied: bool) -> tuple[str, ...]:
    if config_says is None or config_says == tied:
        return ()
    says, are = ("tied", "two tensors") if config_says else ("untied", "one tensor")
    return (f"the config says {says}, but the matrices are {are}",)


def _name(model: nn.Module, parameter: Tensor, *, last: bool = False) -> str | None:
    """The parameter's path in the model; the last of several for the output side."""
    names = [
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if p is parameter
        or (not p.is_meta and p.data_ptr() == parameter.data_ptr() and p.shape == parameter.shape)
    ]
    return None if not names else names[-1 if last else 0]
