"""Tiles of logits -> running sums: fused on the CPU where numba is there, else in torch.

To import numba and load its kernels costs some tenths of a second, so that one short prompt is read
in torch: see `fuses`.

A tile holds the logits of about a thousand tokens for all rows [layer, pos] of a chunk, and those
of the model's own final rows [pos], so that KL(final || lens) needs no stored distribution. Sums
run in float64 across tiles. Both ways keep the sums of sums.py.
"""

import importlib.util

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.lenses.eager import TorchReduction
from lens.lenses.sums import NOT_FOUND, Sums, empty_sums

WORTH_STARTING = 2**25
"""Logits of a call that make it worth the start of numba: 22 positions of SmolLM2's 31 layers.

Measured there, CPU seconds: to start takes 0.4, and each such call is then shorter by 0.1.
"""


def has_numba() -> bool:
    """Whether the fused path is there."""
    return importlib.util.find_spec("numba") is not None


def fuses(device: torch.device, *, once_cells: int | None = None) -> bool:
    """Whether logits are reduced by the fused kernels.

    `once_cells` is how many logits are read in all, where more are not expected: few are not worth
    the start of numba. The choice depends on this number alone, not on what has run before, so
    that a prompt gives the same bits every time.
    """
    few = once_cells is not None and once_cells < WORTH_STARTING
    return device.type == "cpu" and not few and has_numba()


def tile_tokens(device: torch.device, *, fused: bool) -> int:
    """How many tokens a tile should have, where the reduction runs on `device`.

    Fused, 512 rows of 1,024 are 2 MiB, near the cache of one core. In torch each tile costs some
    hundred calls, so it is wider; on another device, where calls cost most, wider still.
    """
    if device.type != "cpu":
        return 8192
    return 1024 if fused else 4096


class FusedReduction:
    """The sums of one chunk on the CPU, one read of each tile."""

    def __init__(
        self,
        *,
        top_k: int,
        ids: Int[Tensor, "3 pos"],
        thresholds: Float[Tensor, "2 layer pos"],
    ):
        from lens.lenses import kernels

        self._kernels = kernels
        _, n_layers, n_positions = thresholds.shape
        self.ids = ids.numpy()
        self.thresholds = thresholds.numpy()
        self.lens = empty_sums(n_layers, n_positions, columns=7)
        self.final = empty_sums(n_positions, columns=3)
        self.above = np.zeros(self.thresholds.shape, dtype=np.int64)
        self.top_values = np.full((n_layers, n_positions, top_k), -np.inf, dtype=np.float32)
        self.top_ids = np.full((n_layers, n_positions, top_k), NOT_FOUND, dtype=np.int64)
        self.final_top_value = np.full((1, n_positions, 1), -np.inf, dtype=np.float32)
        self.final_top_ids = np.full((1, n_positions, 1), NOT_FOUND, dtype=np.int64)

    def update(
        self, first: int, lens: Float[Tensor, "layer pos tile"], final: Float[Tensor, "pos tile"]
    ) -> None:
        """Take in the logits of the tokens from id `first` on; own tokens are overwritten."""
        self._kernels.reduce_tile(
            first,
            lens.numpy(),
            final[None].numpy(),
            0,
            self.ids,
            self.thresholds,
            self.lens,
            self.final,
            self.above,
            self.top_values,
            self.top_ids,
            self.final_top_value,
            self.final_top_ids,
        )

    def sums(self) -> Sums:
        """What the tiles so far add up to."""
        return Sums(
            scale=self._kernels.LOG2_E,
            lens=self.lens,
            final=self.final,
            ids=self.ids,
            thresholds=self.thresholds,
            above=self.above,
            top_values=self.top_values,
            top_ids=self.top_ids,
            final_top_ids=self.final_top_ids[0, :, 0],
        )


def reduction_for(
    *,
    fused: bool,
    top_k: int,
    ids: Int[Tensor, "3 pos"],
    thresholds: Float[Tensor, "2 layer pos"],
) -> FusedReduction | TorchReduction:
    """The kernels, or torch."""
    kind = FusedReduction if fused else TorchReduction
    return kind(top_k=top_k, ids=ids, thresholds=thresholds)
