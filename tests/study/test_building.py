import math
from typing import Any

import pytest
import torch

from lens.errors import SelectionError
from lens.study.arms import ARMS, Arm, arm_of
from lens.study.building import build, matrices
from tests.study.small import RECIPE

IDS = torch.arange(12).reshape(2, 6)


def model(name: str, seed: int = 0) -> Any:
    return build(arm_of(name), RECIPE, seed)


def logits(of: Any) -> torch.Tensor:
    with torch.no_grad():
        return of(input_ids=IDS).logits


PREFIXES = ("", "granite-", "scaled-", "biased-", "layernorm-", "rmsnorm-")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_untied_copy_is_the_tied_function_at_step_0(prefix: str) -> None:
    tied, copied = model(f"{prefix}tied"), model(f"{prefix}untied-copy")
    assert torch.equal(logits(tied), logits(copied))
    W_E, W_U = matrices(copied)
    assert W_E is not W_U
    assert matrices(tied)[0] is matrices(tied)[1]
    assert not torch.equal(logits(tied), logits(model(f"{prefix}tied", seed=1)))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_unembedding_of_its_own_shifts_no_other_tensor(prefix: str) -> None:
    copied, own = model(f"{prefix}untied-copy"), model(f"{prefix}untied-own")
    W_E, W_U = matrices(own)
    assert not torch.equal(W_E, W_U)
    assert float((W_U.std() / W_E.std()).detach()) == pytest.approx(1.0, rel=0.05)
    theirs = dict(copied.named_parameters())
    differing = [n for n, p in own.named_parameters() if not torch.equal(p, theirs[n])]
    assert len(differing) == 1
    assert own.get_parameter(differing[0]) is W_U


def test_a_tie_saves_one_matrix_and_the_matched_arm_spends_as_much() -> None:
    def size(name: str) -> int:
        return sum(p.numel() for p in model(name).parameters())

    saved = RECIPE.d_vocab * RECIPE.d_model
    assert size("untied-copy") - size("tied") == saved
    # An MLP gains biases too: one for each new unit.
    gained = size("tied-matched") - size("tied")
    assert gained == pytest.approx(saved, rel=0.05)


def test_a_scaled_lookup_begins_with_states_of_size_1() -> None:
    scaled, plain = model("scaled-tied"), model("granite-tied")
    assert float(matrices(scaled)[0].detach().std()) == pytest.approx(
        1 / math.sqrt(RECIPE.d_model), rel=0.05
    )
    assert scaled.config.embedding_multiplier == math.sqrt(RECIPE.d_model)
    assert plain.config.embedding_multiplier == 1.0


def test_the_biased_arm_has_a_bias_on_its_logits_and_the_others_have_none() -> None:
    assert model("biased-tied").get_output_embeddings().bias is not None
    assert model("tied").get_output_embeddings().bias is None


def test_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    model("untied-own")
    assert torch.equal(before, torch.get_rng_state())


def test_wrong_arms_are_refused() -> None:
    with pytest.raises(SelectionError, match="untied-copy"):
        arm_of("untied")
    with pytest.raises(SelectionError, match="two"):
        Arm(name="x", start="tied", mixing=(1.0, 1.0))
    assert all(name == arm.name for name, arm in ARMS.items())
