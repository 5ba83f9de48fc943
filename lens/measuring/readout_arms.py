"""One model with one thing changed at its ends: the causal part that needs no training.

Each arm is the same trunk; what differs is the matrix, a bias, or the scale of the lookup.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.corpus import Corpus, read_corpus
from lens.errors import SelectionError
from lens.measuring.frozen_norm import norm_bias
from lens.measuring.measure import measure
from lens.measuring.profile import LensProfile
from lens.measuring.readout_variants import variants
from lens.measuring.required_readout import required_readout
from lens.measuring.sampled_states import sampled_states
from lens.measuring.statistics import Interval, bootstrap

if TYPE_CHECKING:
    import pandas as pd

ALPHAS = (0.5, 1.0)
COMPARED = ("kl_bits", "self_copy_mass", "agreement", "entropy_bits")
"""Means by layer whose differences are given."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadoutArm:
    """One change, and what it does: the changed model's numbers less the unchanged one's.

    KL is of each lens against its own model's final distribution. `differences` [layer] are those
    of COMPARED; `cross_entropy_bits` the cost to the model itself, in bits per token.
    """

    name: str
    profile: LensProfile
    differences: dict[str, Interval]
    cross_entropy_bits: Interval


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadoutArms:
    """The unchanged model and its arms, over the same documents.

    `absent` says which changes this model does not offer, and why.
    """

    unchanged: LensProfile
    arms: tuple[ReadoutArm, ...]
    absent: dict[str, str]

    def __getitem__(self, name: str) -> ReadoutArm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise SelectionError(
            f"There is no arm {name!r}; there are {', '.join(arm.name for arm in self.arms)}."
        )

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a reader."""
        found = [(f"no arm {name!r}", why) for name, why in self.absent.items()]
        middle = self.unchanged.n_layers // 2
        for arm in self.arms:
            cost, kl = arm.cross_entropy_bits, arm.differences["kl_bits"]
            copy = arm.differences["self_copy_mass"]
            found.append(
                (
                    arm.name,
                    f"model {_told(cost, 0)} bits per token; lens' KL {_told(kl, 0)} bits at "
                    f"layer 0, {_told(kl, middle)} at layer {middle}; self-copy at layer 0 "
                    f"{_told(copy, 0)}",
                )
            )
        return found

    def to_frame(self) -> "pd.DataFrame":
        """A row for each arm, quantity and layer: difference with 95 % interval and band."""
        import pandas as pd

        rows = []
        for arm in self.arms:
            whole = {**arm.differences, "cross_entropy_bits": arm.cross_entropy_bits}
            for quantity, found in whole.items():
                for entry, value in enumerate(found.estimate):
                    layer = self.unchanged.n_layers if len(found.estimate) == 1 else entry
                    rows.append(
                        {
                            "arm": arm.name,
                            "quantity": quantity,
                            "layer": layer,
                            "difference": value,
                            "low_95": found.low[entry],
                            "high_95": found.high[entry],
                            "band_low_95": found.band_low[entry],
                            "band_high_95": found.band_high[entry],
                        }
                    )
        return pd.DataFrame(rows)


@in_plain_torch
def readout_arms(
    model: Checkpoint,
    corpus: Any = "sample",
    *,
    alphas: Sequence[int | float] = ALPHAS,
    window_tokens: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> ReadoutArms:
    """Measure lens and model with one thing changed at a time, paired by document.

    The arms, where the model offers them: "alpha A", W_U moved to (1 - A) W_U + A W_E in an untied
    model; "output bias zero"; "norm bias zero"; "lookup scale 1", the states that enter block 0
    divided by the measured scale of the lookup. Nothing was trained for a change, so an arm tells
    what a part does in this model, not what a model without it would have become.

    Raises UnsupportedArchitectureError without a direct readout, SelectionError for alphas not
    above 0 and up to 1 and fewer than two documents, and as `lens.measure` does.

    >>> lens.readout_arms(model, corpus).to_frame()  # doctest: +SKIP
    """
    readout = required_readout(model, "A change of the readout's parts")
    if not all(0 < alpha <= 1 for alpha in alphas):
        raise SelectionError(f"alphas are {list(alphas)}; expected numbers above 0, up to 1.")
    texts = read_corpus(corpus)
    changed, absent = _changed(model, readout, texts, alphas, window_tokens)
    unchanged = measure(model, texts, window_tokens=window_tokens)
    arms = []
    for name, (checkpoint, within) in changed.items():
        with within:
            profile = measure(checkpoint, texts, window_tokens=window_tokens)
        arms.append(_arm(name, profile, unchanged))
        if progress is not None:
            progress(name)
    return ReadoutArms(unchanged=unchanged, arms=tuple(arms), absent=absent)


_Changed = dict[str, tuple[Checkpoint, AbstractContextManager[None]]]


def _changed(
    model: Checkpoint,
    readout: DirectReadout,
    texts: Corpus,
    alphas: Sequence[int | float],
    window_tokens: int | None,
) -> tuple[_Changed, dict[str, str]]:
    """Each arm's checkpoint, what must hold around its measurement, and what there is not."""
    found: _Changed = {}
    absent: dict[str, str] = {}
    if model.tie.is_tied:
        absent["alpha"] = "W_U is W_E: there is no way between them"
    elif model.W_E.shape != model.W_U.shape:
        absent["alpha"] = f"W_E is {tuple(model.W_E.shape)}, W_U {tuple(model.W_U.shape)}"
    else:
        w_u, w_e = readout.unembedding.weight.detach(), model.W_E.detach()
        for alpha in alphas:
            moved = readout.through((1 - alpha) * w_u + alpha * w_e.to(w_u))
            name = f"alpha {alpha:g}"
            found[name] = (_with_readout(model, moved, name), nullcontext())
    state = sampled_states(
        model,
        texts,
        layers=[],
        positions=1,
        max_documents=1,
        window_tokens=window_tokens,
        seed=0,
    ).final[0]
    for name, other in variants(readout, norm_bias(readout, state)).items():
        if name.endswith("bias zero"):
            found[name] = (_with_readout(model, other, name), nullcontext())
    for name in ("output bias zero", "norm bias zero"):
        if name not in found:
            absent[name] = "this model has none"
    scale = model.lookup_scale
    if scale is None or abs(scale - 1) < 1e-3:
        absent["lookup scale 1"] = "the lookup is not scaled" if scale else "no scale measurable"
    else:
        edit = model.edit(0, None, lambda states: states / scale)
        found["lookup scale 1"] = (model, edit)
    return found, absent


