"""A small checkpoint with a tokenizer, on disk, as a user would have it."""

from pathlib import Path

import pytest

WORDS = ["[UNK]", "the", "tower", "is", "in", "Paris", "Rome", "@home", "--x", "[b]", "東京"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied GPT-2: 2 layers, 11 words split by spaces, context 8, a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} is {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder
