# ruff: noqa: E501 - the lines of a page are its own
"""Writes docs/attribution.md: who writes a logit, on real models.

    LENS_TEST_MODELS=FOLDER python docs/attribution.py

FOLDER holds core-charlm; SmolLM2 and Gemma 3 270M come from the package index.
"""

import datetime
from importlib.metadata import version
from pathlib import Path

from real_models import models

PAGE = Path(__file__).with_name("attribution.md")

TEXT = """# Who writes a logit

The final norm divides the residual state by a length. With that length frozen at its value, a logit is linear in the state, and the state is the embedding
plus what each block added. Where blocks norm the stream itself (BART, OPT-350m, the first GPT), each part passes the norms after it, their lengths frozen too. `lens.attribution(model, prompt, token=" Paris")` gives the parts, which add up, with a constant, to the model's own logit (to 1e-4 and what the readout itself rounds, or it raises: in bfloat16 a logit has three digits, and so has what the parts add up to).
In the terminal: `lens attribution MODEL TEXT --token TOKEN --against TOKEN`.

| part | what it is |
|---|---|
| embedding | the state that enters block 0, positions included |
| attention, mlp | what each module of a block added; found by what it returns, so that multipliers and norms after the module are in it |
| cross-attention | the same of a decoder's attention to its encoder |
| mixer | the same of a state-space block |
| block | a block that could not be split: something acts on the stream in it that is neither an addition nor a norm |
| head | the columns of the attention's last linear map that belong to one head, through a norm that follows (Gemma 2 and 3, OLMo 2), whose scale at the position is frozen as the final norm's is; biases are in the attention's part alone. Of self-attention only |
| neuron | one column of the MLP's last linear map, through such a norm, times its activation |
| constant | what no module writes: output bias, and the biases of the final norm and of norms on the stream, through what follows them and W_U |

`against=" Rome"` takes the difference of two logits apart. That is the better question: a constant added to every token's logit changes nothing that the model says, and is in every part of a single one.

<!-- not run -->
```python
import lens

model = lens.load("demo")
found = lens.attribution(
    model, "The Eiffel Tower is located in the city of", token=" Paris", against=" Rome"
)
found.last_mlp_share
```

## The last MLP as an unembedding

`last_mlp_share` is what the last MLP writes over what all parts write. On a tied model one matrix must both look tokens up and answer; where its directions do not suit answering, a last MLP can
rewrite the state just before the product. A large share fits that story. It does not prove it: untied models have last MLPs too.

## When it misleads

- **Direct effects alone.** A head that moves information for a later MLP gets nothing here. For total effects, ablate: `model.edit`.
- **The frozen scale is a choice.** Take a part away and the length changes too; a part that only lengthens the state scores 0 here and lowers every logit.
- Parts of opposite sign can be much larger than their sum. Then shares are unstable, and may leave 0 to 1.
- Where a norm follows the attention or MLP (Gemma 2 and 3, OLMo 2), a head taken away would change that norm's scale too: there two scales are frozen, not one.
- Where the stream itself is normed (BART, OPT-350m, the first GPT), every norm after a part is frozen. An early part has passed all of them, and is small or large by their scales as much as by what it wrote.
- With a soft-cap the number is the logit before it, and says so. A readout that is not linear after its norm (BERT's transform) and a state of several streams are refused.

## Measured

"""

PROMPT = "The Eiffel Tower is located in the city of"


def questions() -> list[tuple[str, str, str, str | None, str | None]]:
    """Name, source, prompt, token, against."""
    smollm2, gemma, charlm = models("smollm2", "gemma", "core-charlm")
    text = Path(charlm.corpus).read_text("utf-8")[:48]
    return [
        *((real.title, real.source, PROMPT, " Paris", " Rome") for real in (smollm2, gemma)),
        (charlm.title, charlm.source, text, None, None),
    ]


def section(name: str, source: str, prompt: str, token: str | None, against: str | None) -> str:
    """One model's numbers as a section."""
    import lens

    model = lens.load(source)
    rows = lens.attribution(model, prompt, token=token, against=against).rows()
    text = "\n".join(f"{label:<24} {value}" for label, value in [("prompt", repr(prompt)), *rows])
    return f"### {name}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    made = "\n".join(section(*one) for one in questions())
    note = f"Written by docs/attribution.py on {datetime.date.today()}, "
    note += f"torch {version('torch').split('+')[0]}, transformers {version('transformers')}.\n\n"
    PAGE.write_text(TEXT + note + made, encoding="utf-8")
