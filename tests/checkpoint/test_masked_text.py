"""A masked language model read from text with its own WordPiece tokenizer and a real [MASK]."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

import lens
from lens.checkpoint.checkpoint import Checkpoint
from tests.checkpoint.tiny import BY_NAME, D_VOCAB

TEXT = "Paris is the [MASK] of France."
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("paris", "is", "the", "capital", "of", "france", ".", "fr", "##an", "##ce", "a", "0")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """BERT's own: lower case, word pieces, [CLS] and [SEP] around a text."""
    words = [*SPECIAL, *WORDS]
    words += [f"##{i}" for i in range(D_VOCAB - len(words))]
    inner = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad", "unk", "cls", "sep", "mask")
    return transformers.BertTokenizerFast(
        tokenizer_object=inner,
        **{f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)},
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("bert")
    BY_NAME["bert"].build().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return lens.load(folder)


def test_a_masked_text_is_read_from_a_folder(bert: Checkpoint) -> None:
    predictions = bert.logit_lens(TEXT)
    assert bert.target == "same"
    assert predictions.tokens == (
        "[CLS]", " paris", " is", " the", "[MASK]", " of", " france", ".", "[SEP]",
    )  # fmt: skip
    assert predictions.input_ids.tolist() == [2, 5, 6, 7, 4, 9, 10, 11, 3]
    # The target of a position is the token that stands at it.
    assert predictions.target_ids.tolist() == predictions.input_ids.tolist()


def test_the_last_row_is_what_the_model_fills_in(bert: Checkpoint) -> None:
    predictions = bert.logit_lens(TEXT, targets={"capital": ["capital"]})
    encoding = bert.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        truth = bert.model(**encoding).logits[0, 4].double().log_softmax(-1) / np.log(2)
    np.testing.assert_allclose(predictions.top_logprob_bits[-1, 4], truth.topk(5).values, atol=5e-5)
    assert predictions.top_ids[-1, 4].tolist() == truth.topk(5).indices.tolist()
    assert predictions.set_probability("capital")[-1, 4] == pytest.approx(
        float(truth[8].exp2()), rel=1e-4
    )


def test_self_copy_is_of_the_tokens_that_are_not_masked(bert: Checkpoint) -> None:
    predictions = bert.logit_lens(TEXT)
    masked = predictions.input_ids == bert.tokenizer.mask_token_id
    assert masked.tolist() == [i == 4 for i in range(9)]
    assert np.isnan(predictions.self_copy_mass[:, masked]).all()
    assert np.isfinite(predictions.self_copy_mass[:, ~masked]).all()
    assert not predictions.ruled_by_self_copy.any()
    # A text without a mask has it everywhere.
    plain = bert.logit_lens("Paris is the capital of France.")
    assert np.isfinite(plain.self_copy_mass).all()


def test_the_mask_is_shown_by_its_name_and_padding_rows_are_none(bert: Checkpoint) -> None:
    assert bert.padding_rows == ()
    predictions = bert.logit_lens(TEXT)
    assert predictions.padding_mass is None
    assert "[MASK]" in str(predictions.heatmap().layout.xaxis.ticktext)
