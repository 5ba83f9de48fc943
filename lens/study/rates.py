"""Learning rates of an arm from a coarse grid, on seeds that are not used again."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lens.errors import TrainingDivergedError
from lens.measuring.kept_folder import make_folder
from lens.study.arms import Arm
from lens.study.held_out import held_out_loss_bits
from lens.study.recipe import Recipe
from lens.study.run import branch_folder, replace_text, train
from lens.study.texts import StudyTexts

FACTORS = (0.5, 1.0, 2.0, 4.0)
TUNING_SEED = 1000
FOUND = "rates.json"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best factors on a recipe's rates, and the loss in bits at each point that was tried.

    The loss is infinite where training diverged. `at_edge` names the rates whose best
    factor is the grid's first or last.
    """

    arm: str
    trunk: float
    embedding: float
    losses: tuple[tuple[float, float, float], ...]
    at_edge: tuple[str, ...]


def tune_rates(
    arm: Arm,
    texts: StudyTexts,
    recipe: Recipe,
    folder: str | Path,
    *,
    factors: tuple[float, ...] = FACTORS,
    seed: int = TUNING_SEED,
    progress: Callable[[float, float, float], None] | None = None,
) -> Tuned:
    """First the trunk's factor, then, at the best of those, the embedding matrices'.

    Each point is a run on a quarter of the tokens, judged by its held-out loss; factors are tried
    from the least on, until the loss has risen, as it has where training diverged. Points that were
    tried stay in the folder, and are not tried again. Raises TrainingDivergedError where none has a
    loss.
    """
    place = Path(folder)
    losses: dict[tuple[float, float], float] = {}

    def loss_at(trunk: float, embedding: float) -> float:
        point = (trunk, embedding)
        if point not in losses:
            losses[point] = _loss(arm, texts, recipe.quarter(*point), seed, place / _name(*point))
            if progress is not None:
                progress(trunk, embedding, losses[point])
        return losses[point]

    trunk = _least(factors, lambda f: loss_at(f, 1.0))
    embedding = _least(factors, lambda f: loss_at(trunk, f))
    if math.isinf(losses[trunk, embedding]):
        raise TrainingDivergedError(
            f"{arm.name}, seed {seed}: training diverged at every rate that was tried, the trunk's "
            f"times {', '.join(f'{f:g}' for f in factors)}. Search among smaller factors, or with "
            "a recipe of lower rates, in another folder."
        )
    edges = (factors[0], factors[-1])
    at_edge = [n for n, f in (("trunk", trunk), ("embedding", embedding)) if f in edges]
    found = Tuned(
        arm=arm.name,
        trunk=trunk,
        embedding=embedding,
        losses=tuple((*point, loss) for point, loss in sorted(losses.items())),
        at_edge=tuple(at_edge),
    )
    text = _in_json(found)
    replace_text(place / FOUND, text)
    return found


def write_rates(found: Tuned, results: str | Path) -> Path:
    """The search of an arm as rates-ARM.json, for the page of the study."""
    place = Path(results)
    make_folder(place)
    path = place / f"rates-{found.arm}.json"
    text = _in_json(found)
    replace_text(path, text)
    return path


def read_rates(results: str | Path) -> list[Tuned]:
    """What `write_rates` left in a folder, by arm."""
    found = []
    for path in sorted(Path(results).glob("rates-*.json")):
        row = json.loads(path.read_text("utf-8"))
        points = tuple(
            (float(t), float(e), math.inf if loss is None else float(loss))
            for t, e, loss in row["losses"]
        )
        found.append(Tuned(**row | {"losses": points, "at_edge": tuple(row["at_edge"])}))
    return found


def _least(factors: tuple[float, ...], loss_at: Callable[[float], float]) -> float:
    """The factor with the least loss, tried in order until the loss has risen."""
    best = factors[0]
    for before, factor in pairwise(factors):
        if loss_at(factor) > loss_at(before):
            break
        best = factor
    return best


def _name(trunk: float, embedding: float) -> str:
    return f"trunk-{trunk:g}-embedding-{embedding:g}"


def _loss(arm: Arm, texts: StudyTexts, recipe: Recipe, seed: int, folder: Path) -> float:
    path = folder / "loss.json"
    if path.is_file():
        kept = json.loads(path.read_text("utf-8"))["held_out_bits"]
        return math.inf if kept is None else float(kept)
    loss = _trained_loss(arm, texts, recipe, seed, folder)
    text = json.dumps({"held_out_bits": _finite(loss)})
    replace_text(path, text)
    return loss


def _trained_loss(arm: Arm, texts: StudyTexts, recipe: Recipe, seed: int, folder: Path) -> float:
    try:
        train(arm, seed, texts, recipe, folder)
    except TrainingDivergedError:
        # A point of the grid as another: the loss has risen, and how far is of no interest.
        return math.inf
    model = AutoModelForCausalLM.from_pretrained(
        branch_folder(folder, recipe.branch_at[-1]), dtype=torch.float32
    )
    loss = held_out_loss_bits(model, texts, window_tokens=recipe.window_tokens)
    return loss if math.isfinite(loss) else math.inf


def _in_json(found: Tuned) -> str:
    # JSON has no infinity.
    rows = [(*point, _finite(loss)) for *point, loss in found.losses]
    return json.dumps(asdict(found) | {"losses": rows}, indent=1) + "\n"


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
