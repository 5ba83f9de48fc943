"""The proof must reject every fault that this field's tools are known for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lens.checkpoint.proof import take_apart
from lens.checkpoint.readout import DirectReadout, Step, Unembedding
from lens.errors import ShapeError, UnprovedReadoutError, UnsupportedArchitectureError
from tests.checkpoint.test_exactness import checkpoint
from tests.checkpoint.tiny import BY_NAME


def direct(model: Any) -> DirectReadout:
    readout = checkpoint(model).readout
    assert isinstance(readout, DirectReadout)
    return readout


def _doubled_norm(r: DirectReadout) -> DirectReadout:
    return dataclasses.replace(r, preparation=(r.preparation[0], *r.preparation))


def _no_norm(r: DirectReadout) -> DirectReadout:
    return dataclasses.replace(r, preparation=())


def _norm_with_unit_gain(r: DirectReadout) -> DirectReadout:
    norm: Callable[[Tensor], Tensor] = nn.LayerNorm(r.d_model)
    return dataclasses.replace(r, preparation=(norm,))


def _no_bias(r: DirectReadout) -> DirectReadout:
    return dataclasses.replace(r, unembedding=dataclasses.replace(r.unembedding, bias=None))


def _no_steps(r: DirectReadout) -> DirectReadout:
    return dataclasses.replace(r, unembedding=dataclasses.replace(r.unembedding, steps=()))


def _no_preparation_scale(r: DirectReadout) -> DirectReadout:
    return dataclasses.replace(r, preparation=r.preparation[:1])


FAULTS = [
    ("llama", _doubled_norm),
    ("gpt2", _doubled_norm),
    ("gpt2", _norm_with_unit_gain),
    ("llama", _no_norm),
    ("phi", _no_bias),
    ("bert", _no_bias),
    ("cohere", _no_steps),
    ("granite", _no_steps),
    ("gemma2", _no_steps),
    ("nanochat", _no_steps),
    ("bart", _no_steps),
    ("marian", _no_steps),
    ("minicpm3", _no_preparation_scale),
    ("t5", _no_preparation_scale),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_faulty_readout_is_rejected(
    name: str, fault: Callable[[DirectReadout], DirectReadout]
) -> None:
    model = BY_NAME[name].build()
    with pytest.raises(UnprovedReadoutError, match="is not the model's: at "):
        checkpoint(model, readout=fault(direct(model)))


@pytest.mark.parametrize("name", sorted({name for name, _ in FAULTS}))
def test_the_same_readout_without_the_fault_passes(name: str) -> None:
    model = BY_NAME[name].build()
    own = direct(model)
    assert checkpoint(model, readout=own).readout is own


def test_a_norm_that_the_model_lacks_is_rejected_at_the_random_state() -> None:
    # An OPT without final norm whose last state is normed already: there the wrong norm is right.
    model = BY_NAME["opt_without_final_norm"].build()
    norm = nn.LayerNorm(64, elementwise_affine=False)
    wrong = dataclasses.replace(direct(model), preparation=(norm,))
    with pytest.raises(UnprovedReadoutError):
        checkpoint(model, readout=wrong)


def test_the_last_state_alone_would_let_a_wrong_norm_pass() -> None:
    model = BY_NAME["llama"].build()
    proved = take_apart(model, seq2seq=False)
    last = proved.witness.last_state

    class Remembering:
        """Right at the one state that it has seen, and a doubled norm elsewhere."""

        kind, d_vocab = "by hand", proved.replay.d_vocab

        def logits(self, states: Tensor) -> Tensor:
            right = proved.readout
            assert isinstance(right, DirectReadout)
            return (
                right.logits(states)
                if torch.equal(states, last)
                else _doubled_norm(right).logits(states)
            )

    fake = Remembering()
    assert torch.equal(fake.logits(last), proved.witness.logits)
    with pytest.raises(UnprovedReadoutError, match="a random state"):
        checkpoint(model, readout=fake)


class _Leaky(nn.Module):
    """A language model whose tail adds the embedding of its input ids again."""

    def __init__(self, model: Any, *, leak: bool) -> None:
        super().__init__()
        self.inner, self.config, self.leak = model, model.config, leak

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: Tensor, return_dict: bool = True) -> Any:
        out = self.inner(input_ids=input_ids, use_cache=False)
        if self.leak:
            first = self.inner.model.layers[0].input_layernorm(
                self.inner.get_input_embeddings()(input_ids)
            )
            out.logits = out.logits + first.sum(-1, keepdim=True)
        return out


def test_a_tail_that_reads_the_ids_again_is_told_apart_and_never_read_without_them() -> None:
    leaky = checkpoint(_Leaky(BY_NAME["llama"].build(), leak=True))
    assert leaky.replay.ids_matter
    assert leaky.readout.kind == "replay"
    with pytest.raises(Exception, match="reads its input ids again"):
        leaky.read(torch.randn(3, 64))
    plain = checkpoint(_Leaky(BY_NAME["llama"].build(), leak=False))
    assert not plain.replay.ids_matter


class _Skipping(nn.Module):
    """A language model whose logits need the first block's output beside the last one's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: Tensor, return_dict: bool = True) -> Any:
        seen: list[Tensor] = []
        first = self.inner.model.layers[0]
        handle = first.register_forward_hook(lambda m, a, out: seen.append(out))
        try:
            out = self.inner(input_ids=input_ids, use_cache=False)
        finally:
            handle.remove()
        if seen:
            state = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
            out.logits = out.logits + self.inner.lm_head(state)
        return out


