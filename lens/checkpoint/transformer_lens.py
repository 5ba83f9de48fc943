"""To TransformerLens and from it: a bridge on a copy of the model, and the names of its hooks.

The package is imported inside the calls alone: its import changes loggers and warning filters.
"""

import copy
import re
from typing import TYPE_CHECKING, Any

from lens.errors import (
    MissingPackageError,
    SelectionError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

_HOOK = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|mid|post)")
_WITHIN: dict[str, int | float] = {"pre": 0, "mid": 0.5, "post": 1}


def to_bridge(checkpoint: "Checkpoint") -> Any:
    """A TransformerBridge on a deep copy of the model, weights unprocessed, ties kept.

    The copy is needed: a bridge puts its own modules into the model that it is given. Nothing is
    installed and nothing fetched. Raises UnsupportedArchitectureError for a class that the bridge
    has no adapter for, UnsupportedModelStateError for an offloaded one, MissingPackageError.
    """
    try:
        from transformer_lens.factories import architecture_adapter_factory as factory
        from transformer_lens.model_bridge.sources import _bridge_builder as builder
    except ImportError as error:
        raise MissingPackageError(
            f"TransformerLens cannot be imported ({error}). pip install 'transformer-lens>=4.3'"
        ) from error
    name = type(checkpoint.model).__name__
    if name not in factory.SUPPORTED_ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"TransformerLens has no adapter for {name}. Its table names "
            f"{len(factory.SUPPORTED_ARCHITECTURES)} classes; read this one here, without it."
        )
    if any(p.is_meta for p in checkpoint.model.parameters()):
        raise UnsupportedModelStateError(
            f"Weights of {name} are offloaded and cannot be copied. Load it in memory first."
        )
    model = copy.deepcopy(checkpoint.model).eval()
    return builder.build_bridge_from_module(
        model,
        name,
        hf_config=model.config,
        tokenizer=copy.deepcopy(checkpoint.tokenizer),
        model_name=checkpoint.origin.model_id,
    )


def hook_name(layer: int | float) -> str:
    """The hook of TransformerLens that sees the state of this layer.

    >>> hook_name(0), hook_name(4), hook_name(3.5)
    ('blocks.0.hook_resid_pre', 'blocks.3.hook_resid_post', 'blocks.3.hook_resid_mid')
    """
    if layer != int(layer):
        return f"blocks.{int(layer)}.hook_resid_mid"
    return f"blocks.{int(layer) - 1}.hook_resid_post" if layer else "blocks.0.hook_resid_pre"


def layer_of_hook(name: str) -> int | float:
    """The layer whose state this hook sees. Raises SelectionError for any other hook.

    >>> [layer_of_hook(f"blocks.3.hook_resid_{place}") for place in ("pre", "mid", "post")]
    [3, 3.5, 4]
    """
    found = _HOOK.fullmatch(name)
    if found is None:
        raise SelectionError(
            f"{name!r} names no layer. Expected a number, blocks.N.hook_resid_pre, "
            "blocks.N.hook_resid_mid or blocks.N.hook_resid_post. What attention and MLP add, "
            "hook_attn_out and hook_mlp_out, is no state: model.block_states gives it."
        )
    return int(found[1]) + _WITHIN[found[2]]
