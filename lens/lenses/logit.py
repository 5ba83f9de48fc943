"""The logit lens: residual states through the model's own readout (W_U), or through W_E.

Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lens.checkpoint import tokenizing
from lens.checkpoint.adapters import added_by_adapters
from lens.checkpoint.checkpoint import LAYER_CONVENTION
from lens.checkpoint.greedy import greedy_target
from lens.checkpoint.inputs import Inputs
from lens.checkpoint.layer_numbers import Layer, is_mid, resolve_layers
from lens.checkpoint.prompts import no_encoder, resolve, resolve_sets, unpadded, whole_ids
from lens.checkpoint.readout import DirectReadout, Readout
from lens.errors import (
    PromptError,
    SelectionError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)
from lens.lenses.predictions import NO_TOKEN, LayerPredictions, Provenance
from lens.lenses.projection import Projection, project

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


def logit_lens(
    checkpoint: "Checkpoint",
    prompt: Any = None,
    *,
    layers: Sequence[Layer | str] | None = None,
    points: str = "post",
    positions: Sequence[int] | None = None,
    top_k: int = 5,
    lens: str = "output",
    targets: Mapping[str, Sequence[str | int]] | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
    source: str | Sequence[int] | None = None,
    truncate: bool = False,
) -> LayerPredictions | list[LayerPredictions]:
    """What each layer predicts at each position of a prompt (or of each prompt of a list).

    `prompt` is text, token ids, a list of either, or a tokenizer's output (input_ids,
    attention_mask); `messages` instead go through the chat
    template. `layers` (0 .. n_layers) and `positions` may count from the end; `points` "mid"
    reads between attention and MLP (layers 0.5, 1.5, ...), "all" there too. `lens` "output"
    reads through W_U, "input" through W_E. `targets` names sets of tokens, {"right": [" Paris"]},
    whose probability each layer reports. `source` feeds the encoder of an encoder-decoder.

    Numbers are bits; the last layer's row is the model's own prediction. Raises PromptError,
    ContextLengthError, SelectionError, TokenizerError.
    """
    if source is not None and not checkpoint.seq2seq:
        raise no_encoder(checkpoint.model)
    if prompt is None and messages is None and source is not None:
        prompt = greedy_target(checkpoint, source)
    batch, alone = _prompts(checkpoint, prompt, messages, truncate=truncate)
    rows = resolve_layers(layers, checkpoint.n_layers, points=points)
    columns = [resolve(positions, len(ids), "position") for ids in batch]
    if not 1 <= top_k <= checkpoint.d_vocab:
        raise SelectionError(f"top_k is {top_k}; expected 1 to {checkpoint.d_vocab}.")
    names, sets = resolve_sets(
        checkpoint.tokenizer, dict(targets or {}), d_vocab=checkpoint.d_vocab
    )
    padding = (checkpoint.padding_rows,) if checkpoint.padding_rows else ()
    inputs = checkpoint.inputs_of(batch, source=source)
    states = checkpoint.capture(inputs, layers=sorted({*rows, checkpoint.n_layers}))
    # After the states: a length at which the model adds rows is learnt on first reading.
    readout = readout_of(checkpoint, lens)
    asked = columns
    if getattr(checkpoint.readout, "whole_prompts", False):
        columns = [list(range(len(ids))) for ids in batch]
    results = []
    for index, ids in enumerate(batch):
        at = torch.tensor(columns[index])
        final = states[checkpoint.n_layers][index, at]
        stacked = torch.stack([states[layer][index, at].to(final.device) for layer in rows])
        own, target = _own_and_target(checkpoint, ids)
        projection = project(
            readout,
            stacked,
            final_states=final,
            final_readout=checkpoint.readout,
            input_ids=own[at],
            target_ids=target[at],
            sets=(*sets, *padding),
            top_k=top_k,
            replay_inputs=_whole_row(checkpoint, inputs, index, ids, columns[index]),
            once_cells=checkpoint.d_vocab * len(rows) * sum(map(len, columns)),
        )
        results.append(
            _predictions(
                checkpoint,
                lens,
                projection,
                ids=ids,
                rows=rows,
                columns=columns[index],
                target=target[at],
                names=names,
                sets=sets,
            )
        )
    if columns is not asked:
        # Some tails read all positions together or none.
        results = [one.select(positions=at) for one, at in zip(results, asked, strict=True)]
    return results[0] if alone else results


def readout_of(checkpoint: "Checkpoint", lens: str) -> Readout:
    """The readout of a lens: the proved one, or the same with W_E in place of W_U.

    Raises UnsupportedArchitectureError where the matrix cannot be exchanged.
    """
    if lens == "output":
        return checkpoint.readout
    if lens != "input":
        raise SelectionError(
            f'There is no {lens!r} lens; there are "output" (W_U) and "input" (W_E).'
        )
    if not isinstance(checkpoint.readout, DirectReadout):
        raise UnsupportedArchitectureError(
            f"The input lens needs a direct readout, and this one is {checkpoint.readout.kind}: "
            f'{checkpoint.summary().why_not_direct}. Use lens="output".'
        )
    if added_by_adapters(checkpoint.model, "input") is not None:
        raise UnsupportedModelStateError(
            "An adapter acts on the lookup, so that W_E is not the matrix in use and the input "
            "lens would not read what the model looks up. Merge it (merge_and_unload), or use "
            'lens="output".'
        )
    if checkpoint.tie.is_tied:
        return checkpoint.readout
    return checkpoint.readout.through(checkpoint.W_E.detach())


def provenance(checkpoint: "Checkpoint", lens: str) -> Provenance:
    """Where a reading of this checkpoint comes from."""
    notes = checkpoint.origin.notes
    if lens == "input" and checkpoint.tie.is_tied:
        notes = (*notes, "W_E is W_U here: the input lens and the output lens are the same")
    if not checkpoint.trunk.linked:
        first = f"layer 0 enters {checkpoint.trunk.container}.0, which need not be the embedding"
        notes = (*notes, f"the state changes between blocks: layer l is block l's output, {first}")
    if checkpoint.trunk.layout.adds_rows:
        notes = (*notes, f"the state of the blocks: {checkpoint.trunk.layout}")
    if checkpoint.trunk.layout.n_streams > 1:
        streams = checkpoint.trunk.layout.n_streams
        notes = (*notes, f"a state holds {streams} streams side by side; the readout merges them")
    return Provenance(
        model_id=checkpoint.origin.model_id,
        revision=checkpoint.origin.revision,
        model_class=type(checkpoint.model).__name__,
        model_hash=checkpoint.model_hash,
        tie=checkpoint.tie.verdict,
        lens=lens,
        readout=checkpoint.readout.kind,
        target=checkpoint.target,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        n_layers=checkpoint.n_layers,
        d_model=checkpoint.d_model,
        d_vocab=checkpoint.d_vocab,
        layer_convention=LAYER_CONVENTION,
        versions={name: version(name) for name in ("tied-lens", "torch", "transformers")},
        notes=notes,
    )


def _with_notes(source: Provenance, checkpoint: "Checkpoint", rows: list[Layer]) -> Provenance:
    """What a reader of these rows must know beside the layer convention."""
    notes = source.notes
    if any(map(is_mid, rows)):
        notes = (*notes, "layer l + 0.5 is resid_mid of block l, between its attention and its MLP")
    if checkpoint.padding_rows:
        count = f"{len(checkpoint.padding_rows):,} of {checkpoint.d_vocab:,} vocabulary rows"
        notes = (*notes, f"{count} stand for no token; padding_mass is the probability they get")
    return dataclasses.replace(source, notes=notes)


def _prompts(
    checkpoint: "Checkpoint", prompt: Any, messages: Any, *, truncate: bool
) -> tuple[list[list[int]], bool]:
    """Checked ids of every prompt, and whether a single one was given."""
    if (prompt is None) == (messages is None):
        raise PromptError("Pass one of: a prompt, or messages for the chat template.")
    if messages is not None:
        ids = tokenizing.encode_messages(checkpoint.tokenizer, messages)
        return [checkpoint.ids_of(ids, truncate=truncate)], True
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        rows = unpadded(prompt)
        return [checkpoint.ids_of(one, truncate=truncate) for one in rows], False
    if not isinstance(prompt, Sequence):
        raise PromptError(f"A prompt is text or a list of token ids, not {prompt!r}.")
    several = not isinstance(prompt, str) and any(isinstance(p, Iterable) for p in prompt)
    prompts = prompt if several else [prompt]
    given = [one if isinstance(one, str) else whole_ids(one) for one in prompts]
    return [checkpoint.ids_of(one, truncate=truncate) for one in given], not several


def _own_and_target(checkpoint: "Checkpoint", ids: list[int]) -> tuple[Tensor, Tensor]:
    """The token that stands at each position, and the one it is scored against; -1 for none."""
    own = torch.tensor(ids)
    if checkpoint.causal:
        target = torch.cat([own[1:], torch.tensor([NO_TOKEN])])
    else:
        target = own.clone()
        mask = getattr(checkpoint.tokenizer, "mask_token_id", None)
        if mask is not None:
            own = torch.where(own == mask, NO_TOKEN, own)
    for token in (own, target):
        token[token >= checkpoint.d_vocab] = NO_TOKEN
    return own, target


def _whole_row(
    checkpoint: "Checkpoint", inputs: Inputs, index: int, ids: list[int], columns: list[int]
) -> Inputs | None:
    """The prompt's own inputs, where all of its positions are read in order."""
    if columns != list(range(len(ids))):
        return None
    return inputs.row(index, len(ids))


