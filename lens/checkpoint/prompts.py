"""Prompts, as text, chat messages or token ids, to checked lists of ids."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch

from lens.checkpoint import tokenizing
from lens.errors import ContextLengthError, PromptError, SelectionError

Prompt = str | Sequence[int]


def to_ids(
    tokenizer: Any, prompt: Prompt, *, d_vocab: int, n_ctx: int | None, truncate: bool
) -> list[int]:
    """The token ids of one prompt: text by the tokenizer with its default special tokens.

    Raises PromptError for an empty prompt and ids out of range, ContextLengthError where it is
    longer than `n_ctx` and `truncate` is False (else its end is cut off), TokenizerError for text
    without a tokenizer.
    """
    if isinstance(prompt, str):
        ids = tokenizing.encode(tokenizer, prompt, d_vocab=d_vocab)
    else:
        ids = whole_ids(prompt)
    return check_ids(ids, d_vocab=d_vocab, n_ctx=n_ctx, truncate=truncate)


def whole_ids(prompt: Any) -> list[int]:
    """A list, array or tensor of token ids as ints. Raises PromptError for anything else."""
    try:
        return [index(i) for i in prompt]
    except TypeError:
        raise PromptError(
            f"A prompt is text or a list of token ids (whole numbers), not {str(prompt)[:60]!r}."
        ) from None


def check_ids(ids: list[int], *, d_vocab: int, n_ctx: int | None, truncate: bool) -> list[int]:
    """The same ids, where they can be read; errors as in `to_ids`."""
    if not ids:
        raise PromptError("The prompt is empty: no token to read. Pass at least one token.")
    wrong = [i for i in ids if not 0 <= i < d_vocab]
    if wrong:
        raise PromptError(
            f"Token ids {wrong[:5]} are out of range; this model's embedding has ids 0 to "
            f"{d_vocab - 1}. Check that the ids come from this model's tokenizer."
        )
    if n_ctx is not None and len(ids) > n_ctx:
        if truncate:
            return ids[:n_ctx]
        raise ContextLengthError(
            f"The prompt has {len(ids)} tokens, {len(ids) - n_ctx} more than the context of "
            f"{n_ctx}. Shorten it, or pass truncate=True (--truncate) to read the first {n_ctx}."
        )
    return ids


def unpadded(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The prompts in a tokenizer's output (input_ids, attention_mask, position_ids), padding off.

    Raises PromptError for padding on the left without position ids: a model with absolute
    positions would be off by the padding (3.4 logits on GPT-2), and nothing would say so. And for
    token_type_ids other than 0, as of a pair of sentences: a prompt here is one text.
    """
    if "input_ids" not in encoding:
        raise PromptError(f"Expected input_ids; this mapping holds {', '.join(encoding)}.")
    kinds = encoding.get("token_type_ids")
    if kinds is not None and any(map(_any_set, kinds)):
        raise PromptError(
            "The token_type_ids are not all 0: a pair of sentences would be read as one text, and "
            "as another input. Pass one text, or ids without token types that are all 0."
        )
    held = encoding["input_ids"]
    if not isinstance(held, torch.Tensor) and len({_length(row) for row in held}) > 1:
        # As a tokenizer gives several texts that it was not asked to pad.
        return [whole_ids(row) for row in held]
    ids = torch.atleast_2d(torch.as_tensor(held))
    mask = encoding.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else torch.atleast_2d(torch.as_tensor(mask))
    positions = encoding.get("position_ids")
    if positions is not None:
        positions = torch.atleast_2d(torch.as_tensor(positions)).expand(ids.shape)
    if mask.shape != ids.shape:
        raise PromptError(
            f"The attention mask has shape {tuple(mask.shape)}, the ids {tuple(ids.shape)}."
        )
    prompts = []
    for row in range(len(ids)):
        real = mask[row].bool()
        first_pad = int(real.sum())
        if not bool(real[:first_pad].all()):
            if positions is None:
                raise PromptError(
                    f"Prompt {row} has padding before or between its tokens and no position ids. "
                    'Pad on the right (tokenizer.padding_side = "right"), pass position_ids, or '
                    "pass the texts: they are padded here."
                )
            if positions[row][real].tolist() != list(range(first_pad)):
                raise PromptError(
                    f"The position ids of prompt {row} do not count its tokens from 0: "
                    f"{positions[row][real].tolist()[:8]}. Only such positions can be read."
                )
        prompts.append(ids[row][real].tolist())
    return prompts


def _any_set(kinds: Any) -> bool:
    return bool(torch.as_tensor(kinds).any())


def _length(row: Any) -> int:
    """Tokens of a row; -1 for one that is a token itself."""
    return len(row) if hasattr(row, "__len__") else -1


