"""More rows than tokens, fewer after a resize, tokens added: every id is shown, none is made up."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import lens
from lens.errors import PromptError, UnsupportedArchitectureError
from lens.lenses import projection
from tests.checkpoint.tiny import BY_NAME, D_VOCAB

N_TOKENS = 150
TEXT = "w5 w6 w7"


def _tokenizer(*, specials: str = "", n_tokens: int = N_TOKENS) -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        word: 100 + i for i, word in enumerate(("a", "A", "0", "the"))
    }
    words |= {f"w{i}": i for i in range(3, n_tokens) if not 100 <= i < 104}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    if specials:
        inner.post_processor = TemplateProcessing(
            single=f"{specials} $A", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")


def _model(name: str = "llama", **options: Any) -> Any:
    return lens.load(BY_NAME[name].build(), tokenizer=_tokenizer(**options))


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_masked_rows_get_nothing_and_the_rest_is_renormalised(name: str) -> None:
    point = _model(name)
    assert point.padding_rows == tuple(range(N_TOKENS, D_VOCAB))
    masked = point.logit_lens(TEXT, mask_padding_rows=True)
    logits = point.readout.logits(point.residual_states(TEXT).states).double()
    logits[..., N_TOKENS:] = -torch.inf
    expected = logits.log_softmax(-1) / np.log(2)
    assert masked.top_ids.max() < N_TOKENS
    np.testing.assert_allclose(masked.top_logprob_bits, expected.topk(5).values, atol=5e-5)
    final, lensed = expected[-1].exp2(), expected[..., :N_TOKENS]
    kl = (final[..., :N_TOKENS] * (expected[-1][..., :N_TOKENS] - lensed)).sum(-1)
    np.testing.assert_allclose(masked.kl_bits, kl, atol=5e-5)
    assert any("10 vocabulary rows" in note for note in masked.provenance.notes)


def test_the_mass_on_rows_of_no_token_is_reported_as_a_set() -> None:
    point = _model()
    plain = point.logit_lens(TEXT, targets={"padding": point.padding_rows})
    logits = point.readout.logits(point.residual_states(TEXT).states).double()
    mass = logits.softmax(-1)[..., N_TOKENS:].sum(-1)
    assert plain.set_names == ("padding",)
    got = 2 ** np.asarray(plain.set_logprob_bits[0], dtype=np.float64)
    np.testing.assert_allclose(got, mass, rtol=1e-4)
    assert mass.max() > 0.01
    gone = point.logit_lens(TEXT, targets={"padding": point.padding_rows}, mask_padding_rows=True)
    assert np.isneginf(gone.set_logprob_bits).all()


@pytest.mark.parametrize("tokens_at_once", [1024, 3])
def test_the_mass_on_rows_of_no_token_is_told_without_being_asked_for(
    tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "SET_TOKENS", tokens_at_once)
    point = _model()
    found = point.logit_lens(TEXT, targets={"seven": [7]})
    mass = point.readout.logits(point.residual_states(TEXT).states).double().softmax(-1)
    assert found.padding_mass is not None
    np.testing.assert_allclose(found.padding_mass, mass[..., N_TOKENS:].sum(-1), rtol=1e-4)
    assert found.set_names == ("seven",)
    np.testing.assert_allclose(found.set_probability("seven"), mass[..., 7], rtol=1e-4)
    most = f"{100 * found.padding_mass.max():.2g} % on rows of no token"
    assert most in repr(found)
    assert found.padding_mass.max() > 0.01
    np.testing.assert_array_equal(
        found.to_frame()["padding_mass"], found.padding_mass.ravel().astype(float)
    )
    assert any("10 of 160 vocabulary rows" in note for note in found.provenance.notes)
    assert not point.logit_lens(TEXT, mask_padding_rows=True).padding_mass.any()
    plain = _model(n_tokens=D_VOCAB).logit_lens(TEXT)
    assert plain.padding_mass is None
    assert "no token" not in repr(plain)
    assert "padding_mass" not in plain.to_frame()
    assert lens.load(BY_NAME["llama"].build()).logit_lens([5, 6]).padding_mass is None


def test_rows_of_no_token_are_named_by_their_id() -> None:
    point = _model()
    predictions = point.logit_lens(TEXT, top_k=D_VOCAB)
    assert predictions.vocabulary[155] == "[id 155]"
    assert predictions.vocabulary[5] == " w5" or predictions.vocabulary[5] == "w5"


def test_without_rows_to_mask_nothing_changes() -> None:
    point = _model(n_tokens=D_VOCAB)
    assert point.padding_rows == ()
    assert point.without_padding_rows() is point


def test_a_replayed_readout_cannot_be_masked_and_says_so() -> None:
    model = BY_NAME["llama"].build()
    point = lens.load(model, tokenizer=_tokenizer())
    point.readout = point.replay
    with pytest.raises(UnsupportedArchitectureError, match="masked in a direct readout"):
        point.logit_lens(TEXT, mask_padding_rows=True)


@pytest.mark.parametrize("rows", [120, 200])
def test_a_resized_vocabulary_is_read_with_the_rows_that_it_has(rows: int) -> None:
    model = BY_NAME["llama"].build(tied=True)
    model.resize_token_embeddings(rows, mean_resizing=False)
    point = lens.load(model, tokenizer=_tokenizer())
    assert point.d_vocab == rows
    assert point.tie.is_tied
    predictions = point.logit_lens("w5 w6", top_k=rows)
    assert (predictions.kl_bits[-1] == 0).all()
    assert predictions.top_ids.max() == rows - 1
    if rows < N_TOKENS:
        assert point.padding_rows == ()
        with pytest.raises(PromptError, match="out of range"):
            point.logit_lens([5, 130])
    else:
        assert len(point.padding_rows) == rows - N_TOKENS


def test_an_added_token_is_a_token() -> None:
    tokenizer = _tokenizer()
    tokenizer.add_tokens(["<new>"])
    point = lens.load(BY_NAME["llama"].build(), tokenizer=tokenizer)
    assert point.padding_rows == tuple(range(N_TOKENS + 1, D_VOCAB))
    predictions = point.logit_lens("w5 <new>")
    assert predictions.input_ids.tolist() == [5, N_TOKENS]


@pytest.mark.parametrize(
    ("specials", "ids"), [("", [5, 6, 7]), ("<s>", [1, 5, 6, 7]), ("<s> </s>", [1, 2, 5, 6, 7])]
)
def test_the_ids_that_were_used_are_shown_whatever_starts_a_text(
    specials: str, ids: list[int]
) -> None:
    predictions = _model(specials=specials).logit_lens(TEXT)
    assert predictions.input_ids.tolist() == ids
    assert len(predictions.tokens) == len(ids)
