"""The fused kernels on raw tiles, against numpy in float64."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lens.lenses import eager, kernels
from lens.lenses.eager import TorchReduction
from lens.lenses.lanes import LOG2_E, UNDERFLOW_BITS
from lens.lenses.reduction import FusedReduction
from lens.lenses.sums import FINAL_CROSS, MOMENT, NOT_FOUND, OFFSET, SQUARES, TOTAL
from lens.measuring import metrics

WIDTHS = [1024, 1000, 64, 17, 3]


def logits_of(shape, seed=0, spread=5.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * spread


def reduced(kind, lens, final, tile=1024, top_k=3, own=-1):
    n_positions = lens.shape[1]
    ids = torch.stack([torch.zeros(n_positions), torch.ones(n_positions)]).long()
    ids = torch.cat([ids, torch.full((1, n_positions), own)])
    thresholds = torch.stack([lens[..., 0], lens[..., 1]]).contiguous()
    reduction = kind(top_k=top_k, ids=ids, thresholds=thresholds)
    for first in range(0, lens.shape[-1], tile):
        part = slice(first, first + tile)
        reduction.update(first, lens[..., part].contiguous(), final[..., part].contiguous())
    return reduction.sums()


def test_powers_of_two_are_right_to_two_units_in_the_last_place():
    bits = np.linspace(UNDERFLOW_BITS + 0.01, 0, 4096, dtype=np.float32)
    logits = (bits.astype(np.float64) / LOG2_E).astype(np.float32)
    powers = np.empty_like(logits)
    kernels._weigh(logits[None, None], 0, 0, 0.0, powers, -1)
    # The logit's own rounding moves the exponent by up to |t| 2^-24 ln 2; what is left is ours.
    exact = np.exp2(logits.astype(np.float64) * LOG2_E)
    rounding = np.abs(bits) * 2.0**-24 * np.log(2) + 2 * 2.0**-23
    assert (np.abs(powers / exact - 1) <= rounding).all()
    assert powers[-1] == 1.0
    assert np.abs(powers * 1.00001 / exact - 1)[-1] > rounding[-1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
def test_sums_of_a_tile_equal_those_in_float64(kind, width):
    lens, final = logits_of((2, 3, width)), logits_of((3, width), seed=1)
    sums = reduced(kind, lens.clone(), final.clone())
    z, zf = lens.double().numpy() * sums.scale, final.double().numpy()
    offset = sums.lens[..., OFFSET]
    t = z - offset[..., None]
    weights = np.exp2(zf * sums.scale - sums.final[:, OFFSET][:, None])
    close = np.testing.assert_allclose
    close(sums.lens[..., TOTAL], np.exp2(t).sum(-1), rtol=1e-6)
    close(sums.lens[..., MOMENT], (np.exp2(t) * t).sum(-1), rtol=1e-5, atol=1e-6)
    close(sums.lens[..., SQUARES], np.exp2(2 * t).sum(-1), rtol=1e-6)
    close(sums.final[:, TOTAL], weights.sum(-1), rtol=1e-6)
    crossed = (weights * (zf - lens.double().numpy())).sum(-1)
    close(sums.lens[..., FINAL_CROSS], crossed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_the_size_of_a_block_changes_no_bit(rows, monkeypatch):
    lens, final = logits_of((4, 3, 1100)), logits_of((3, 1100), seed=1)

    def bits(states, cached):
        monkeypatch.setattr(eager, "CACHED_LOGITS", cached)
        sums = reduced(TorchReduction, states.clone(), final.clone(), tile=1024, own=1050)
        return [sums.lens, sums.final, sums.above, sums.top_values, sums.top_ids]

    whole = bits(lens, 2**20)
    for one, other in zip(bits(lens, rows * 1024), whole, strict=True):
        assert np.array_equal(one, other)
    assert not np.array_equal(bits(lens * (1 + 1e-6), rows * 1024)[0], whole[0])


@pytest.mark.parametrize("width", [3000, 2061])
@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
def test_tiles_add_up_to_the_whole(kind, width):
    lens, final = logits_of((2, 3, width)), logits_of((3, width), seed=1)
    # The second tile holds the maximum: older sums must shrink.
    lens[0, 0, 1500], final[1, 1600] = 60.0, 70.0
    numbers = reduced(kind, lens.clone(), final.clone()).in_bits(np.zeros((2, 3), dtype=bool))
    p = np.broadcast_to(final.numpy(), lens.shape)
    close = np.testing.assert_allclose
    close(numbers["entropy_bits"], metrics.entropy_bits(lens.numpy()), atol=2e-5)
    close(numbers["kl_bits"], metrics.kl_bits(p, lens.numpy()), rtol=2e-5, atol=2e-5)
    close(numbers["lse_bits"], metrics.lse_bits(lens.numpy()), rtol=1e-6)
    assert np.array_equal(numbers["top_ids"], metrics.top_ids(lens.numpy(), 3))


@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
def test_ties_go_to_the_lower_id_and_a_token_never_beats_itself(kind):
    lens = torch.zeros(1, 1, 2100)
    lens[0, 0, [5, 70, 1500]] = 2.0
    lens[0, 0, [40, 1030]] = 1.0
    lens[0, 0, 0], lens[0, 0, 1] = 1.0, 2.0
    sums = reduced(kind, lens.clone(), lens[0].clone(), top_k=7)
    assert sums.top_ids[0, 0].tolist() == [1, 5, 70, 1500, 0, 40, 1030]
    assert sums.above[:, 0, 0].tolist() == [4, 0]
    assert sums.final_top_ids.tolist() == [1]


@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
def test_minus_infinity_fills_the_last_places_by_id(kind):
    lens = torch.full((1, 1, 200), -torch.inf)
    lens[0, 0, 150] = 1.0
    sums = reduced(kind, lens.clone(), lens[0].clone(), top_k=4)
    assert sums.top_ids[0, 0].tolist() == [150, 0, 1, 2]
    numbers = sums.in_bits(np.zeros((1, 1), dtype=bool))
    # -inf stands at UNDERFLOW_BITS: 199 tokens of 2^-62 with 62 bits each are left.
    assert numbers["entropy_bits"][0, 0] <= 199 * 64 * 2.0**-62
    assert numbers["kl_bits"][0, 0] == 0


@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_has_no_numbers(kind, bad):
    lens, final = logits_of((2, 3, 1200)), logits_of((3, 1200), seed=1)
    if bad == -torch.inf:
        lens[1, 1] = bad
    else:
        lens[1, 1, 1100] = bad
    numbers = reduced(kind, lens.clone(), final).in_bits(np.zeros((2, 3), dtype=bool))
    empty = np.isnan(numbers["entropy_bits"])
    assert empty.tolist() == [[False] * 3, [False, True, False]]
    assert (numbers["top_ids"][1, 1] == -1).all()
    assert not np.isnan(numbers["kl_bits"][~empty]).any()


@pytest.mark.parametrize("kind", [FusedReduction, TorchReduction])
def test_what_is_left_beside_a_certain_own_token_is_exact(kind):
    lens, final = logits_of((1, 2, 1500), spread=1.0), logits_of((2, 1500), seed=1, spread=1.0)
    lens[..., 1200], final[..., 1200] = 60.0, 40.0
    ids = np.full((1, 2), 1200)
    sums = reduced(kind, lens.clone(), final.clone(), own=1200)
    numbers = sums.in_bits(np.zeros((1, 2), dtype=bool))
    close = np.testing.assert_allclose
    close(numbers["rest_lse_bits"], metrics.rest_lse_bits(lens.numpy(), ids), rtol=1e-6)
    p = np.broadcast_to(final.numpy(), lens.shape)
    copied, rest = metrics.copy_split_bits(p, lens.numpy(), ids)
    close(numbers["copy_kl_bits"], copied, rtol=1e-5, atol=1e-13)
    close(numbers["kl_bits"], copied + rest, rtol=1e-5, atol=1e-12)
    # Taken as 1 - q(x) in float32, the same quantity would be 0.
    assert (np.float32(1) - numbers["self_copy_mass"].astype(np.float32)).max() == 0
    assert (numbers["rest_lse_bits"] - numbers["lse_bits"] < -50).all()


def test_the_best_of_rows_are_found_tile_by_tile():
    logits = logits_of((4, 2500)).numpy()
    values = np.full((4, 6), -np.inf, dtype=np.float32)
    tokens = np.full((4, 6), NOT_FOUND)
    for first in range(0, 2500, 1024):
        part = np.ascontiguousarray(logits[:, first : first + 1024])
        kernels.best_of_tile(first, part[None], values[None], tokens[None])
    assert np.array_equal(tokens, metrics.top_ids(logits, 6))


@pytest.mark.slow
def test_kernels_compile_where_no_folder_can_be_written():
    code = (
        "import numba.core.caching as c\n"
        "c.FunctionCache._impl_class._locator_classes = []\n"
        "from lens.lenses import kernels; import numpy as np\n"
        "print(kernels._power(np.float32(-3)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "0.125", done.stderr