def resolve(wanted: Sequence[int] | None, count: int, what: str) -> list[int]:
    """Indices 0 .. count-1 in the order asked for; negatives count from the end; None: all.

    Raises SelectionError for an index that does not exist or stands twice.
    """
    if wanted is None:
        return list(range(count))
    try:
        wanted = [_place(i) for i in wanted]
    except TypeError:
        raise SelectionError(
            f"{what.capitalize()}s are a list of whole numbers, not {str(wanted)[:60]!r}."
        ) from None
    wrong = [i for i in wanted if not -count <= i < count]
    if wrong or not len(wanted):
        raise SelectionError(
            f"There is no {what} {', '.join(map(str, wrong)) or 'in an empty list'}; this model or "
            f"prompt has {what}s 0 to {count - 1} (-1 is the last)."
        )
    chosen = [i % count for i in wanted]
    if len(set(chosen)) < len(chosen):
        raise SelectionError(f"A {what} was asked for twice: {list(wanted)}.")
    return chosen


def _place(value: Any) -> int:
    # True and False would count as 1 and 0: a mask is not a list of places.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError("a mask")
    return index(value)


def resolve_sets(
    tokenizer: Any, targets: dict[str, Sequence[str | int]] | None, *, d_vocab: int
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Names and token ids of target sets; each text must be one token.

    Raises SelectionError for a text of several tokens (which are listed) and ids out of range.
    """
    names, sets = [], []
    for name, members in (targets or {}).items():
        if isinstance(members, str) or not hasattr(members, "__len__") or not len(members):
            raise SelectionError(
                f'Target set {name!r} must be a list of tokens, as in {{"{name}": [" Paris"]}}.'
            )
        ids = [_single_token(tokenizer, m) if isinstance(m, str) else _id(m, name) for m in members]
        wrong = [i for i in ids if not 0 <= i < d_vocab]
        if wrong:
            raise SelectionError(
                f"Target set {name!r} holds ids {wrong}; the vocabulary is 0 to {d_vocab - 1}."
            )
        names.append(name)
        sets.append(tuple(dict.fromkeys(ids)))
    return tuple(names), tuple(sets)


def _id(member: Any, name: str) -> int:
    try:
        return index(member)
    except TypeError:
        raise SelectionError(
            f"Target set {name!r} holds {member!r}, which is neither text nor a token id."
        ) from None


def _single_token(tokenizer: Any, text: str) -> int:
    ids = tokenizing.encode_bare(tokenizer, text)
    if len(ids) != 1:
        pieces = list(tokenizing.token_text(tokenizer, ids).values())
        raise SelectionError(
            f"The target {text!r} is {len(ids)} tokens here: {pieces}. A target is one token: take "
            "the first piece (mind the leading space), or pass an id."
        )
    return ids[0]


def decoder_ids(
    tokenizer: Any, prompt: Prompt, *, config: Any, n_ids: int, n_ctx: int | None, truncate: bool
) -> list[int]:
    """Ids of an encoder-decoder's decoder: its start token, then the target text as the model
    was trained on it; ids given as ids are taken as they are.

    Errors as in `to_ids`.
    """
    if not isinstance(prompt, str):
        return check_ids(whole_ids(prompt), d_vocab=n_ids, n_ctx=n_ctx, truncate=truncate)
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    if start is None:
        raise PromptError(
            "The config names no decoder_start_token_id, so target text has no first token. Pass "
            "the decoder's ids as a list."
        )
    ids = [int(start), *tokenizing.encode_target(tokenizer, prompt, d_vocab=n_ids)]
    return check_ids(ids, d_vocab=n_ids, n_ctx=n_ctx, truncate=truncate)


def no_encoder(model: Any) -> SelectionError:
    """The error for a source where nothing reads one."""
    return SelectionError(f"{type(model).__name__} has no encoder: leave `source` out.")


def source_ids(
    tokenizer: Any, source: Prompt | None, *, n_ids: int, n_ctx: int | None = None
) -> list[int]:
    """Ids for the encoder.

    Raises PromptError where the source is missing or out of range, ContextLengthError where it is
    longer than the encoder's `n_ctx`.
    """
    if source is None:
        raise PromptError(
            "This model is an encoder-decoder: the prompt goes to its decoder, and its encoder "
            'needs a text of its own. Pass source="…" (--source).'
        )
    ids = to_ids(tokenizer, source, d_vocab=n_ids, n_ctx=None, truncate=False)
    if n_ctx is not None and len(ids) > n_ctx:
        raise ContextLengthError(
            f"The source has {len(ids)} tokens, {len(ids) - n_ctx} more than the {n_ctx} that the "
            "encoder takes. Shorten it."
        )
    return ids
