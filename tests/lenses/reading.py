"""A readout made by hand, random states, and their logits in float64."""

from types import SimpleNamespace

import numpy as np
import torch

from lens.checkpoint.readout import DirectReadout, Step, Unembedding
from lens.lenses.projection import project
from lens.measuring import metrics

V, D, L, T = 1500, 24, 5, 37
SOFT_CAP = (Step("div", 40.0), Step("tanh"), Step("mul", 40.0))


def make_readout(seed=0, *, steps=(), bias=True, dtype=torch.float32, d_vocab=V):
    """A norm of gain 3 and an unembedding whose logits spread like a trained model's."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_vocab, D, generator=generator).to(dtype)
    offset = torch.randn(d_vocab, generator=generator).to(dtype) if bias else None

    def prepare(states):
        return torch.nn.functional.rms_norm(states, states.shape[-1:]) * 3.0

    return DirectReadout((prepare,), Unembedding(weight, offset, steps), D)


def make_replay(direct):
    """The same readout, giving whole logits for one layer at a time only."""

    def logits(states, inputs=None):
        assert states.ndim == 3
        assert states.shape[0] == 1
        return direct.logits(states)

    return SimpleNamespace(kind="replay", d_vocab=direct.d_vocab, logits=logits)


def make_states(n_positions=T):
    return torch.randn(L, n_positions, D, generator=torch.Generator().manual_seed(1))


def tokens(seed, n_positions=T):
    """Token ids, none at the last position."""
    ids = torch.randint(0, V, (n_positions,), generator=torch.Generator().manual_seed(seed))
    ids[-1] = -1
    return ids


def read(readout, states, **options):
    given = {
        "final_states": states[-1],
        "input_ids": tokens(2, states.shape[1]),
        "target_ids": tokens(3, states.shape[1]),
        "sets": ((1, 5, 9), (7,)),
    } | options
    return project(readout, states, **given)


def exact_logits(readout, states):
    """The logits in float64, from the same prepared rows."""
    unembedding = readout.unembedding
    logits = readout.prepare(states).double() @ unembedding.weight.double().T
    if unembedding.bias is not None:
        logits = logits + unembedding.bias.double()
    for step in unembedding.steps:
        logits = step.apply(logits)
    return logits.detach().numpy()


def assert_equals_oracle(result, lens, final):
    """Every number against metrics.py; bounds are the project's own, relative to float64."""
    final = np.broadcast_to(final, lens.shape)
    inputs, targets = (np.broadcast_to(tokens(s).numpy(), lens.shape[:2]) for s in (2, 3))
    known = (slice(None), slice(0, -1))
    close = np.testing.assert_allclose
    close(result.entropy_bits, metrics.entropy_bits(lens), rtol=0, atol=5e-5)
    close(result.lse_bits, metrics.lse_bits(lens), rtol=2e-6, atol=1e-5)
    close(result.kl_bits, metrics.kl_bits(final, lens), rtol=5e-5, atol=5e-5)
    close(result.reverse_kl_bits, metrics.kl_bits(lens, final), rtol=5e-5, atol=5e-5)
    close(result.collision_mass, metrics.collision_mass(lens), rtol=2e-5)
    crossed = metrics.cross_entropy_bits(lens[known], targets[known])
    close(result.target_logprob_bits[known], -crossed, rtol=0, atol=5e-5)
    close(result.brier[known], metrics.brier(lens[known], targets[known]), rtol=0, atol=1e-5)
    copied = metrics.self_copy_mass(lens[known], inputs[known])
    close(result.self_copy_mass[known], copied, rtol=5e-5, atol=1e-30)
    rest = metrics.rest_lse_bits(lens[known], inputs[known])
    close(result.rest_lse_bits[known], rest, rtol=2e-6, atol=1e-5)
    assert np.array_equal(result.top_ids, metrics.top_ids(lens, 5))
    assert np.array_equal(result.target_rank[known], metrics.rank(lens, targets.clip(0))[known])
    top = final.argmax(-1)
    assert np.array_equal(result.final_top_ids, top[0])
    assert np.array_equal(result.final_top_rank, metrics.rank(lens, top))
    close(result.final_top_logprob_bits, -metrics.cross_entropy_bits(lens, top), atol=5e-5)
    copied, _ = metrics.copy_split_bits(final[known], lens[known], inputs[known])
    close(result.copy_kl_bits[known], copied, rtol=5e-5, atol=5e-5)
    if result.set_logprob_bits is not None:
        close(result.set_logprob_bits[0], metrics.set_logprob_bits(lens, (1, 5, 9)), atol=5e-5)
    assert np.isnan(result.target_logprob_bits[:, -1]).all()
    assert (result.target_rank[:, -1] == -1).all()
    assert np.isnan(result.self_copy_mass[:, -1]).all()
