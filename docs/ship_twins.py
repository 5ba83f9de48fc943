"""Writes the shipped twins, lens/data/twins, from finished runs of the study.

    lens twins reproduce --corpus novels.jsonl --row tied --row untied-copy
    python docs/ship_twins.py twins-runs docs/study

Two seeds of tied and untied-copy: the last branch's weights in bfloat16, the tokenizer, and a
model card with the held-out loss of each run before the rounding.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import lens
from lens.study.recipe import Recipe

SHIPPED = {
    "tied-twin": "tied-seed-0",
    "untied-twin": "untied-copy-seed-0",
    "tied-twin-1": "tied-seed-1",
    "untied-twin-1": "untied-copy-seed-1",
}
TARGET = Path(__file__).parents[1] / "lens" / "data" / "twins"

CARD = """# Matched twins

Small language models that differ in the tie and in nothing else. `tied-twin` has one matrix for
lookup and unembedding; `untied-twin` has two, which began as copies, so that both were the same
function at step 0, bit for bit. Trunk, data, order and optimiser are alike. `-1` is a second seed.

- **Class**: GPT2LMHeadModel, {n_layers} blocks, d_model {d_model}, {d_vocab:,} tokens (byte-level
  BPE), context {window_tokens}
- **Training**: {tokens:,} tokens of Jane Austen's six novels (public domain), one chapter in four
  held out; AdamW; `lens twins train`
- **Files**: bfloat16, rounded from float32 training; `lens.load("tied-twin")` reads them as float32
- **Licence**: that of this project
- **Use**: to try `lens`, and to see what untying does to a logit lens. They know Austen's novels a
  little, and nothing else.

| model | run | held-out bits a token, as trained |
|---|---|--:|
{rows}

Written by `docs/ship_twins.py`; the study is docs/study.md.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("rows", type=Path)
    arguments = parser.parse_args()
    recipe, lines = Recipe(), []
    for name, run in SHIPPED.items():
        branch = arguments.runs / run / f"branch-{recipe.branch_at[-1]:05}"
        if not (arguments.rows / f"{run}.json").is_file():
            print(f"{run} is not measured yet; {name} is left out")
            continue
        row = json.loads((arguments.rows / f"{run}.json").read_text("utf-8"))
        write(branch, TARGET / name)
        lines.append(f"| `{name}` | {run} | {row['branches'][-1]['loss_bits']:.3f} |")
        print(repr(lens.load(name)))
    sizes = {key: getattr(recipe, key) for key in ("n_layers", "d_model", "d_vocab")}
    card = CARD.format(
        **sizes,
        window_tokens=recipe.window_tokens,
        tokens=(recipe.branch_at[-1] + recipe.branch_steps) * recipe.tokens_per_step,
        rows="\n".join(lines),
    )
    (TARGET / "README.md").write_text(card, encoding="utf-8")
    total = sum(p.stat().st_size for p in TARGET.rglob("*") if p.is_file())
    print(f"{total / 1e6:.1f} MB in {TARGET.name}")


def write(branch: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(branch, dtype=torch.bfloat16)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(branch / name, target / name)


if __name__ == "__main__":
    main()
