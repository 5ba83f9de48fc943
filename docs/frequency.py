# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/frequency.md: where real models keep word frequency.

    LENS_TEST_MODELS=FOLDER python docs/frequency.py

FOLDER holds core-charlm; SmolLM2 and Gemma 3 270M come from the package index.
"""

import datetime
from importlib.metadata import version
from pathlib import Path

from real_models import RealModel, models

PAGE = Path(__file__).with_name("frequency.md")
SEED, MAX_POSITIONS = 0, 256
MODELS = ("smollm2", "gemma", "core-charlm")

TEXT = """# Where a model keeps word frequency

Before it has read anything, a model's best guess is the unigram: how often each token occurs. `lens.frequency(model, corpus)` and `lens frequency MODEL --corpus F` ask where that is kept. Each carrier is
set against log counts (Spearman's correlation over tokens that occur), and all but row lengths are then taken away.

| carrier | what it adds to the logit of token v |
|---|---|
| output bias | b_U[v], and what is added after the product (final_logits_bias); most decoders have none |
| norm bias | W_U[v] . b, b what the final norm adds whatever the state; an RMS norm has none |
| mean direction | W_U[v] . m, m the mean row |
| row length | nothing by itself: a long row answers louder |

KL(mean q || unigram) says how far the lens' average answer is from the unigram; KL(p || q) is the lens against the unchanged model. Counts come from documents that are not scored.

## The lookup's scale

Gemma multiplies each row by sqrt(640) = 25.3 on lookup. That factor is measured, `model.lookup_scale`, and it is **not in the matrix**: its twin, with the factor baked into the one matrix, has the same states
and logits that are larger by that factor (a test holds this). Who reads W_E as "the embedding" of a Gemma reads vectors 25 times too short.

## When it misleads

- A row common to all tokens moves every logit alike and no probability; but it changes row lengths, and so their correlation.
- A correlation is no share. What a carrier is worth is in the KL without it.
- Without bias in head and norm, frequency can sit in a direction that the norm never removes (a large residual dimension): "mean direction out" takes one direction, and that may be too few or too much.
- Counts of one corpus are not the training counts. The sample is six novels of one author.
- Chance is not zero where few tokens occur.

## Measured

"""


def section(real: RealModel) -> str:
    """One model's numbers as a section."""
    import lens

    model = lens.load(real.source)
    found = lens.frequency(model, real.corpus, max_positions=MAX_POSITIONS, seed=SEED)
    text = "\n".join(f"{label:<42} {value}" for label, value in found.rows())
    return f"### {real.title}, {real.texts}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    made = "\n".join(section(real) for real in models(*MODELS))
    note = f"Written by docs/frequency.py on {datetime.date.today()}, seed {SEED}, "
    note += f"torch {version('torch').split('+')[0]}, transformers {version('transformers')}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
