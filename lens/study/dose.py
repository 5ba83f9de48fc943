"""A continued model at one step: how far its matrices went, and what its lens reads."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens.corpus import Corpus
from lens.measuring.measure import measure
from lens.measuring.profile import LensProfile
from lens.measuring.ridge import fit_ridge
from lens.study.drift import likeness
from lens.study.measured import numbers

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

Pair = tuple[Float[Tensor, "rows_E d"], Float[Tensor, "rows_U d"]]
"""W_E and W_U."""


def response(
    model: "Checkpoint", fit: Corpus, held_out: Corpus, *, window_tokens: int
) -> dict[str, Any]:
    """Loss, KL, reading loss, what is not there yet and copying, by layer; bits a token.

    The translator of each layer is the ridge map fitted on `fit`; every number is of `held_out`.
    `by_document` holds sums, of which differences between arms get their intervals.
    """
    translator = fit_ridge(model, fit, window_tokens=window_tokens)
    bare = measure(model, held_out, window_tokens=window_tokens)
    affine = measure(model, held_out, lens=translator, window_tokens=window_tokens)
    kl, left = bare.mean("kl_bits"), affine.mean("kl_bits")
    return {
        "held_out_bits": float(bare.mean("nll_bits")[-1]),
        "n_positions": bare.n_positions,
        "n_documents": len(bare.documents),
        "kl": numbers(kl),
        "not_there_yet": numbers(left),
        "reading_loss": numbers(kl - left),
        "usefulness": numbers(bare.usefulness_bits),
        "agreement": numbers(bare.mean("agreement")),
        "copy_rate": numbers(bare.mean("copies")),
        "copy_mass": numbers(bare.mean("self_copy_mass")),
        "by_document": _by_document(bare, affine),
    }


def _by_document(bare: LensProfile, affine: LensProfile) -> dict[str, list[float]]:
    """Sums over each document's positions; G and R are means over the layers 1 to L - 1."""
    inner = slice(1, bare.n_layers)
    kl, left = (profile.sums["kl_bits"][:, inner].mean(axis=1) for profile in (bare, affine))
    return {
        "positions": numbers(bare.counts["n"]),
        "reading_loss": numbers(kl - left),
        "not_there_yet": numbers(left),
        "targets": numbers(bare.counts["n_targets"]),
        "loss": numbers(bare.final_sums["nll_bits"]),
    }


def dose(now: Pair, first: Pair, loaded: Pair, *, one: bool) -> dict[str, Any]:
    """How far W_E and W_U are from each other, and from where they began.

    `first` are the arm's own at step 0, `loaded` the loaded model's. Two matrices are compared
    with each other; one matrix (`one`) with the two that an untied model had.
    """
    moved = {
        name: float((w - begun).norm() / begun.norm())
        for name, w, begun in zip(("E", "U"), now, first, strict=True)
    }
    pairs: dict[str, Pair] = {}
    if not one:
        pairs["E, U"] = now
    elif loaded[0] is not loaded[1]:
        pairs = {"W, loaded E": (now[0], loaded[0]), "W, loaded U": (now[0], loaded[1])}
    return {
        "moved": {"W": moved["E"]} if one else moved,
        "likeness": {name: vars(likeness(a, b)) for name, (a, b) in pairs.items()},
    }


def held(matrices: tuple[Tensor, Tensor]) -> Pair:
    """Copies that no later step changes; one copy where both are one."""
    W_E, W_U = matrices
    copied = W_E.detach().clone()
    return copied, copied if W_U is W_E else W_U.detach().clone()


def is_finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number everywhere."""
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())
