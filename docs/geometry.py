# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/geometry.md: the embedding against the unembedding on real models.

    LENS_TEST_MODELS=FOLDER python docs/geometry.py

FOLDER holds core-charlm and opennmt-lm; SmolLM2 and Gemma 3 270M come from the package index.
"""

import datetime
import time
from importlib.metadata import version
from pathlib import Path

from real_models import RealModel, models

PAGE = Path(__file__).with_name("geometry.md")
SEED = 0
MODELS = ("smollm2", "gemma", "opennmt-lm", "core-charlm")
WITH_MEANING = ("smollm2", "core-charlm")
"""Of these the similarity of meaning is measured too."""

TEXT = """# The embedding against the unembedding

`lens.geometry(model)` and `lens geometry MODEL` compare row i of W_E with row i of W_U, and the two spaces as wholes. Every number stands beside **chance**: the
same number with the rows of W_U permuted. Both are given for the rows as they are and for rows with the mean row taken off.

| number | what it asks | when it misleads |
|---|---|---|
| row cosine | do the rows of one token point the same way, in the basis that both live in? | two spaces that differ by a rotation score 0; a common offset scores near 1, in chance too |
| Procrustes cosine | the same after the best rotation | with few rows per dimension a rotation fits noise: look at chance |
| linear CKA | are the same pairs of tokens alike in both? | a few large directions decide it |
| ridge R2, ridge cosine | how well a linear map from W_E predicts rows of W_U that it never saw | R2 is dominated by long rows; the cosine is not |
| pair rank correlation | is the order of similarities the same? | most pairs are far apart, and noise ranks them |
| kNN overlap | how many of the ten nearest rows are shared | says nothing of far rows; exact duplicates count |
| norm correlation | are the same rows long? | length carries frequency, see [frequency](frequency.md) |
| copy score | how often token i is the best answer to its own normed row: what a lens at the embedding says | a tied model copies by construction |

Of each matrix alone: the mean cosine of its rows and the share of a common direction; effective rank (exponential of the entropy of the singular values) and participation ratio of the
spectrum; how often the nearest row is the same by dot product and by cosine, and how far a dot product follows the length of the row (a logit is a dot product: a long row wins without being near).

A fifth of the rows is held out for the ridge map. Neighbours and copies are of 512 rows among all. Rows are streamed: nothing holds a number for each pair of tokens.
The target is 60 s for the 49,152 rows of SmolLM2 on two cores; "time" below is what `lens.geometry` took, in one thread, without the load and without the similarity of meaning, by a clock that other work on the machine shared.

`lens.similarity_of_meaning(model, corpus)` and `--corpus` ask whether similar rows get similar probabilities: the rank correlation of cos(row i, row j) with the correlation of
log p(i) and log p(j) over contexts, against permuted pairs.

A tied model compares one matrix with itself: the first table is then 1 by law, and what is left to learn stands in its chance column and below.

## Measured

"""


def section(real: RealModel, *, meaning: bool) -> str:
    """One model's numbers as a section."""
    import torch

    import lens

    model = lens.load(real.source)
    torch.set_num_threads(1)
    cpu, wall = time.process_time(), time.perf_counter()
    rows = lens.geometry(model, seed=SEED).rows()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    rows.append(("time", f"{cpu:.1f} s of CPU, one thread; {wall:.1f} s by the clock"))
    if meaning:
        rows += lens.similarity_of_meaning(model, real.corpus, seed=SEED).rows()
    text = "\n".join(f"{label:<24} {value}" for label, value in rows)
    return f"### {real.title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    made = "\n".join(
        section(real, meaning=name in WITH_MEANING)
        for name, real in zip(MODELS, models(*MODELS), strict=True)
    )
    note = f"Written by docs/geometry.py on {datetime.date.today()}, seed {SEED}, "
    note += f"torch {version('torch').split('+')[0]}, transformers {version('transformers')}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