def _with_readout(model: Checkpoint, readout: DirectReadout, what: str) -> Checkpoint:
    """The same model and trunk, its output made by another readout."""
    origin = replace(model.origin, model_id=f"{model.origin.model_id} ({what})")
    proved = replace(model._proved, readout=readout)
    return Checkpoint(
        model=model.model,
        tokenizer=model.tokenizer,
        origin=origin,
        proved=proved,
        seq2seq=model.seq2seq,
    )


def _arm(name: str, profile: LensProfile, unchanged: LensProfile) -> ReadoutArm:
    differences = {
        quantity: _difference(
            profile.sums[quantity], unchanged.sums[quantity], unchanged.counts_of(quantity)
        )
        for quantity in COMPARED
    }
    last = slice(-1, None)
    cost = _difference(
        profile.sums["nll_bits"][:, last],
        unchanged.sums["nll_bits"][:, last],
        unchanged.counts["n_targets"],
    )
    return ReadoutArm(name=name, profile=profile, differences=differences, cross_entropy_bits=cost)


def _difference(
    ours: Float[np.ndarray, "doc layer"], theirs: Float[np.ndarray, "doc layer"], counts: np.ndarray
) -> Interval:
    """The mean difference by layer; both sides see the same draws of documents."""
    stacked = np.concatenate([ours - theirs, counts[:, None].astype(np.float64)], axis=1)
    return bootstrap(stacked, lambda sums: sums[..., :-1] / sums[..., -1:], counts=counts)


def _told(found: Interval, entry: int) -> str:
    return f"{found.estimate[entry]:+.3f} [{found.low[entry]:+.3f}, {found.high[entry]:+.3f}]"
