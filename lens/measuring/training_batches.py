"""A corpus as a model is trained on it: inputs, and the token that each position is scored on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lens.checkpoint import prompts
from lens.checkpoint.inputs import Inputs, pad_right
from lens.corpus import read_corpus
from lens.errors import PromptError, SelectionError
from lens.measuring.windows import windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

IGNORED = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """One batch; `targets` are -1 where nothing is scored, `own_ids` the tokens that occur."""

    inputs: Inputs
    targets: Int[Tensor, "batch pos"]
    own_ids: Int[np.ndarray, " token"]


@dataclass(frozen=True, eq=False)
class _Example:
    ids: list[int]
    targets: list[int]
    own: list[int]
    source: list[int] | None = None

    @property
    def n_targets(self) -> int:
        return sum(t != IGNORED for t in self.targets)


def training_batches(
    checkpoint: "Checkpoint",
    corpus: Any,
    *,
    batch_size: int,
    window_tokens: int | None,
    max_targets: int,
    masked_share: float,
    mask_id: int | None,
    seed: int,
) -> list[TrainingBatch]:
    """Batches in a seeded order, until `max_targets` positions are scored.

    Raises PromptError where nothing is left to score, SelectionError, TokenizerError.
    """
    if batch_size < 1 or max_targets < 1 or not 0 < masked_share <= 1:
        raise SelectionError(
            f"batch_size {batch_size}, max_targets {max_targets}, masked_share {masked_share}: "
            "expected 1 or more, 1 or more, and a share above 0."
        )
    generator = np.random.default_rng(seed)
    if checkpoint.seq2seq:
        examples = list(_pairs(checkpoint, corpus))
    else:
        examples = list(_windows(checkpoint, corpus, window_tokens))
        if not checkpoint.causal:
            mask = _mask_id(checkpoint, mask_id)
            examples = [_masked(e, mask, masked_share, generator) for e in examples]
    chosen, count = [], 0
    for place in generator.permutation(len(examples)):
        if count >= max_targets:
            break
        chosen.append(examples[place])
        count += examples[place].n_targets
    if count == 0:
        raise PromptError("The corpus leaves no position to score.")
    return [
        _batch(checkpoint, chosen[start : start + batch_size])
        for start in range(0, len(chosen), batch_size)
    ]


def _windows(
    checkpoint: "Checkpoint", corpus: Any, window_tokens: int | None
) -> Iterator[_Example]:
    windows = windows_of(checkpoint, read_corpus(corpus), window_tokens=window_tokens)
    for document in windows.by_document:
        for window in document:
            ids = window.ids.tolist()
            yield _Example(ids, window.targets.tolist(), ids)


def _pairs(checkpoint: "Checkpoint", corpus: Any) -> Iterator[_Example]:
    """(source, target) pairs; the decoder sees the target shifted by its start token."""
    if isinstance(corpus, str) or not isinstance(corpus, Sequence):
        raise PromptError(
            f"{type(checkpoint.model).__name__} is an encoder-decoder: pass a list of (source, "
            "target) pairs of texts or token ids."
        )
    for source, target in corpus:
        ids = checkpoint.ids_of(target)
        read = prompts.source_ids(
            checkpoint.tokenizer,
            source,
            n_ids=checkpoint.n_ids,
            n_ctx=checkpoint.source_n_ctx,
        )
        yield _Example(ids[:-1], ids[1:], [*ids, *read], read)


def _mask_id(checkpoint: "Checkpoint", mask_id: int | None) -> int:
    found = getattr(checkpoint.tokenizer, "mask_token_id", None) if mask_id is None else mask_id
    if found is None or not 0 <= found < checkpoint.n_ids:
        raise SelectionError(
            f"mask_id is {found}; a masked model is scored where a mask stands. Pass the id of its "
            f"mask token, below {checkpoint.n_ids}."
        )
    return int(found)


def _masked(example: _Example, mask: int, share: float, generator: np.random.Generator) -> _Example:
    """A mask in place of some tokens, which alone are scored; at least one."""
    places = [i for i, target in enumerate(example.targets) if target != IGNORED]
    count = max(1, round(share * len(places)))
    hidden = set(generator.choice(places, size=min(count, len(places)), replace=False).tolist())
    ids = [mask if i in hidden else token for i, token in enumerate(example.ids)]
    targets = [t if i in hidden else IGNORED for i, t in enumerate(example.targets)]
    return _Example(ids, targets, example.own)


def _batch(checkpoint: "Checkpoint", examples: list[_Example]) -> TrainingBatch:
    pad = getattr(checkpoint.model.config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < checkpoint.n_ids else 0
    device = checkpoint.device
    inputs = pad_right([e.ids for e in examples], pad_id=pad, device=device)
    targets = torch.full(inputs.ids.shape, IGNORED)
    for row, example in enumerate(examples):
        targets[row, : len(example.ids)] = torch.tensor(example.targets)
    if checkpoint.seq2seq:
        sources = pad_right([e.source or [] for e in examples], pad_id=pad, device=device)
        inputs = Inputs(
            ids=inputs.ids, mask=inputs.mask, source_ids=sources.ids, source_mask=sources.mask
        )
    own = np.concatenate([np.array(e.own, dtype=np.int64) for e in examples])
    return TrainingBatch(inputs=inputs, targets=targets, own_ids=own)
