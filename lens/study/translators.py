"""The affine translators that tell reading loss from what is not there yet."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from lens.corpus import Corpus
from lens.errors import SelectionError
from lens.lenses.affine import AffineLens
from lens.measuring.measure import measure
from lens.measuring.ridge import fit_ridge
from lens.measuring.tuning import tune

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

CHECKED_ONE_IN = 6
"""Documents kept back from both fits, to choose between them."""


def best_affine(
    model: "Checkpoint", fit: Corpus, *, steps: int, learning_rate: float, window_tokens: int
) -> tuple[AffineLens, Float[np.ndarray, " layer"]]:
    """For each layer the better of least squares and a fit by KL, and the share of KL fits.

    Least squares finds the best map at once but by another measure; descent on KL has the right
    measure but may stop short. The choice is made on documents that neither has seen. The second
    value is 1 where KL won, 0 where least squares did. Raises SelectionError for too few documents.
    """
    checked = [i for i in range(len(fit)) if i % CHECKED_ONE_IN == 0]
    rest = [i for i in range(len(fit)) if i % CHECKED_ONE_IN]
    if not rest:
        raise SelectionError(f"Two documents are the least to fit on; found {len(fit)}.")
    seen, unseen = fit.select(rest), fit.select(checked)
    squares = fit_ridge(model, seen, window_tokens=window_tokens)
    by_kl = tune(model, seen, steps=steps, learning_rate=learning_rate, window_tokens=window_tokens)
    kls = [
        measure(model, unseen, lens=lens, window_tokens=window_tokens).mean("kl_bits")
        for lens in (squares, by_kl)
    ]
    chosen = torch.from_numpy(kls[1] < kls[0])[:-1]
    return (
        dataclasses.replace(
            by_kl,
            weight=torch.where(chosen[:, None, None], by_kl.weight, squares.weight),
            bias=torch.where(chosen[:, None], by_kl.bias, squares.bias),
        ),
        chosen.double().numpy(),
    )
