"""A readout made by hand, random states, and their logits in float64."""

from types import SimpleNamespace

import torch

from lens.checkpoint.readout import DirectReadout, Step, Unembedding
from lens.lenses.projection import project

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
    return logits.numpy()
