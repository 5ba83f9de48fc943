"""Documents as windows of token ids; a window never crosses the end of a document."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from lens.checkpoint.prompts import check_ids
from lens.corpus import Corpus, Document
from lens.errors import PromptError, SelectionError, TokenizerError

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

NO_TOKEN = -1
WINDOW_TOKENS = 256
"""Default length of a window; the model's context where that is shorter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Token ids that pass the model together, and what each position is scored against.

    `targets` is -1 where there is nothing to score. Positions from 1 to `n_read` - 1 count in
    means; position 0 is kept apart, and special tokens at the end are left out. `n_bytes` is the
    UTF-8 length of the text of the targets that count, 0 where the documents are token ids.
    """

    ids: Int[np.ndarray, " pos"]
    targets: Int[np.ndarray, " pos"]
    n_read: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of each document of a corpus, for one model."""

    by_document: tuple[tuple[Window, ...], ...]
    window_tokens: int

    @property
    def n_positions(self) -> list[int]:
        """How many positions of each document count in means."""
        return [sum(w.n_read - 1 for w in windows) for windows in self.by_document]


def default_window(checkpoint: "Checkpoint", *, most: int = WINDOW_TOKENS) -> int:
    """Tokens of a window where none are given: `most`, or the model's whole context if shorter."""
    return min(most, checkpoint.n_ctx or most)


def common_window(checkpoints: Iterable["Checkpoint"]) -> int:
    """The window that models are compared at where none is given: the shortest of their own."""
    return min(default_window(checkpoint) for checkpoint in checkpoints)


def windows_of(
    checkpoint: "Checkpoint", corpus: Corpus, *, window_tokens: int | None = None
) -> Windows:
    """Cut every document into windows, with the tokenizer's default special tokens in each.

    Raises PromptError for an encoder-decoder and where no document gives two tokens,
    SelectionError for a length that the model does not take, TokenizerError.
    """
    if checkpoint.seq2seq:
        raise PromptError(
            f"{type(checkpoint.model).__name__} is an encoder-decoder: a corpus has no source text "
            "for its encoder. Measure a causal or a masked model."
        )
    longest = checkpoint.n_ctx or WINDOW_TOKENS
    size = default_window(checkpoint) if window_tokens is None else window_tokens
    before, after = _special_tokens(checkpoint, corpus)
    shortest = len(before) + len(after) + 2
    if not shortest <= size <= (checkpoint.n_ctx or size):
        raise SelectionError(f"window_tokens is {size}; this model takes {shortest} to {longest}.")
    cut = [
        tuple(_windows(checkpoint, document, size, before, after)) for document in corpus.documents
    ]
    if not any(cut):
        raise PromptError(f"No document of {corpus.name!r} gives two tokens to read.")
    return Windows(by_document=tuple(cut), window_tokens=size)


def _special_tokens(checkpoint: "Checkpoint", corpus: Corpus) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text by default."""
    probe = next((d.text for d in corpus.documents if d.text), None)
    if probe is None:
        return [], []
    if checkpoint.tokenizer is None:
        raise TokenizerError(
            "The corpus holds texts, but this checkpoint has no usable tokenizer. Pass documents "
            "of token ids, or load it again with tokenizer=…"
        )
    bare, _ = _encoded(checkpoint.tokenizer, probe[:200])
    whole = [int(i) for i in checkpoint.tokenizer(probe[:200])["input_ids"]]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    raise TokenizerError(
        f"{type(checkpoint.tokenizer).__name__} changes a text's tokens when it adds its special "
        "ones, so windows cannot be cut. Pass documents of token ids."
    )


def _encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Ids without special tokens, and their places in the text where the tokenizer tells."""
    offsets = bool(getattr(tokenizer, "is_fast", False))
    more = {"return_offsets_mapping": True} if offsets else {}
    try:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, **more)
    # The Rust library raises the bare class for a character that it cannot spell.
    except Exception as error:
        raise TokenizerError(
            f"{type(tokenizer).__name__} cannot read {text[:40]!r}…: {error}. Leave such documents "
            "out, or pass token ids."
        ) from error
    ids = [int(i) for i in encoded["input_ids"]]
    return ids, [tuple(o) for o in encoded["offset_mapping"]] if offsets else None


def _windows(
    checkpoint: "Checkpoint", document: Document, size: int, before: list[int], after: list[int]
) -> Sequence[Window]:
    text = document.text
    if text is None:
        content, offsets = list(document.ids or ()), None
    else:
        content, offsets = _encoded(checkpoint.tokenizer, text)
    check_ids(content or [0], d_vocab=checkpoint.n_ids, n_ctx=None, truncate=False)
    step = size - len(before) - len(after)
    found = []
    for start, end in pairwise([*range(0, len(content), step), len(content)]):
        ids = np.array([*before, *content[start:end], *after], dtype=np.int64)
        n_read = len(ids) - len(after)
        if n_read < 2:
            continue
        # The place in the content of what each position is scored against.
        places = np.arange(len(ids)) - len(before) + start + (1 if checkpoint.causal else 0)
        inside = (places >= start) & (places < min(len(content), end + checkpoint.causal))
        inside[n_read:] = False
        targets = np.full(len(ids), NO_TOKEN, dtype=np.int64)
        targets[inside] = np.array(content, dtype=np.int64)[places[inside]]
        targets[targets >= checkpoint.d_vocab] = NO_TOKEN
        scored = places[1:][targets[1:] != NO_TOKEN]
        n_bytes = _bytes_between(text, offsets, scored)
        found.append(Window(ids=ids, targets=targets, n_read=n_read, n_bytes=n_bytes))
    return found


def _bytes_between(
    text: str | None, offsets: list[tuple[int, int]] | None, scored: np.ndarray
) -> int:
    """UTF-8 bytes from the first scored token's beginning to the last one's end."""
    if text is None or offsets is None or not len(scored):
        return 0
    # A byte-level token may begin inside a character; where the last one ends it is complete.
    begin = offsets[int(scored[0]) - 1][1] if scored[0] > 0 else 0
    return len(text[begin : offsets[int(scored[-1])][1]].encode("utf-8"))
