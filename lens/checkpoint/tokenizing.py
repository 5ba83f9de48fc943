"""Text to token ids and back, only by a tokenizer that was proved to be one."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lens.errors import PromptError, TokenizerError

_PROBES = ("Hello, world", "the", "a", "A", "0", "E V Q L", "。")
"""Texts of which a real tokenizer knows at least one; a character or protein model knows few."""

_NO_TOKENIZER = (
    "Text was given, but this checkpoint has no usable tokenizer. Pass token ids (a list of int), "
    "or load it again with tokenizer=…"
)


def load_tokenizer(folder: Path, *, d_vocab: int, **options: Any) -> tuple[Any, str | None]:
    """The tokenizer of a folder, or None with the reason why there is no usable one.

    It counts only if its files are there and it turns text into ids below `d_vocab`:
    AutoTokenizer makes up an empty one for a folder that holds none.
    """
    from transformers import AutoTokenizer

    if not any(folder.iterdir()):
        return None, "no tokenizer: the folder is empty"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except ImportError as error:
        return None, f"no tokenizer: a package that it needs is absent ({_first_line(error)})"
    # What it raises for a broken or absent file is not documented: OSError, ValueError, KeyError
    # and the bare Exception of the Rust library have been seen.
    except Exception as error:
        return None, f"no tokenizer: {_first_line(error)}"
    if not _files_of(tokenizer, folder):
        return None, "no tokenizer: its files are not in the folder"
    reason = why_unusable(tokenizer, d_vocab=d_vocab)
    return (tokenizer, None) if reason is None else (None, f"no tokenizer: {reason}")


def open_tokenizer(source: Any, *, d_vocab: int) -> Any:
    """A tokenizer that the caller gave: the object itself, its folder, or a WordPiece vocab.txt.

    Raises TokenizerError where it is none or its ids do not fit the embedding.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_dir():
            tokenizer, reason = load_tokenizer(path, d_vocab=d_vocab)
            if tokenizer is None:
                raise TokenizerError(f"{path} holds {reason}.")
            return tokenizer
        if path.suffix != ".txt" or not path.is_file():
            raise TokenizerError(
                f"tokenizer={str(source)!r} is neither a folder nor a vocab.txt that exists. Pass "
                "a folder with tokenizer.json, a WordPiece vocab.txt, or a tokenizer object."
            )
        source = _word_pieces(path)
    if not callable(source) or not hasattr(source, "decode"):
        raise TokenizerError(
            f"tokenizer= must be a Hugging Face tokenizer or a folder, not {type(source).__name__}."
        )
    reason = why_unusable(source, d_vocab=d_vocab)
    if reason is not None:
        raise TokenizerError(f"The given {type(source).__name__} does not fit this model: {reason}")
    return source


def why_unusable(tokenizer: Any, *, d_vocab: int) -> str | None:
    """None where it knows some plain text, and all its ids are below `d_vocab`; else the reason.

    >>> why_unusable(lambda text, **_: {"input_ids": []}, d_vocab=10)
    'it turns every text into no known token'
    """
    found = {i for probe in _PROBES for i in _ids_or_none(tokenizer, probe)}
    if not found - {getattr(tokenizer, "unk_token_id", None)}:
        return "it turns every text into no known token"
    if max(found) >= d_vocab:
        return f"it gives ids up to {max(found)}, the embedding has {d_vocab} rows"
    return None


def encode(tokenizer: Any, text: str, *, d_vocab: int) -> list[int]:
    """The ids of a text with the tokenizer's default special tokens and no chat template.

    Raises PromptError for an empty text, TokenizerError without a tokenizer, for a text of which
    it knows nothing, and for ids that the embedding does not have.
    """
    _require(tokenizer)
    _require_text(text)
    if not encode_bare(tokenizer, text):
        raise TokenizerError(
            f"{type(tokenizer).__name__} turns {text[:40]!r} into no tokens at all. Pass token ids."
        )
    return _in_range(_ids(tokenizer, text), tokenizer, d_vocab)


