# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/when_to_tie.md: what a tie saves, who ties, and the evidence with its limits.

python docs/when_to_tie.py
"""

import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("when_to_tie.md")

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
NEOX = {"model_type": "gpt_neox", "vocab_size": 50304}
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "GPT-2 small": {"model_type": "gpt2"},
    "GPT-2 XL": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "Pythia-70m": {
        **NEOX,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    },
    "Pythia-12b": {
        **NEOX,
        "vocab_size": 50688,
        "hidden_size": 5120,
        "intermediate_size": 20480,
        "num_hidden_layers": 36,
        "num_attention_heads": 40,
    },
    "Gemma-3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "Llama-3.2-1B": {
        **LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "Llama-3.1-8B": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Qwen2.5-0.5B": {
        **QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "T5-small (three matrices)": {"model_type": "t5"},
}

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def prevalence() -> dict[str, tuple[int, int]]:
    """For each kind of model: classes that tie by default, and all that could be asked."""
    from transformers.models.auto import modeling_auto

    counts = {}
    for kind, mapping in KINDS.items():
        answers = [
            answer
            for model_type, names in getattr(modeling_auto, mapping).items()
            for name in ([names] if isinstance(names, str) else names)
            if (answer := ties_by_default(model_type, name)) is not None
        ]
        counts[kind] = (sum(answers), len(answers))
    return counts


def ties_by_default(model_type: str, name: str) -> bool | None:
    """Whether a class maps its unembedding to a lookup and its default config turns that on."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    model_class = getattr(transformers, name, None)
    config_class = getattr(model_class, "config_class", None)
    if model_class is None or config_class is None:
        return None
    if getattr(config_class, "model_type", None) != model_type:
        config_class = transformers.CONFIG_MAPPING[model_type]
    try:
        config = config_class()
    except (ValueError, TypeError, OSError, StrictDataclassError):
        return None
    flag = getattr(config, "tie_word_embeddings", False)
    return bool(getattr(model_class, "_tied_weights_keys", None)) and flag is True


TEXT = """# When to tie

A tie saves V x d parameters, exactly: one of two matrices with a row for each token. Whether that is worth something depends on what else the model holds.

<!-- not run -->
```bash
lens plan --vocab 50257 --d-model 768 --layers 12 --context 1024
lens plan --config path/to/config.json
```

```python
import lens

cost = lens.plan_tie(50257, 768, 12, n_ctx=1024)
f"{cost.parameters:,} parameters, {cost.share_of_untied:.3f} of the untied model"
```

<!-- prints -->
```text
'38,597,376 parameters, 0.237 of the untied model'
```

`lens.plan_tie` counts the blocks as GPT-2 does; `lens.scale_table` builds the model of a config without memory and counts that, so it is exact for the architecture.

## The scale table

@TABLE@

Weights are in float32. Training costs four times that (weights, gradient, Adam's two moments). The logits cost the same tied or not: a tie saves memory for
weights, no arithmetic. In an encoder-decoder that shares all three, two thirds of the embedding parameters are saved.

## Who ties by default

Classes of the installed transformers that map the unembedding to a lookup and whose default config turns that on:

| kind | tied by default | classes |
|---|--:|--:|
@PREVALENCE@

A default is not a checkpoint: Llama's config says untied, and Llama-3.2-1B is tied. Read the checkpoint with [`lens inspect`](tying.md).

## The evidence

- **Small recurrent models gain.** Press and Wolf (arXiv:1608.05859): a large LSTM of 66M, untied, 78.4 perplexity, 74.3 tied with 51M; a small one 114.5 and 112.4. Inan et al.
  (arXiv:1611.01462): tying alone 87.3 to 85.1, 77.7 to 73.9, 72.6 to 69.0. In translation, three-way tying kept BLEU (33.13 and 33.46) with 52 % fewer parameters.
- **The tied matrix resembles the untied output matrix,** not the input one (Press and Wolf; Lopardo et al. for OLMo-1B: row cosine after a linear map 0.719 and 0.525). The gradient of
  the output path is the larger one, most of all early in training: `lens gradients` measures it.
- **In transformers of today the sign depends on size and recipe.** A 1.2B tied model matched 1.46B untied in one report; a speed-run recipe ties early and unties late. Families tie
  their small models and untie their large ones (Llama 3.2 1B and 3.1 8B; Qwen2.5 3B and 7B), where V x d falls below a tenth of the model.
- **The matched twins of this project** (a million parameters, two million tokens) have the lower held-out loss untied, also against a tied one that spends the saved parameters on wider MLPs; tied at half of training, an untied one
  loses what it had gained: [the study](study.md).

## The limits of that

- Most of it compares models of different size at the same width: a tied model that loses may lose by its parameters, one that wins may win by regularisation. Matched parameters
  and matched compute are two questions.
- Pairs of public checkpoints differ in data, tokenizer, norm, and position scheme as well. No conclusion about tying follows from two of them.
- The perplexities above are of recurrent models on a corpus of a million words.
- Nothing here says that a tied model is easier to read. That is measured, not assumed: a tied early layer must predict its own token, since there the lens multiplies a row by its own matrix.

So: with V x d above about a fifth of the model, tying is a large saving that small models have borne well; below about a tenth it saves little, and most families stop tying there. These
are observations of what families do, not a law.
"""


def page() -> str:
    """The whole page as Markdown."""
    from lens.checkpoint.tie_scale import scale_table, table_text

    table = [(name, scale_table([config])[0][1]) for name, config in SIZES.items()]
    rows = [f"| {kind} | {tied} | {of} |" for kind, (tied, of) in prevalence().items()]
    made = f"\nWritten by docs/when_to_tie.py on {datetime.date.today()} with transformers "
    made += f"{version('transformers')}.\n"
    text = TEXT.replace("@TABLE@", table_text(table)).replace("@PREVALENCE@", "\n".join(rows))
    return text + made


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
