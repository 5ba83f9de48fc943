"""The order of endless passes over a number of things, known without making the passes before."""

from functools import lru_cache

import numpy as np
from jaxtyping import Int


def place_in_pass(number: int, count: int, *key: int) -> int:
    """Which of `count` things comes at `number`, where each pass takes all of them once.

    Every pass has an order of its own, drawn from `key` and the number of the pass alone, so that
    a run that was stopped goes on with the same things.

    >>> sorted(place_in_pass(number, 3, 0) for number in (3, 4, 5))
    [0, 1, 2]
    """
    passes, place = divmod(number, count)
    return int(_order(count, *key, passes)[place])


@lru_cache(maxsize=4)
def _order(count: int, *key: int) -> Int[np.ndarray, " thing"]:
    """The order of one pass: neighbouring numbers share it."""
    return np.random.default_rng(key).permutation(count)
