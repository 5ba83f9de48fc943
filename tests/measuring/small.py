"""Small random checkpoints and corpora of token ids for measurements."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.corpus import Corpus, read_corpus
from tests.checkpoint.tiny import BY_NAME, D_VOCAB


def checkpoint(
    name: str = "gpt2",
    *,
    tied: bool = False,
    tokenizer: Any = None,
    n_layers: int | None = None,
    n_ctx: int | None = None,
) -> Checkpoint:
    tiny = BY_NAME[name]
    if n_ctx is not None:
        tiny = replace(tiny, config={**tiny.config, "max_position_embeddings": n_ctx})
    if n_layers is not None:
        tiny = replace(tiny, config={**tiny.config, "num_hidden_layers": n_layers})
    model = tiny.build(tied=tied)
    return Checkpoint.from_model(
        model, tokenizer=tokenizer, origin=Origin(model_id=f"tiny-{name}", format="memory")
    )


def padded_lookup(*, d_vocab: int = 48) -> Checkpoint:
    """A model whose lookup takes more ids than its unembedding has rows."""
    model = BY_NAME["gpt2"].build(tied=False)
    head = torch.nn.Linear(model.config.n_embd, d_vocab, bias=False)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight[:d_vocab])
    model.lm_head = head
    return Checkpoint.from_model(
        model, tokenizer=None, origin=Origin(model_id="padded", format="memory")
    )


def id_corpus(count: int = 9, length: int = 30, *, seed: int = 0) -> Corpus:
    """Documents of random ids, some shorter than others."""
    generator = np.random.default_rng(seed)
    return read_corpus(
        [generator.integers(3, D_VOCAB, length - i % 3).tolist() for i in range(count)]
    )


def word_tokenizer(*, special: bool, more: str = "") -> Any:
    """A fast tokenizer of words, with a beginning and an end token where asked."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "<s>": 1, "</s>": 2}
    words |= {w: i for i, w in enumerate("abcdefghijé漢" + more, 3)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
