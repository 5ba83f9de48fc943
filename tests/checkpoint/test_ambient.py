"""What surrounds a call (autocast, inference mode, defaults, threads) moves nothing."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import nn

import lens
from lens.checkpoint import untouched as untouched_module
from lens.checkpoint.checkpoint import Checkpoint
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME
from tests.measuring.small import id_corpus

IDS = [5, 6, 7, 8, 9, 10, 11]
TEXTS, FIT = id_corpus(4, 16), id_corpus(4, 16, seed=1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "another device by default": lambda: torch.device("meta"),
}

USES: dict[str, Callable[[Checkpoint], Any]] = {
    "a prompt": lambda m: m.logit_lens(IDS).entropy_bits,
    "vectors": lambda m: m.read(m.residual_states(IDS)).entropy_bits,
    "measure": lambda m: lens.measure(m, TEXTS, fit_on=FIT, sample_positions=8).mean("kl_bits"),
    "tune": lambda m: lens.tune(m, FIT, steps=2, positions=16).weight,
    "jacobian": lambda m: lens.fit_jacobian(m, FIT, first_position=2).weight,
    "attribution": lambda m: lens.attribution(m, IDS).parts,
    "gradients": lambda m: lens.gradients(m, TEXTS).norms,
    "geometry": lambda m: lens.geometry(m).values,
    "causal fidelity": lambda m: (
        lens.causal_fidelity(m, TEXTS, n_directions=3, max_windows=1, max_steps=1).lens_bits
    ),
    "decompose": lambda m: (
        lens.decompose(
            m, TEXTS, fit_on=FIT, positions=16, fit_positions=16, max_steps=1
        ).fit_kl_bits
    ),
}


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return checkpoint(BY_NAME["gpt2"].build(tied=False))


@pytest.fixture(scope="module")
def expected(model: Checkpoint) -> dict[str, Any]:
    return {name: np.asarray(of(model)) for name, of in USES.items()}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_a_call_gives_what_it_gives_alone(
    surrounding: str, model: Checkpoint, expected: dict[str, Any]
) -> None:
    for use, of in USES.items():
        with SURROUNDINGS[surrounding]():
            found = of(model)
        np.testing.assert_allclose(np.asarray(found), expected[use], atol=1e-5, err_msg=use)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_a_model_is_taken_apart_there_too(surrounding: str) -> None:
    built = BY_NAME["llama"].build(tied=True)
    with SURROUNDINGS[surrounding]():
        found = lens.load(built)
        assert found.tie.is_tied
        assert found.lookup_scale == pytest.approx(1.0)
    assert found.readout.kind == "direct"
    np.testing.assert_array_equal(
        found.logit_lens(IDS).kl_bits, checkpoint(built).logit_lens(IDS).kl_bits
    )


def read_by_threads(point: Checkpoint, expected: Any) -> list[bool]:
    """Of three threads that read a prompt ten times each, which readings were right."""
    right: list[bool] = []

    def _read() -> None:
        for _ in range(10):
            try:
                found = point.logit_lens(IDS).entropy_bits
            except lens.LensError:
                right.append(False)
            else:
                right.append(bool(np.abs(found - expected).max() < 1e-3))

    threads = [threading.Thread(target=_read) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return right


def replayed() -> Checkpoint:
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"])
    point = checkpoint(peft.get_peft_model(BY_NAME["llama"].build(tied=False), config).eval())
    assert point.readout.kind == "replay"
    return point


@pytest.mark.parametrize("build", [replayed, lambda: checkpoint(BY_NAME["gpt2"].build())])
def test_one_model_is_read_by_several_threads(build: Callable[[], Checkpoint]) -> None:
    point = build()
    own = {id(m): dict(vars(m)) for m in point.model.modules()}
    expected = point.logit_lens(IDS).entropy_bits
    assert read_by_threads(point, expected) == [True] * 30
    for module in point.model.modules():
        assert vars(module).keys() == own[id(module)].keys()


class NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: Any) -> None: ...


def test_without_the_lock_threads_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched_module, "RLock", NoLock)
    point = replayed()
    assert not all(read_by_threads(point, point.logit_lens(IDS).entropy_bits))


def test_least_logits_do_not_make_a_causal_model_a_masked_one() -> None:
    for least in (-torch.inf, float(torch.finfo(torch.float32).min)):
        mask = torch.zeros(160)
        mask[150:] = least

        def _never(module: nn.Module, args: Any, out: Any, mask: Any = mask) -> Any:
            return torch.where(mask < 0, mask, out)

        for name, causal in (("llama", True), ("bert", False)):
            model = BY_NAME[name].build()
            head = model.get_output_embeddings()
            head.register_forward_hook(_never)
            point = checkpoint(model)
            assert point.causal is causal
            assert point.target == ("next" if causal else "same")


def test_router_logits_that_a_config_asks_for_are_left_out() -> None:
    config = transformers.MixtralConfig(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True,
    )  # fmt: skip
    point = checkpoint(transformers.MixtralForCausalLM(config).eval())
    assert point.readout.kind == "direct"
    assert (point.logit_lens(IDS).kl_bits[-1] == 0).all()


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.logit_scale
        return out


@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_learned_scale_of_one_number_is_read(shape: tuple[int, ...]) -> None:
    config = BY_NAME["llama"].build().config
    model = Scaled(config).eval()
    model.logit_scale = nn.Parameter(torch.full(shape, 0.7))
    point = checkpoint(model)
    assert point.readout.kind == "direct"
    assert "mul 0.7" in point.summary().readout_steps
    with torch.no_grad():
        own = model(torch.tensor([IDS])).logits[0]
    entropy = torch.distributions.Categorical(logits=own).entropy() / np.log(2)
    np.testing.assert_allclose(point.logit_lens(IDS).entropy_bits[-1], entropy, atol=1e-5)
