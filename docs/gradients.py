# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/gradients.md: what the paths into the embedding matrices measure on real models.

    LENS_TEST_MODELS=FOLDER python docs/gradients.py

FOLDER holds core-charlm; SmolLM2 comes from the package index.
"""

import datetime
from importlib.metadata import version
from pathlib import Path

from real_models import RealModel, models

PAGE = Path(__file__).with_name("gradients.md")
SEED, MAX_TARGETS = 0, 2048
MODELS = ("smollm2", "core-charlm")

TEXT = """# How a tied matrix is trained

The matrix of a tied model is used twice, so its gradient is a sum of two. `lens.gradients(model, corpus)` and `lens gradients MODEL --corpus F` take it apart:

- **the lookup's part**, g_in: only rows of tokens that occur in the input get any;
- **the output's part**, g_out: the softmax sends something to every row at every position.

For one backward pass the lookup and the unembedding are given two leaves of the same values, and autograd tells them apart, whatever scales, caps, norms and projections stand between. The parts must
add up to autograd's gradient of the one matrix, to 1e-6 of its norm in float32; this is checked on the first batch of every run, and a model where they do not is refused. An
encoder-decoder has three paths. On an untied model the same numbers are told of its two matrices.

| number | what it is |
|---|---|
| output share | norm of g_out over the sum of the norms |
| additive share | what g_out contributes along the sum: <g_out, g> / norm(g)^2; above 1 where the paths oppose |
| cosine of paths | below 0 where one use of the matrix pulls against the other |
| Adam's output share | the output share of the step that Adam takes, not of the gradient: see below |
| rows by use | the same for rows by how often their token occurs in the text, most frequent tenth first, and for rows that do not occur |

<!-- not run -->
```python
import lens

paths = lens.gradients(lens.load("demo"), "sample")
print(paths.output_share, paths.cosine, paths.group_output_share)
```

## What Adam makes of it

Adam moves an entry by m / (sqrt(v) + eps), m the running mean of its gradient and v that of its square. Each path has its own m. A tied matrix has **one v**, of the sum of the paths: u_in = m_in / (sqrt(v) + eps)
and u_out = m_out / (sqrt(v) + eps) add up to the step that Adam takes (a test holds this against `torch.optim.Adam`). The two matrices of an untied model have each their own. Both are told of every model: what
happens here, and what would happen otherwise ("a size for each path" of a tied model, "one size for both" of an untied one), since that is a difference between tied and untied training which no gradient shows:
under one v the louder path sets the pace of the quieter one. `paths.adam` and `paths.adam_otherwise` hold norms, shares, cosine and groups; `adam=lens.AdamSettings(beta_1=0.9, beta_2=0.95)` takes other constants.

## When it misleads

- It is the gradient **at these weights**. Of a trained model it says how the next step would go, not how the matrix came to be. Early in training the output path is reported to
  be larger still (0.90 of the gradient in the first hundred steps of one model, 0.63 by ten thousand; Lopardo et al.).
- A share of norms is no share of the change: Adam divides each entry by its running size, so that rare rows move more than their gradient says. Adam's shares stand beside for that.
- Adam's step is as large for a row of tiny gradients as for any other, so that rows which never occur, whose step is the output path's alone, weigh by their number. Look at the groups.
- Adam's means begin at these weights and see the batches that are measured, with the weights held still. An optimiser in the middle of training remembers a thousand batches (beta 2 is 0.999) of weights that moved.
- Norms depend on the batch: noise does not cancel in few targets, and g_in of a rare token rests on a handful of positions. Compare shares at equal numbers of targets.
- Text that a model was not trained on gives large losses and gradients of another kind. Use text of its own kind.
- A lookup scale multiplies g_in (sqrt(d) in Gemma): part of a small output share may be that factor and nothing else.

## Measured

"""


def section(real: RealModel) -> str:
    """One model's numbers as a section."""
    import lens

    model = lens.load(real.source)
    paths = lens.gradients(
        model, real.corpus, max_targets=MAX_TARGETS, window_tokens=64, batch_size=8, seed=SEED
    )
    rows = [*paths.rows(), *paths.group_rows_text()]
    text = "\n".join(f"{label:<20} {value}" for label, value in rows)
    return f"### {real.title}, {real.texts}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    made = "\n".join(section(real) for real in models(*MODELS))
    note = f"Written by docs/gradients.py on {datetime.date.today()}, seed {SEED}, "
    note += f"{MAX_TARGETS:,} targets, torch {version('torch').split('+')[0]}, transformers {version('transformers')}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