def encode_bare(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without special tokens. Raises TokenizerError without a tokenizer."""
    _require(tokenizer)
    return _ids(tokenizer, text, add_special_tokens=False)


def encode_target(tokenizer: Any, text: str, *, d_vocab: int) -> list[int]:
    """The ids of a decoder's text, by the target vocabulary where a tokenizer has two (Marian).

    Errors as in `encode`.
    """
    _require(tokenizer)
    _require_text(text)
    ids = _ids(tokenizer, text, role="text_target")
    if not ids:
        raise TokenizerError(
            f"{type(tokenizer).__name__} turns {text[:40]!r} into no tokens at all. Pass token ids."
        )
    return _in_range(ids, tokenizer, d_vocab)


def encode_messages(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """The ids of a conversation by the chat template, up to where the assistant would speak.

    Raises PromptError for messages without role and content, TokenizerError without a template.
    """
    _require(tokenizer)
    if not messages or not all(
        isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise PromptError(
            "Messages must be a non-empty list of mappings with role and content, as in "
            '[{"role": "user", "content": "Where is the Eiffel Tower?"}].'
        )
    if not getattr(tokenizer, "chat_template", None):
        raise TokenizerError(
            f"{type(tokenizer).__name__} has no chat template: this is no chat model, or the "
            "template was lost. Pass the conversation as plain text."
        )
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        raise PromptError(f"The chat template refuses these messages: {error}") from error
    return [int(i) for i in ids]


def ids_without_token(tokenizer: Any, *, d_vocab: int) -> tuple[int, ...]:
    """Vocabulary rows that no token of the tokenizer stands for; () without a tokenizer.

    >>> ids_without_token(None, d_vocab=3)
    ()
    """
    if tokenizer is None:
        return ()
    known = set(tokenizer.get_vocab().values())
    known |= set(getattr(tokenizer, "added_tokens_decoder", ()))
    return tuple(i for i in range(d_vocab) if i not in known)


def token_text(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text that each id adds when it follows other text; leading spaces are kept.

    A byte that is no character by itself is written as "<0xE2>", an id that the tokenizer does not
    have as "[id 151700]".

    >>> token_text(None, [7])
    {7: '[id 7]'}
    """
    wanted = [int(i) for i in dict.fromkeys(ids)]
    if tokenizer is None:
        return {i: _unnamed(i) for i in wanted}
    anchor = _anchor(tokenizer)
    whole = _decode(tokenizer, anchor)
    added: set[int] = set(getattr(tokenizer, "added_tokens_decoder", ()))
    return {i: _text_of(tokenizer, i, anchor, whole, added) for i in wanted}


def _text_of(tokenizer: Any, i: int, anchor: list[int], whole: str, added: set[int]) -> str:
    try:
        piece = tokenizer.convert_ids_to_tokens(i) if i >= 0 else None
    except (IndexError, KeyError, OverflowError):
        piece = None
    if not piece:
        return _unnamed(i)
    if i in added:
        return piece
    # Decoded alone, a SentencePiece token loses its leading space; after other text it keeps it.
    joined = _decode(tokenizer, [*anchor, i])
    text = joined[len(whole) :] if joined.startswith(whole) else _decode(tokenizer, [i])
    return _with_visible_bytes(piece, text) if "\ufffd" in text else text or piece


def _with_visible_bytes(piece: str, text: str) -> str:
    """`text` with each broken byte named, where the piece is written in GPT-2's byte alphabet."""
    if piece.startswith("<0x") and piece.endswith(">"):
        return piece
    if not all(c in _BYTE_OF for c in piece):
        return text
    raw, out, start = bytes(_BYTE_OF[c] for c in piece), [], 0
    while start < len(raw):
        for end in range(min(len(raw), start + 4), start, -1):
            try:
                out.append(raw[start:end].decode("utf-8"))
            except UnicodeDecodeError:
                continue
            start = end
            break
        else:
            out.append(f"<0x{raw[start]:02X}>")
            start += 1
    return "".join(out)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: its own character, or the next one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    stands_for = {chr(byte): byte for byte in printable}
    return stands_for | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _anchor(tokenizer: Any) -> list[int]:
    """Ids of a text that decodes to itself; empty where the tokenizer knows none."""
    for text in ("a", "A", "0", "the"):
        ids = _ids_or_none(tokenizer, text)
        if ids and _decode(tokenizer, ids).strip() == text:
            return ids
    return []


def _decode(tokenizer: Any, ids: list[int]) -> str:
    if not ids:
        return ""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _unnamed(i: int) -> str:
    return f"[id {i}]"


def _ids(tokenizer: Any, text: str, *, role: str = "text", **options: Any) -> list[int]:
    try:
        # verbose=False: a warning about the model's length is not ours to give here.
        return [int(i) for i in tokenizer(**{role: text}, verbose=False, **options)["input_ids"]]
    # The Rust library raises a bare Exception, as for a character that a list without [UNK] lacks.
    except Exception as error:
        raise TokenizerError(
            f"{type(tokenizer).__name__} cannot encode {text[:40]!r} ({_first_line(error)}). "
            "Leave out what it does not know, or pass token ids."
        ) from error


def _ids_or_none(tokenizer: Any, text: str) -> list[int]:
    """The bare ids of a text that a tokenizer may not know: none where it does not."""
    try:
        return _ids(tokenizer, text, add_special_tokens=False)
    except TokenizerError:
        return []


def _in_range(ids: list[int], tokenizer: Any, d_vocab: int) -> list[int]:
    wrong = sorted({i for i in ids if not 0 <= i < d_vocab})
    if wrong:
        raise TokenizerError(
            f"{type(tokenizer).__name__} gives ids {wrong[:5]}, the embedding has ids 0 to "
            f"{d_vocab - 1}. This tokenizer belongs to another model; pass the right tokenizer=."
        )
    return ids


def _require(tokenizer: Any) -> None:
    if tokenizer is None:
        raise TokenizerError(_NO_TOKENIZER)


def _require_text(text: str) -> None:
    if not text:
        raise PromptError(
            "The text is empty: there is no token to read. Pass at least a character."
        )


def _files_of(tokenizer: Any, folder: Path) -> list[str]:
    names = set(getattr(tokenizer, "vocab_files_names", {}).values())
    names |= {"tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.txt"}
    return [name for name in names if (folder / name).is_file()]


def _word_pieces(path: Path) -> Any:
    from transformers import BertTokenizer

    words = path.read_text(encoding="utf-8").split("\n")
    cased = any(w != w.lower() for w in words if not w.startswith("["))
    # vocab_file= is the old name: it gives a tokenizer that knows no word, and no error.
    return BertTokenizer(vocab=str(path), do_lower_case=not cased)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" :.")
