"""What a tie saves and what a second matrix costs: parameters, bytes, optimizer state, logits."""

import math
from dataclasses import dataclass

from lens.errors import SelectionError

_FLOAT32_BYTES = 4
_ADAM_MOMENTS = 2
_LARGE_SHARE, _SMALL_SHARE = 0.2, 0.1
# Observed: Llama 3.2 1B (0.175), Qwen2.5 0.5B (0.216) tied; Llama 3.1 8B (0.065) untied.


@dataclass(frozen=True, kw_only=True)
class TieCost:
    """The price of not sharing, exact: what each further matrix of d_vocab x d costs.

    `parameters` is the size of what is shared or could be (V x d for each matrix beyond the
    first), `n_parameters_tied` and `n_parameters_untied` the model with one matrix and with all.
    Bytes are at `bytes_per_parameter`; `optimizer_bytes` are Adam's two moments in float32.
    `logits_bytes_per_token` (float32) is the same tied or not: a tie does not make the output
    cheaper to compute.
    """

    parameters: int
    n_matrices: int
    n_parameters_tied: int
    n_parameters_untied: int
    bytes_per_parameter: int | float
    d_vocab: int

    @property
    def share_of_untied(self) -> float:
        """Saved parameters over the size of the untied model."""
        return self.parameters / self.n_parameters_untied

    @property
    def share_of_tied(self) -> float:
        """Saved parameters over the size of the tied model."""
        return self.parameters / self.n_parameters_tied

    @property
    def share_of_matrices(self) -> float:
        """Saved parameters over all parameters of the matrices: 1/2 for two, 2/3 for three."""
        return 1 - 1 / self.n_matrices

    @property
    def weight_bytes(self) -> int:
        """Bytes of the saved weights."""
        return round(self.parameters * self.bytes_per_parameter)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of their gradient in training, at the dtype of the weights."""
        return self.weight_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of Adam's two moments of them, in float32."""
        return self.parameters * _ADAM_MOMENTS * _FLOAT32_BYTES

    @property
    def logits_bytes_per_token(self) -> int:
        """Bytes of one token's logits in float32."""
        return self.d_vocab * _FLOAT32_BYTES

    @property
    def training_bytes(self) -> int:
        """Bytes of weights, gradient and Adam's moments together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def rows(self, *, saved: int | None = None, spent: int | None = None) -> list[tuple[str, str]]:
        """(label, text) pairs for a reader; `saved` and `spent` count what a model in hand does."""
        done = [f"{n:,} {word}" for n, word in ((saved, "saved"), (spent, "spent")) if n]
        return [
            (
                "parameters",
                f"{', '.join(done) or f'{self.parameters:,}'}: "
                f"{self.share_of_untied:.1%} of the untied model ({self.n_parameters_untied:,}), "
                f"{self.share_of_tied:.1%} of the tied ({self.n_parameters_tied:,})",
            ),
            (
                "bytes",
                f"{megabytes(self.weight_bytes)} of weights, {megabytes(self.training_bytes)} in "
                "training (weights, gradient, Adam's moments); logits "
                f"{self.logits_bytes_per_token:,} bytes per token, tied or not",
            ),
        ]


def megabytes(count: int) -> str:
    """Bytes in words, 1 MB = 10^6 bytes."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def worth(cost: TieCost) -> str:
    """In words, what families of models do where the saving is as large as this."""
    share = cost.share_of_untied
    if share >= _LARGE_SHARE:
        return f"{share:.1%} is a large saving; models of such a share are mostly tied"
    if share >= _SMALL_SHARE:
        return f"{share:.1%} is where families differ; train both if it matters"
    return f"{share:.1%} is a small saving; models of such a share are mostly untied"


def plan_tie(
    d_vocab: int,
    d_model: int,
    n_layers: int,
    *,
    d_mlp: int | None = None,
    n_ctx: int = 0,
    bytes_per_parameter: int | float = 4,
    n_matrices: int = 2,
) -> TieCost:
    """What tying would save in a transformer of these sizes, counted as GPT-2 counts.

    A block has two norms (4 d), attention (4 d^2 + 4 d) and an MLP of width `d_mlp`, 4 d where left
    out (2 d d_mlp + d_mlp + d); one final norm (2 d) and `n_ctx` learned positions stand outside.
    `n_matrices` is 2, or 3 for an encoder-decoder that shares all. V x d is exact; the size of the
    model is that of this count. For the exact size of another architecture use `scale_table` on its
    config. Raises SelectionError.

    >>> round(plan_tie(50257, 768, 12, n_ctx=1024).share_of_untied, 3)
    0.237
    """
    sizes = {"d_vocab": d_vocab, "d_model": d_model, "n_layers": n_layers}
    wrong = [f"{name} {size}" for name, size in sizes.items() if size < 1]
    if wrong or n_ctx < 0 or n_matrices < 2 or not 0 < bytes_per_parameter < math.inf:
        raise SelectionError(
            f"No model has {', '.join(wrong) or 'such options'}: sizes are 1 or more, n_ctx 0 or "
            "more, n_matrices 2 or 3, bytes_per_parameter a number above 0."
        )
    width = 4 * d_model if d_mlp is None else d_mlp
    block = 4 * d_model * d_model + 8 * d_model + 2 * d_model * width + width + d_model
    trunk = n_layers * block + 2 * d_model + n_ctx * d_model
    one = d_vocab * d_model
    return TieCost(
        parameters=(n_matrices - 1) * one,
        n_matrices=n_matrices,
        n_parameters_tied=trunk + one,
        n_parameters_untied=trunk + n_matrices * one,
        bytes_per_parameter=bytes_per_parameter,
        d_vocab=d_vocab,
    )
