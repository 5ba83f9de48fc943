"""How long a prompt and a source may be, by the positions that a forward on text looks up."""

from typing import Any

import pytest
import transformers

from lens.checkpoint.checkpoint import Checkpoint
from lens.errors import ContextLengthError
from tests.checkpoint.test_exactness import checkpoint

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=4)
    text = transformers.LlamaConfig(**SMALL, vocab_size=97, max_position_embeddings=40)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
    return transformers.LlavaForConditionalGeneration(config)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
    )
    return transformers.BartForConditionalGeneration(config)


def apart(encoder_rows: int, decoder_rows: int) -> Any:
    """A BERT and a GPT-like BERT put together, each with positions of its own."""
    encoder = transformers.BertConfig(**SMALL, vocab_size=97, max_position_embeddings=encoder_rows)
    decoder = transformers.BertConfig(
        **SMALL,
        vocab_size=97,
        max_position_embeddings=decoder_rows,
        is_decoder=True,
        add_cross_attention=True,
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config)


def mpt() -> Any:
    return transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=97, d_model=16, n_heads=2, n_layers=2, max_seq_len=16)
    )


@pytest.mark.parametrize(
    ("model", "prompt", "source"),
    [
        (llava, 40, None),
        (bart, 16, 16),
        (lambda: apart(12, 20), 20, 12),
        (lambda: apart(20, 12), 12, 20),
        (mpt, 16, None),
    ],
    ids=["llava", "bart", "short encoder", "short decoder", "mpt"],
)
def test_positions_that_a_text_does_not_look_up_do_not_count(
    model: Any, prompt: int, source: int | None
) -> None:
    point = checkpoint(model())
    assert point.n_ctx == prompt
    assert point.source_n_ctx == source
    fits = read(point, prompt, source)
    assert len(fits.positions) == prompt
    with pytest.raises(ContextLengthError, match="1 more than the context of"):
        read(point, prompt + 1, source)
    if source is not None:
        with pytest.raises(ContextLengthError, match="encoder takes"):
            read(point, prompt, source + 1)


def read(point: Checkpoint, prompt: int, source: int | None) -> Any:
    text = None if source is None else [5] * source
    return point.logit_lens([4] * prompt, source=text, layers=[-1])
