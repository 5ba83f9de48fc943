"""KL and its gradient by streaming equal the oracle's and autograd's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lens.checkpoint.readout import Step, Unembedding
from lens.lenses.divergence import FinalRows, divergence, mean_lens
from lens.measuring import metrics

V, D, P = 300, 16, 9
CAP = (Step("mul", 0.5), Step("div", 3.0), Step("tanh"), Step("mul", 3.0))


def unembedding(steps: tuple[Step, ...] = ()) -> Unembedding:
    generator = torch.Generator().manual_seed(0)
    return Unembedding(
        torch.randn(V, D, generator=generator), torch.randn(V, generator=generator), steps
    )


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def bias() -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(9))


def logits(u: Unembedding, x: torch.Tensor, temperature: float, b: torch.Tensor) -> torch.Tensor:
    z = x @ u.weight.double().T + u.bias.double()
    for step in u.steps:
        z = step.apply(z)
    return z / temperature + b.double()


@pytest.mark.parametrize("steps", [(), CAP])
@pytest.mark.parametrize("keep_bytes", [0, 2**30])
def test_kl_is_the_oracles_and_the_gradients_are_autograds(
    steps: tuple[Step, ...], keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lens.lenses.divergence.AT_ONCE_FLOATS", 4 * V)  # several chunks
    u, final, lens = unembedding(steps), rows(1, P), rows(2, 2, P)
    kept = FinalRows(u, final, keep_bytes=keep_bytes)
    for _ in range(2):  # the second pass takes what the first kept
        found = divergence(u, lens, kept, temperature=1.7, bias=bias())
    x = lens.double().requires_grad_()
    tau = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    b = bias().double().requires_grad_()
    zf = logits(u, final.double(), 1.0, torch.zeros(V))
    z = logits(u, x, tau, b)  # type: ignore[arg-type]
    log_p, log_q = zf.log_softmax(-1), z.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) / np.log(2)
    exact = metrics.kl_bits(np.broadcast_to(zf.numpy(), z.shape), z.detach().numpy())
    np.testing.assert_allclose(found.kl_bits.numpy(), exact, rtol=1e-5, atol=1e-5)
    pull, of_tau, of_bias = torch.autograd.grad(kl.sum(), (x, tau, b))
    torch.testing.assert_close(found.pull.double(), pull, rtol=1e-4, atol=1e-4)
    assert found.temperature_pull == pytest.approx(float(of_tau), rel=1e-4)
    assert found.bias_pull is not None
    torch.testing.assert_close(found.bias_pull.double(), of_bias, rtol=1e-4, atol=1e-4)


def test_the_slope_of_the_cap_is_in_the_gradient() -> None:
    u, final, lens = unembedding(CAP), rows(1, P), rows(2, 1, P)
    right = divergence(u, lens, FinalRows(u, final)).pull
    # The same logits behind a step whose slope is taken for 1 give another gradient.
    p = torch.softmax(u.logits(final), -1)
    q = torch.softmax(u.logits(lens[0]), -1)
    without = (q - p) @ u.weight / np.log(2)
    assert float((right[0] - without).norm() / right.norm()) > 0.1


def test_tokens_that_are_kept_out_do_not_spoil_it() -> None:
    u = unembedding()
    mask = torch.zeros(V)
    mask[5:20] = -torch.inf
    masked = replace(u, steps=(Step("add", mask),))
    without = Unembedding(
        torch.cat([u.weight[:5], u.weight[20:]]),
        None if u.bias is None else torch.cat([u.bias[:5], u.bias[20:]]),
    )
    final, lens = rows(1, P), rows(2, 1, P)
    found = divergence(masked, lens, FinalRows(masked, final), bias=torch.zeros(V))
    plain = divergence(without, lens, FinalRows(without, final))
    torch.testing.assert_close(found.kl_bits, plain.kl_bits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.pull, plain.pull, rtol=1e-4, atol=1e-5)
    assert found.bias_pull is not None
    assert not found.bias_pull[5:20].any()


def test_means_are_the_means_of_whole_distributions() -> None:
    u, x = unembedding(CAP), rows(3, P)
    whole = logits(u, x.double(), 2.0, bias()).softmax(-1).mean(0)
    torch.testing.assert_close(
        mean_lens(u, x, temperature=2.0, bias=bias()), whole, rtol=1e-5, atol=1e-7
    )
    mean = FinalRows(u, x).mean()
    expected = logits(u, x.double(), 1.0, torch.zeros(V)).softmax(-1).mean(0)
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-7)


def test_without_a_pull_only_kl_is_there() -> None:
    u, final, lens = unembedding(), rows(1, P), rows(2, 1, P)
    full = divergence(u, lens, FinalRows(u, final))
    lean = divergence(u, lens, FinalRows(u, final), with_pull=False)
    assert torch.equal(full.kl_bits, lean.kl_bits)
    assert not lean.pull.any()
