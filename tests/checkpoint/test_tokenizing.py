"""Text to ids only by a tokenizer that is one; ids to text with every byte and space visible."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lens.checkpoint import tokenizing
from lens.errors import PromptError, TokenizerError
from tests.checkpoint import tiny_checkpoints as tiny


def _byte_level(text: str) -> Any:
    """A byte-level tokenizer that knows each byte, GPT-2's way, and nothing longer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _sentence_piece() -> Any:
    """Pieces with a leading mark for the space, and bytes for what it does not know (Llama)."""
    pieces = {"<unk>": 0, "▁a": 1, "▁Paris": 2, "Paris": 3, "▁▁": 4, "<0x0A>": 5, "<0xE2>": 6}
    pieces |= {"▁": 7, "a": 8}
    backend = Tokenizer(
        models.BPE(vocab=pieces, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_text_becomes_ids_without_and_with_special_tokens() -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizing.encode(tokenizer, "ab c", d_vocab=40) == [3, 4, 2, 5]
    assert tokenizing.encode_bare(tokenizer, " b") == [2, 4]
    assert tokenizing.encode_target(tokenizer, "ab", d_vocab=40) == [3, 4]


def test_a_bos_that_the_tokenizer_adds_is_kept_in_a_prompt_alone() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert tokenizing.encode(tokenizer, "ab", d_vocab=40) == [1, 3, 4]
    assert tokenizing.encode_bare(tokenizer, "ab") == [3, 4]


@pytest.mark.parametrize("encode", [tokenizing.encode, tokenizing.encode_target])
def test_text_that_cannot_be_read_is_refused(encode: Any) -> None:
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        encode(None, "ab", d_vocab=40)
    with pytest.raises(PromptError, match="empty"):
        encode(tiny.tokenizer(), "", d_vocab=40)
    with pytest.raises(TokenizerError, match="another model"):
        encode(tiny.tokenizer(), "abz", d_vocab=10)


def test_a_tokenizer_that_gives_no_ids_is_unusable() -> None:
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    assert "no known token" in str(tokenizing.why_unusable(empty, d_vocab=40))
    assert tokenizing.why_unusable(tiny.tokenizer(), d_vocab=40) is None
    assert "3 rows" in str(tokenizing.why_unusable(tiny.tokenizer(), d_vocab=3))
    with pytest.raises(TokenizerError, match="no tokens at all"):
        tokenizing.encode(empty, "ab", d_vocab=40)


def test_a_tokenizer_that_knows_no_word_is_unusable(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    unknowing = BertTokenizer()  # without a vocabulary every word is [UNK]
    assert "no known token" in str(tokenizing.why_unusable(unknowing, d_vocab=40))
    with pytest.raises(TokenizerError, match="does not fit"):
        tokenizing.open_tokenizer(unknowing, d_vocab=40)


def test_an_empty_tokenizer_made_up_for_a_folder_does_not_count(models_folder: Path) -> None:
    tokenizer, reason = tokenizing.load_tokenizer(models_folder / "rwkv4-tiny", d_vocab=256)
    assert tokenizer is None
    assert "its files are not in the folder" in str(reason)
    assert tokenizing.load_tokenizer(models_folder / "core-charlm", d_vocab=102)[1] is None


def test_a_character_that_no_token_stands_for_is_an_error(models_folder: Path) -> None:
    tokenizer, _ = tokenizing.load_tokenizer(models_folder / "core-charlm", d_vocab=102)
    assert len(tokenizing.encode(tokenizer, "the cat", d_vocab=102)) == 7
    with pytest.raises(TokenizerError, match="cannot encode"):
        tokenizing.encode(tokenizer, "the 猫", d_vocab=102)


def test_a_damaged_tokenizer_file_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    assert tokenizing.load_tokenizer(tmp_path, d_vocab=40)[1] is None
    (tmp_path / "tokenizer.json").write_text('{"model": ', encoding="utf-8")
    tokenizer, reason = tokenizing.load_tokenizer(tmp_path, d_vocab=40)
    assert tokenizer is None
    assert reason


def test_a_word_piece_list_keeps_case_where_it_has_it(tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cased, lower = tmp_path / "cased.txt", tmp_path / "lower.txt"
    cased.write_text("\n".join([*special, "E", "V"]), encoding="utf-8")
    lower.write_text("\n".join([*special, "e", "the", "##re"]), encoding="utf-8")
    assert tokenizing.open_tokenizer(cased, d_vocab=7)("E V")["input_ids"] == [2, 5, 6, 3]
    assert tokenizing.open_tokenizer(lower, d_vocab=8)("There")["input_ids"] == [2, 6, 7, 3]
    with pytest.raises(TokenizerError, match="must be a Hugging Face tokenizer"):
        tokenizing.open_tokenizer(3, d_vocab=7)


def test_amino_acids_are_read_by_the_list_beside_the_model(antiberty_path: Path) -> None:
    tokenizer = tokenizing.open_tokenizer(antiberty_path.parent / "vocab.txt", d_vocab=25)
    ids = tokenizing.encode(tokenizer, "E V Q L", d_vocab=25)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "E", "V", "Q", "L", "[SEP]"]
    assert list(tokenizing.token_text(tokenizer, ids[1:-1]).values()) == [" E", " V", " Q", " L"]


@pytest.mark.parametrize("text", ["a b\n", "é", "魑", "😀", "\ufffd", "\x00\t"])
def test_the_bytes_of_a_text_can_be_told_from_its_tokens(text: str) -> None:
    tokenizer = _byte_level(text)
    ids = tokenizing.encode(tokenizer, text, d_vocab=256)
    texts = tokenizing.token_text(tokenizer, ids)
    told = b"".join(
        bytes([int(texts[i][3:5], 16)]) if texts[i].startswith("<0x") else texts[i].encode()
        for i in ids
    )
    assert told == text.encode()


def test_a_sentence_piece_keeps_its_space_and_its_bytes() -> None:
    texts = tokenizing.token_text(_sentence_piece(), [2, 3, 4, 5, 6, 0])
    assert texts == {2: " Paris", 3: "Paris", 4: "  ", 5: "\n", 6: "<0xE2>", 0: "<unk>"}


def test_an_id_that_the_tokenizer_lacks_is_named() -> None:
    texts = tokenizing.token_text(tiny.tokenizer(), [39, 3, 3, -1, 10**12])
    assert texts == {39: "[id 39]", 3: "a", -1: "[id -1]", 10**12: f"[id {10**12}]"}
    assert tokenizing.token_text(None, [5]) == {5: "[id 5]"}


def test_messages_go_through_the_chat_template_up_to_the_answer() -> None:
    tokenizer = tiny.tokenizer()
    messages = [{"role": "user", "content": "ab"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizing.encode_messages(tokenizer, messages)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} z{% endif %}"
    )
    assert tokenizing.encode_messages(tokenizer, messages) == [3, 4, 2, 28]
    with pytest.raises(PromptError, match="no tools"):
        tokenizing.encode_messages(tokenizer, [{"role": "tool", "content": "ab"}])
    for wrong in ([], [{"role": "user"}], ["ab"]):
        with pytest.raises(PromptError, match="role and content"):
            tokenizing.encode_messages(tokenizer, wrong)
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        tokenizing.encode_messages(None, messages)
