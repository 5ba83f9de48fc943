"""A prompt's states out of a checkpoint: by layer, or all that passes through its blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint import prompts, residual
from lens.checkpoint.additions import passages
from lens.checkpoint.block_states import BlockStates
from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.layer_numbers import Layer, is_mid, resolve_layers
from lens.checkpoint.mid import BlockParts, parts_of
from lens.checkpoint.states import ResidualStates
from lens.checkpoint.untouched import untouched
from lens.errors import CaptureError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


def capture_layers(
    checkpoint: "Checkpoint",
    inputs: Inputs,
    *,
    layers: Sequence[Layer],
    positions: Sequence[int] | None = None,
) -> dict[Layer, Float[Tensor, "batch pos d_model"]]:
    """Residual states by layer, of one forward that stops after the last layer asked for.

    Mids (3.5) take a forward of their own.
    """
    model = checkpoint.model
    found: dict[Layer, Tensor] = {}
    ends = [int(layer) for layer in layers if not is_mid(layer)]
    if ends:
        arguments = forward_arguments(model, inputs, seq2seq=checkpoint.seq2seq)
        with untouched(model):
            found |= residual.capture(
                checkpoint.trunk,
                lambda: model(**arguments),
                layers=ends,
                length=inputs.ids.shape[1],
                positions=None if positions is None else torch.tensor(list(positions)),
                stop_early=_may_stop(checkpoint),
            )
    mids = [int(layer) for layer in layers if is_mid(layer)]
    for block, parts in capture_parts(checkpoint, inputs, mids).items():
        rows = parts.resid_mid
        found[block + 0.5] = rows if positions is None else rows[:, list(positions)]
    return found


def capture_parts(
    checkpoint: "Checkpoint", inputs: Inputs, blocks: Sequence[int]
) -> dict[int, BlockParts]:
    """What passes through these blocks, of one forward.

    Raises UnsupportedArchitectureError where the model has no mid, CaptureError where a block did
    not run.
    """
    if not blocks:
        return {}
    mid = checkpoint.mid
    arguments = forward_arguments(checkpoint.model, inputs, seq2seq=checkpoint.seq2seq)
    with untouched(checkpoint.model):
        found = passages(
            checkpoint.trunk,
            lambda: checkpoint.model(**arguments),
            length=inputs.ids.shape[1],
            blocks=blocks,
            stop_early=_may_stop(checkpoint),
        )
    missing = sorted(set(blocks) - set(found))
    if missing:
        raise CaptureError(
            f"Blocks {missing} of {checkpoint.trunk.container} did not pass by; the hooks did not "
            "fire. Load the model again."
        )
    return {block: parts_of(passage, mid, block) for block, passage in found.items()}


def residual_states(
    checkpoint: "Checkpoint",
    prompt: str | Sequence[int],
    *,
    layers: Sequence[Layer | str] | None,
    points: Literal["post", "mid", "all"],
    positions: Sequence[int] | None,
    source: str | Sequence[int] | None,
    truncate: bool,
) -> ResidualStates:
    """As `Checkpoint.residual_states`."""
    ids = checkpoint.ids_of(prompt, truncate=truncate)
    rows = resolve_layers(layers, checkpoint.n_layers, points=points)
    columns = prompts.resolve(positions, len(ids), "position")
    inputs = checkpoint.inputs_of([ids], source=source)
    states = checkpoint.capture(inputs, layers=rows, positions=columns)
    return ResidualStates(
        states=_stacked([states[layer][0] for layer in rows]),
        layers=tuple(rows),
        input_ids=torch.tensor(ids)[columns],
        model_id=checkpoint.origin.model_id,
        model_hash=checkpoint.model_hash,
    )


def block_states(
    checkpoint: "Checkpoint",
    prompt: str | Sequence[int],
    *,
    blocks: Sequence[int] | None,
    positions: Sequence[int] | None,
    source: str | Sequence[int] | None,
    truncate: bool,
) -> BlockStates:
    """As `Checkpoint.block_states`."""
    ids = checkpoint.ids_of(prompt, truncate=truncate)
    wanted = prompts.resolve(blocks, checkpoint.n_layers, "block")
    columns = prompts.resolve(positions, len(ids), "position")
    parts = capture_parts(checkpoint, checkpoint.inputs_of([ids], source=source), wanted)

    def _of_all(name: str) -> Tensor:
        return _stacked([getattr(parts[block], name)[0, columns] for block in wanted])

    return BlockStates(
        resid_pre=_of_all("resid_pre"),
        attn_out=_of_all("attn_out"),
        resid_mid=_of_all("resid_mid"),
        mlp_out=_of_all("mlp_out"),
        resid_post=_of_all("resid_post"),
        blocks=tuple(wanted),
        input_ids=torch.tensor(ids)[columns],
        model_id=checkpoint.origin.model_id,
        model_hash=checkpoint.model_hash,
    )


def _stacked(rows: list[Tensor]) -> Tensor:
    """Rows of several devices on that of the last one."""
    return torch.stack([row.to(rows[-1].device) for row in rows])


def _may_stop(checkpoint: "Checkpoint") -> bool:
    """Whether a forward may end early: accelerate moves weights out again only at its end."""
    return not any(p.is_meta for p in checkpoint.model.parameters())