def test_a_tail_that_reads_an_earlier_block_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="Missing step: replay"):
        checkpoint(_Skipping(BY_NAME["llama"].build()))


class _NoStack(nn.Module):
    """A language model without any block list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.config = nn.Embedding(50, 8), BY_NAME["gpt2"].build().config

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Any:
        return {"logits": self.embed(input_ids) @ self.embed.weight.T}


def test_a_model_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="Missing step: the trunk"):
        checkpoint(_NoStack())


def test_an_unembedding_step_prints_what_it_does() -> None:
    steps = (Step("div", 30.0), Step("tanh"), Step("mul", 30.0))
    readout = DirectReadout((), Unembedding(torch.zeros(5, 3), torch.zeros(5), steps), 3)
    assert readout.describe() == "W_U + b_U -> div 30 -> tanh -> mul 30"


class _Mixing(_Leaky):
    """A tail in which each position's logits are summed with those before it."""

    def forward(self, input_ids: Tensor, return_dict: bool = True) -> Any:
        out = self.inner(input_ids=input_ids, use_cache=False)
        out.logits = out.logits.cumsum(1) if self.leak else out.logits.tanh()
        return out


def test_a_tail_that_mixes_positions_is_read_whole_or_not_at_all() -> None:
    mixing = checkpoint(_Mixing(BY_NAME["llama"].build(), leak=True))
    assert mixing.replay.rows_mix
    assert not mixing.replay.ids_matter
    ids = [4, 5, 6, 7, 8]
    with torch.no_grad():
        own = mixing.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    whole, part = mixing.logit_lens(ids), mixing.logit_lens(ids, positions=[-1, 1])
    assert whole.top_ids[-1, :, 0].tolist() == own.argmax(-1).tolist()
    assert part.positions.tolist() == [4, 1]
    assert np.array_equal(part.top_ids, whole.select(positions=[4, 1]).top_ids)
    assert np.array_equal(part.kl_bits, whole.select(positions=[4, 1]).kl_bits)
    with pytest.raises(ShapeError, match="mixes positions"):
        mixing.read(torch.randn(3, 64))
    plain = checkpoint(_Mixing(BY_NAME["llama"].build(), leak=False))
    assert not plain.replay.whole_prompts


def test_a_whole_prompt_is_read_at_once_where_its_logits_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lens.lenses.chunks.REPLAY_BYTES", 64)
    mixing = checkpoint(_Mixing(BY_NAME["llama"].build(), leak=True))
    leaky = checkpoint(_Leaky(BY_NAME["llama"].build(), leak=True))
    for point in (mixing, leaky):
        found = point.logit_lens([4, 5, 6, 7, 8], positions=[2])
        with torch.no_grad():
            own = point.model(torch.tensor([[4, 5, 6, 7, 8]])).logits[0, 2]
        assert found.top_ids[-1, 0, 0] == int(own.argmax())
        assert found.kl_bits[-1, 0] == pytest.approx(0, abs=1e-6)
