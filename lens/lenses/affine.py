"""Lenses that move a state into the last layer's basis before the readout: h + W h + b.

The tuned lens and the ridge map are of this form; the last layer is the identity. Sources:
Belrose et al. 2023 (tuned lens); Din et al. 2023 (a linear map fitted by least squares).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lens.checkpoint.fingerprint import fingerprint
from lens.errors import ExportError, ProvenanceError, ResultFileError, SelectionError, ShapeError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

FORMAT = "lens-affine-1"
WEIGHTS, CONFIG = "translators.safetensors", "translators.json"
PUBLISHED_WEIGHTS, PUBLISHED_CONFIG = "params.pt", "config.json"


@dataclass(frozen=True, kw_only=True)
class AffineSource:
    """What a lens was fitted on: the model, the hash of its W_U, the documents, the options."""

    model_id: str
    unembedding_hash: str
    fitted_on: str
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class AffineLens:
    """A translator for each layer below the output: `weight[l]` is applied after l blocks.

    Pass it as `lens=` to `lens.measure`. `name` is "tuned", "ridge" or
    "jacobian".
    """

    name: str
    weight: Float[Tensor, "translator d_model d_model"]
    bias: Float[Tensor, "translator d_model"]
    source: AffineSource

    @property
    def n_layers(self) -> int:
        """Number of blocks of the model; that many translators."""
        return self.weight.shape[0]

    @property
    def hash(self) -> str:
        """A digest of all translators."""
        return fingerprint([self.weight, self.bias])

    def translate(
        self, layer: int, states: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        """States of a layer in the last layer's basis; the output's states as they are.

        Raises SelectionError for a layer that is not there.
        """
        if not 0 <= layer <= self.n_layers:
            raise SelectionError(f"There is no layer {layer}; layers are 0 to {self.n_layers}.")
        if layer == self.n_layers:
            return states
        weight, bias = (t[layer].to(states) for t in (self.weight, self.bias))
        return states + states @ weight.T + bias

    def check(self, checkpoint: "Checkpoint") -> None:
        """Raise ProvenanceError unless it was fitted on this model's W_U, width and depth."""
        found = (self.n_layers, self.weight.shape[-1])
        expected = (checkpoint.n_layers, checkpoint.d_model)
        if found != expected:
            raise ProvenanceError(
                f"This lens has {found[0]} translators of width {found[1]}; "
                f"{checkpoint.origin.model_id} has {expected[0]} layers of width {expected[1]}."
            )
        named = self.source.unembedding_hash
        if named != checkpoint.unembedding_hash and named != published_hash(checkpoint):
            raise ProvenanceError(
                f"This lens was fitted on {self.source.model_id}, whose unembedding is another "
                f"({named[:12]}) than that of {checkpoint.origin.model_id}. "
                "Fit it again on this model."
            )

    def save(self, folder: str | Path) -> Path:
        """Write translators.safetensors and translators.json into a folder; errors: ExportError."""
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
            tensors = {"weight": self.weight.cpu().contiguous(), "bias": self.bias.cpu()}
            meta = {"format": FORMAT, "name": self.name, "source": asdict(self.source)}
            text = json.dumps(meta, indent=1)
            # First away and last there: a folder with this file in it is whole, and of one lens.
            (place / CONFIG).unlink(missing_ok=True)
            _replace(place / WEIGHTS, lambda path: save_file(tensors, path))
            _replace(place / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise ExportError(f"Cannot write in {place}: {why}.") from error
        return place


def published_hash(checkpoint: "Checkpoint") -> str:
    """The digest of W_U that the published tuned-lens format uses: SHA-256 of its bytes."""
    weight = checkpoint.W_U.detach().cpu().contiguous()
    return hashlib.sha256(memoryview(weight.view(torch.uint8).numpy())).hexdigest()  # type: ignore[arg-type]


def fitted_lens(
    checkpoint: "Checkpoint",
    name: str,
    weight: Float[Tensor, "translator d_model d_model"],
    bias: Float[Tensor, "translator d_model"],
    fitted_on: str,
    options: dict[str, Any],
) -> AffineLens:
    """A lens with a note of the model that it was fitted on, and how."""
    source = AffineSource(
        model_id=checkpoint.origin.model_id,
        unembedding_hash=checkpoint.unembedding_hash,
        fitted_on=fitted_on,
        options=options,
    )
    return AffineLens(name=name, weight=weight, bias=bias, source=source)


def load_affine(folder: str | Path) -> AffineLens:
    """Read a lens from a folder: ours, or the published tuned-lens format (params.pt, config.json).

    In the published format translator i acts on the state after i blocks, as here. Raises
    ResultFileError for anything else.
    """
    place = Path(folder)
    try:
        if (place / CONFIG).is_file():
            return _ours(place)
        if (place / PUBLISHED_CONFIG).is_file() and (place / PUBLISHED_WEIGHTS).is_file():
            return _published(place)
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError),
        SafetensorError,
    ) as error:
        raise ResultFileError(
            f"{place} cannot be read as a lens ({type(error).__name__}: {error})."
        ) from error
    raise ResultFileError(
        f"{place} holds neither {CONFIG} (written by save) nor {PUBLISHED_WEIGHTS} with "
        f"{PUBLISHED_CONFIG} (the published tuned-lens format)."
    )


def _ours(place: Path) -> AffineLens:
    meta = json.loads((place / CONFIG).read_text("utf-8"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"format {meta.get('format')!r}, expected {FORMAT!r}")
    tensors = load_file(place / WEIGHTS)
    weight, bias = tensors["weight"], tensors["bias"]
    source = AffineSource(**meta["source"])
    if weight.ndim != 3 or weight.shape[1] != weight.shape[2] or bias.shape != weight.shape[:2]:
        raise ValueError(f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)}")
    if not (weight.is_floating_point() and bias.is_floating_point()):
        raise ValueError(f"weight of {weight.dtype} and bias of {bias.dtype}")
    if not bool(weight.isfinite().all() and bias.isfinite().all()):
        raise ValueError("numbers that are not finite")
    if not isinstance(source.unembedding_hash, str):
        raise ValueError(f"unembedding_hash {source.unembedding_hash!r}")
    return AffineLens(name=meta["name"], weight=weight, bias=bias, source=source)


def _published(place: Path) -> AffineLens:
    config = json.loads((place / PUBLISHED_CONFIG).read_text("utf-8"))
    state = torch.load(place / PUBLISHED_WEIGHTS, map_location="cpu", weights_only=True)
    if config.get("lens_type", "linear_tuned_lens") != "linear_tuned_lens":
        raise ValueError(f"lens_type {config['lens_type']!r}, expected 'linear_tuned_lens'")
    n_layers = int(config["num_hidden_layers"])
    weight = torch.stack([state[f"{i}.weight"].float() for i in range(n_layers)])
    zero = torch.zeros(weight.shape[-1], dtype=torch.float32)
    bias = torch.stack([state.get(f"{i}.bias", zero).float() for i in range(n_layers)])
    if weight.shape[-1] != int(config["d_model"]):
        raise ShapeError(f"translators of width {weight.shape[-1]}, d_model {config['d_model']}")
    return AffineLens(
        name="tuned",
        weight=weight,
        bias=bias,
        source=AffineSource(
            model_id=str(config.get("base_model_name_or_path", "unknown")),
            unembedding_hash=str(config.get("unembed_hash", "")),
            fitted_on="unknown: published",
            options={k: v for k, v in config.items() if isinstance(v, str | int | float | bool)},
        ),
    )


def _replace(path: Path, write: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
