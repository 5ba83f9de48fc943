# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/tying.md: what `lens inspect` tells of real checkpoints.

    LENS_TEST_MODELS=FOLDER python docs/tying.py

FOLDER holds core-charlm, opennmt-lm, rwkv4-tiny and stories260K; SmolLM2 and Gemma 3 270M come from
the package index.
"""

import datetime
from importlib.metadata import version
from pathlib import Path

from real_models import GEMMA, small, smollm2

PAGE = Path(__file__).with_name("tying.md")
SMALL = ("core-charlm", "opennmt-lm", "rwkv4-tiny", "stories260K")

TEXT = """# Is the unembedding the embedding?

`lens inspect MODEL` and `model.tie` compare the matrices themselves: first by identity, then by storage, then value by value, streamed.
What the config says stands beside the verdict and never replaces it.

| verdict | what it means |
|---|---|
| shared parameter | one tensor: training moves both, and a change of one is a change of the other |
| shared storage | two parameters over one piece of memory: a change in place reaches both, an optimizer may count it twice |
| equal values, separate | two tensors that hold the same numbers now; the next step of training parts them |
| equal up to a scalar | one is the other times a number, which is given: a lookup scale was folded into a matrix |
| untied | two tensors with different values; the largest difference is given |
| separate, values not in memory | two tensors of which one is on the meta device: nothing is claimed of their values |
| no pair of matrices | the model has no lookup or no unembedding of its own to compare |

An encoder-decoder has three pairs (encoder lookup, decoder lookup, unembedding), and all three are listed, the pair that is read first. Matrices with
different numbers of rows (a padded vocabulary) are compared on the rows that both have; matrices of different widths are not compared.

```python
import lens

model = lens.load("demo")
model.tie.verdict
```

<!-- prints -->
```text
'shared parameter'
```

## When the config misleads

`tie_word_embeddings` is a wish. transformers 5 acts on it in these ways, each of which has a test:

- Both matrices are in the files and differ: they **stay untied**, whatever the flag says. A later call of `tie_weights()` (resizing the vocabulary makes
  one) overwrites the unembedding. The report says so.
- Both are in the files and are equal, with the flag on: one tensor. With the flag off: two.
- One of them is missing, with the flag on: it is tied, in either direction. With the flag off it would be **random**, and `lens.load` refuses.
- `load_state_dict(..., assign=True)`, `.to("meta")`, accelerate's offload and PEFT's `modules_to_save` **break the tie in memory**, and the flag stays on.
- In Switch Transformers the flag also divides the decoder's output by sqrt(d_model), so that turning it off changes every logit. T5 keeps that scale in `scale_decoder_outputs`.

## When the verdict misleads

"Untied" says that there are two tensors. It does not say that they differ in what they do: see [geometry](geometry.md) for how far apart they are. And a tie does not make input and output
symmetric: the lookup may be scaled (sqrt(640) = 25.3 in Gemma 3 270M) and a norm stands before the product, neither of which is in the matrix.

## Surgery

Each of these works on a copy, which is taken apart and proved like any other checkpoint; your model is not touched.

| call | the copy |
|---|---|
| `lens.untie(model)` | every matrix a parameter of its own; logits bit for bit the same |
| `lens.tie(model, keep="input")` | one matrix, with the values of W_E, of W_U ("output") or of the mean; the logits change |
| `lens.interpolate(model, alpha)` | W_U moved the share alpha of the way to W_E; the lookup stays |
| `lens.interpolate(model, alpha, rotate=True)` | towards W_E turned by the rotation that brings it nearest to W_U |
| `lens.reset_bias(model)` | output biases zero |

`lens.surgery_sweep(model, corpus, [0, 0.5, 1])` and `lens surgery-sweep MODEL --corpus F` measure lens and perplexity along the path from W_U to W_E. A cut model was not trained: where its perplexity
is lost, its lens says little about tied models.

`lens.save_checkpoint(copy, folder)`, `lens untie MODEL -o DIR` and `lens tie MODEL --keep output -o DIR` write a folder that loads to the same logits and the same verdict, in one file or in shards.
Two exceptions are told, not hidden. A T5 config always says tied, so that its untied copy comes back tied while its matrices are equal (a note says so). In
Switch Transformers the flag changes the logits, so that untying is refused.

## What it looks like

"""


def sources() -> dict[str, str]:
    """Name shown and what to load."""
    found = {"SmolLM2-135M-Instruct": smollm2(), "Gemma 3 270M": GEMMA}
    return {**found, **{name: str(small(name)) for name in SMALL}}


def section(name: str, source: str) -> str:
    """One model's summary as a section."""
    import lens

    return f"### {name}\n\n```text\n{lens.load(source).summary()}\n```\n"


if __name__ == "__main__":
    made = "\n".join(section(name, source) for name, source in sources().items())
    libraries = ", ".join(
        f"{name} {version(name).split('+')[0]}" for name in ("torch", "transformers")
    )
    note = f"Written by docs/tying.py on {datetime.date.today()} with {libraries}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
