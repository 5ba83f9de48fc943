"""The lens along the path from an untied model to the values of a tie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.surgery import interpolate
from lens.corpus import read_corpus
from lens.errors import SelectionError
from lens.measuring.measure import measure
from lens.measuring.profile import LensProfile

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class SurgerySweep:
    """One profile for each alpha; `skill`, `kl_bits` are [alpha, layer], the rest [alpha].

    KL is against the cut model's own distribution, so it tells how well the lens reads that
    model; `cross_entropy_bits` and `perplexity` tell how good that model still is.
    """

    alphas: Float[np.ndarray, " alpha"]
    rotate: bool
    profiles: tuple[LensProfile, ...]

    @property
    def kl_bits(self) -> Float[np.ndarray, "alpha layer"]:
        """Mean KL(p || q_l) of each cut model's lens."""
        return np.stack([profile.mean("kl_bits") for profile in self.profiles])

    @property
    def skill(self) -> Float[np.ndarray, "alpha layer"]:
        """Skill of each cut model's lens."""
        return np.stack([profile.skill for profile in self.profiles])

    @property
    def self_copy(self) -> Float[np.ndarray, "alpha layer"]:
        """Mean probability that the lens gives the token that was just read."""
        return np.stack([profile.mean("self_copy_mass") for profile in self.profiles])

    @property
    def cross_entropy_bits(self) -> Float[np.ndarray, " alpha"]:
        """Bits per token of the cut models themselves."""
        return np.array([profile.mean("nll_bits")[-1] for profile in self.profiles])

    @property
    def perplexity(self) -> Float[np.ndarray, " alpha"]:
        """2 to the cross-entropy."""
        return np.exp2(self.cross_entropy_bits)

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs, one for each alpha."""
        return [
            (
                f"alpha {alpha:.3g}",
                f"{bits:.3f} bits per token (perplexity {perplexity:.4g}), skill area "
                f"{profile.skill_area:+.3f}, KL at layer 0 {kl[0]:.2f} bits, halfway "
                f"{kl[len(kl) // 2]:.2f}, self-copy at layer 0 {copy[0]:.3f}",
            )
            for alpha, bits, perplexity, profile, kl, copy in zip(
                self.alphas,
                self.cross_entropy_bits,
                self.perplexity,
                self.profiles,
                self.kl_bits,
                self.self_copy,
                strict=True,
            )
        ]


@in_plain_torch
def surgery_sweep(
    checkpoint: "Checkpoint",
    corpus: Any = "sample",
    alphas: Sequence[int | float] = ALPHAS,
    *,
    rotate: bool = False,
    window_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SurgerySweep:
    """Measure lens and model along W_U(alpha) = (1 - alpha) W_U + alpha W_E, on copies.

    The same documents at every alpha; a fifth of them is kept back to fit the context-free guess
    of each cut model. `rotate` goes to W_E turned towards W_U instead. Windows
    are as in `lens.measure`. A cut model was not
    trained: its lens tells what a tie would read without the training that goes with it. Raises
    SelectionError for a tied model, alphas outside [0, 1] or none; the errors of `measure`.

    >>> lens.surgery_sweep(model, "sample", [0, 0.5, 1]).perplexity  # doctest: +SKIP
    """
    if not alphas:
        raise SelectionError("alphas is empty; expected numbers from 0 to 1.")
    fit, held_out = read_corpus(corpus).split()
    profiles = []
    for done, alpha in enumerate(alphas):
        cut = interpolate(checkpoint, alpha, rotate=rotate)
        profiles.append(measure(cut, held_out, fit_on=fit, window_tokens=window_tokens))
        if progress is not None:
            progress(done + 1, len(alphas))
    return SurgerySweep(
        alphas=np.array(alphas, dtype=np.float64), rotate=rotate, profiles=tuple(profiles)
    )
