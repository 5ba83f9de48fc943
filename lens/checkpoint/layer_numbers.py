"""Which residual states a caller means: layers by number, mids by half numbers, hooks by name."""

import math
from collections.abc import Iterable, Sequence

from lens.checkpoint.transformer_lens import layer_of_hook
from lens.errors import SelectionError

Layer = int | float
"""l is the state after l blocks, l + 0.5 the one between attention and MLP of block l."""

POINTS = ("post", "mid", "all")
"""Rows of a reading: after blocks (0 to n_layers), within them (0.5 to n_layers - 0.5), both."""


def is_mid(layer: Layer) -> bool:
    """True for a state within a block.

    >>> is_mid(3), is_mid(3.5)
    (False, True)
    """
    return layer != int(layer)


def layer_name(layer: Layer) -> str:
    """A layer as axes, tables and files show it.

    >>> layer_name(3), layer_name(3.0), layer_name(3.5)
    ('3', '3', '3.5')
    """
    return f"{layer:g}"


def resolve_layers(
    wanted: Sequence[Layer | str] | None, n_layers: int, *, points: str = "post"
) -> list[Layer]:
    """Layers in the order asked for; None for all of `points`; negatives count these from the end.

    A layer may go by TransformerLens' name, "blocks.3.hook_resid_post" or _mid or _pre. Raises
    SelectionError for one that does not exist, stands twice, or is none of `points="mid"`.

    >>> resolve_layers([0, 1.5, -1], 3)
    [0, 1.5, 3]
    >>> resolve_layers(None, 2, points="all")
    [0, 0.5, 1, 1.5, 2]
    """
    if points not in POINTS:
        raise SelectionError(f"points is {points!r}; expected one of {', '.join(POINTS)}.")
    ends: list[Layer] = list(range(n_layers + 1))
    mids: list[Layer] = [block + 0.5 for block in range(n_layers)]
    offered = {"post": ends, "mid": mids, "all": sorted([*ends, *mids])}[points]
    if wanted is None:
        return offered
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise SelectionError(f"layers is {wanted!r}; expected a list, as in [0, 6, -1].")
    allowed = mids if points == "mid" else [*ends, *mids]
    chosen = [_number(one, offered) for one in wanted]
    wrong = [one for one, layer in zip(wanted, chosen, strict=True) if layer not in allowed]
    if wrong or not chosen:
        rows = f"{layer_name(offered[0])} to {layer_name(offered[-1])}" if offered else "none"
        raise SelectionError(
            f"There is no layer {', '.join(map(str, wrong)) or 'in an empty list'}; with "
            f'points="{points}" this model has layers {rows} (-1 is the last).'
        )
    found = [layer for layer in chosen if layer is not None]
    if len(set(found)) < len(found):
        raise SelectionError(f"A layer was asked for twice: {list(wanted)}.")
    return found


def _number(one: Layer | str, offered: list[Layer]) -> Layer | None:
    """The layer's own number: an int for a state between blocks; None where there is none."""
    if isinstance(one, str):
        one = layer_of_hook(one)
    if not math.isfinite(one):
        return None
    if one < 0:
        return offered[int(one)] if not is_mid(one) and -one <= len(offered) else None
    return one if is_mid(one) else int(one)
