"""Profiles that come with the package: how far the logit lens of a known model may be believed.

Kept by the hash of the unembedding, so that a model is known whatever name it is loaded by.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.errors import ResultFileError, SelectionError
from lens.files import written_whole
from lens.measuring.profile import LensProfile

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

FORMAT = "lens-known-profile-1"
_ARRAYS = (
    "kl_bits",
    "kl_low_95",
    "kl_high_95",
    "median_kl_bits",
    "skill",
    "agreement",
    "self_copy_mass",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownProfile:
    """Means by layer of the logit lens of one model over a corpus, and what they were taken on.

    `skill` is against the best guess that sees no context; KL is in bits.
    """

    model_id: str
    unembedding_hash: str
    n_layers: int
    d_model: int
    d_vocab: int
    dtype: str
    corpus: str
    corpus_hash: str
    n_documents: int
    n_sources: int
    n_positions: int
    versions: Mapping[str, str]
    date: str
    kl_bits: Float[np.ndarray, " layer"]
    kl_low_95: Float[np.ndarray, " layer"]
    kl_high_95: Float[np.ndarray, " layer"]
    median_kl_bits: Float[np.ndarray, " layer"]
    skill: Float[np.ndarray, " layer"]
    agreement: Float[np.ndarray, " layer"]
    self_copy_mass: Float[np.ndarray, " layer"]

    @property
    def beats_a_guess_from(self) -> int:
        """The first layer from which on skill stays above 0."""
        return _stays(self.skill > 0)

    @property
    def agrees_from(self) -> int:
        """The first layer from which on its first token is the model's at half of the positions."""
        return _stays(self.agreement >= 0.5)

    def __str__(self) -> str:
        return (
            f"On {self.n_positions:,} positions of {self.n_documents} documents of {self.corpus}, "
            f"the logit lens of {self.model_id} beats a context-free guess from layer "
            f"{self.beats_a_guess_from} of {self.n_layers} on, and has the model's first token at "
            f"half of the positions from layer {self.agrees_from} on."
        )

    def save(self, folder: str | Path) -> Path:
        """Write it as HASH.json into a folder."""
        held = asdict(self) | {name: np.round(getattr(self, name), 6).tolist() for name in _ARRAYS}
        target = Path(folder) / f"{self.unembedding_hash}.json"
        with written_whole(target) as partial:
            text = json.dumps({"format": FORMAT} | held, indent=1, default=dict)
            partial.write_text(text + "\n", encoding="utf-8")
        return target


def known_of(
    checkpoint: "Checkpoint", profile: LensProfile, *, name: str, date: str
) -> KnownProfile:
    """What is kept of a profile. Raises SelectionError without a baseline or for another lens."""
    source = profile.provenance
    if source.reading.lens != "output" or not source.baseline_hash:
        raise SelectionError(
            "A known profile is one of the output lens with a baseline: measure with fit_on=… and "
            'lens="output".'
        )
    interval = profile.interval("kl_bits")
    return KnownProfile(
        model_id=name,
        unembedding_hash=checkpoint.unembedding_hash,
        n_layers=profile.n_layers,
        d_model=source.reading.d_model,
        d_vocab=source.reading.d_vocab,
        dtype=source.reading.dtype,
        corpus=source.corpus_name,
        corpus_hash=source.corpus_hash,
        n_documents=len(profile.documents),
        n_sources=len(set(profile.sources)),
        n_positions=profile.n_positions,
        versions={k: v.split("+")[0] for k, v in source.reading.versions.items()},
        date=date,
        kl_bits=profile.mean("kl_bits"),
        kl_low_95=interval.low,
        kl_high_95=interval.high,
        median_kl_bits=profile.median_kl_bits,
        skill=profile.skill,
        agreement=profile.mean("agreement"),
        self_copy_mass=profile.mean("self_copy_mass"),
    )


@in_plain_torch
def known_profile(checkpoint: "Checkpoint") -> KnownProfile | None:
    """The shipped profile of this model's unembedding, None where there is none.

    W_U is hashed only where a profile has its shape. The hash does not see the trunk: a model that
    was trained further with this matrix frozen would be taken for the one that was measured.
    """
    if not isinstance(checkpoint.readout, DirectReadout):
        return None
    sizes = (checkpoint.n_layers, checkpoint.d_model, checkpoint.d_vocab)
    alike = [p for p in shipped() if (p.n_layers, p.d_model, p.d_vocab) == sizes]
    if not alike:
        return None
    own = checkpoint.unembedding_hash
    return next((p for p in alike if p.unembedding_hash == own), None)


def shipped() -> Iterator[KnownProfile]:
    """All profiles that come with the package."""
    for entry in sorted((files("lens") / "data" / "profiles").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            yield read_known(entry.name, entry.read_text("utf-8"))


def read_known(name: str, text: str) -> KnownProfile:
    """What `KnownProfile.save` wrote. Raises ResultFileError."""
    try:
        held: dict[str, Any] = json.loads(text)
        if held.pop("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT!r}")
        for array in _ARRAYS:
            held[array] = np.array(held[array], dtype=np.float64)
        return KnownProfile(**held)
    except (ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"{name} cannot be read as a known profile: {error}.") from error


def _stays(reached: np.ndarray) -> int:
    stays = np.logical_and.accumulate(reached[::-1])[::-1]
    return int(stays.argmax()) if stays.any() else len(reached) - 1