def _predictions(
    checkpoint: "Checkpoint",
    lens: str,
    projection: Projection,
    *,
    ids: list[int],
    rows: list[Layer],
    columns: list[int],
    target: Tensor,
    names: tuple[str, ...],
    sets: tuple[tuple[int, ...], ...],
) -> LayerPredictions:
    occurring = {*ids, *projection.top_ids.ravel().tolist(), *projection.final_top_ids.tolist()}
    occurring.update(*sets, target.tolist())
    occurring.discard(NO_TOKEN)
    shared = {
        field.name: getattr(projection, field.name)
        for field in dataclasses.fields(LayerPredictions)
        if hasattr(projection, field.name)
    }
    logprobs, padding = projection.set_logprob_bits, None
    if checkpoint.padding_rows:
        # They were read as one set more, behind those that were asked for.
        assert logprobs is not None
        logprobs, padding = (logprobs[:-1] if sets else None), np.exp2(logprobs[-1])
    return LayerPredictions(
        **{**shared, "set_logprob_bits": logprobs},
        padding_mass=padding,
        input_ids=np.array(ids, dtype=np.int64),
        positions=np.array(columns, dtype=np.int64),
        layers=np.array(rows, dtype=np.float64 if any(map(is_mid, rows)) else np.int64),
        target_ids=target.numpy(),
        vocabulary=tokenizing.token_text(checkpoint.tokenizer, sorted(occurring)),
        provenance=_with_notes(provenance(checkpoint, lens), checkpoint, rows),
        set_names=names,
        set_ids=sets,
    )
