from typing import Any

import numpy as np
import pytest

from lens.measuring.comparison import Comparison, Side, compared
from lens.trust.intervals import complement
from lens.trust.reasons import KINDS, Reason, reasons
from lens.trust.verdict import verdicts
from lens.trust.words import (
    comparison_headline,
    comparison_lines,
    reason_line,
    why_not_before,
)
from tests.trust.made import profile

KL = [30.0, 9.0, 6.0, 3.0, 1.2, 0.3, 0.0]
LOW = [0.1] * 6


def found(key: str, *, left: list[float] | None = None, **options: object) -> Reason:
    whole = profile(**{"kl": KL, **options})  # type: ignore[arg-type]
    translated = None if left is None else profile(kl=left, seed=1)
    return next(r for r in reasons(whole, translated) if r.kind.key == key)


def one_high(layer: int) -> list[float]:
    return [0.9 if at == layer else 0.1 for at in range(6)]


@pytest.mark.parametrize(
    ("key", "option"), [("copying", "copies"), ("marginal", "marginal"), ("temperature", "cooled")]
)
def test_a_reason_is_given_at_the_layer_that_has_it_and_at_no_other(key: str, option: str) -> None:
    assert found(key, **{option: [*one_high(2), 0.0]}).layers() == [2]
    # The twin: without the cause the reason is not given.
    assert found(key, **{option: [*LOW, 0.0]}).layers() == []


def test_what_the_translator_takes_away_is_another_basis_and_the_rest_is_not_there_yet() -> None:
    left = [29.0, 8.0, 5.0, 0.5, 0.2, 0.1, 0.0]
    assert found("basis", left=left).layers() == [3, 4, 5]
    assert found("representation", left=left).layers() == [0, 1, 2]


def test_half_is_neither_more_nor_less() -> None:
    half = found("copying", copies=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0], spread=0.1)
    assert half.states[0] == "undecided"
    assert half.layers() == []
    assert "undecided at layer 0" in reason_line(half).lower()


def test_what_was_not_measured_says_why() -> None:
    assert found("basis").found is None
    assert "no translator" in reason_line(found("basis"))
    masked = found("copying", copies=[0.9] * 6 + [0.0], target="same")
    assert masked.layers() == []
    assert "masked" in reason_line(masked)


def test_the_two_parts_of_the_distance_add_up_to_one() -> None:
    left = [29.0, 8.0, 5.0, 0.5, 0.2, 0.1, 0.0]
    basis, rest = (found(key, left=left).found for key in ("basis", "representation"))
    assert basis is not None
    assert rest is not None
    np.testing.assert_allclose(basis.estimate + rest.estimate, 1.0)
    np.testing.assert_allclose(rest.band_low, complement(basis).band_low)
    assert (rest.low <= rest.estimate).all()


def test_the_sentence_names_the_reasons_of_the_refuted_layers_alone() -> None:
    whole = profile(kl=KL, copies=[1.0, 0.9, 0.1, 0.1, 0.1, 0.1, 0.0])
    sentence = why_not_before(verdicts(whole), reasons(whole, None))
    # Layer 0 copies too, but stands in no headline; layer 5 is trusted.
    assert sentence == (
        "Why not before: at layer 1 the lens mostly repeats the token that stands there."
    )
    plain = profile(kl=KL)
    assert why_not_before(verdicts(plain), reasons(plain, None)) == (
        "At layers 1 to 4 no reason that was measured stands out; not measured: another basis, "
        "not there yet."
    )
    near = profile(kl=[0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.0])
    assert "No layer" in why_not_before(verdicts(near), reasons(near, None))


def differing(first: list[float], second: list[float], **options: Any) -> Comparison:
    sides = [
        Side(name=name, output=profile(kl=kl, **options), through_input=None, translated=None)
        for name, kl in (("a", first), ("b", second))
    ]
    return compared(*sides, confounds=())


def test_the_headline_of_two_says_which_reads_worse_or_that_it_is_undecided() -> None:
    lower = [0.5 * k for k in KL]
    assert comparison_headline(differing(lower, KL)).startswith("The lens of b is off (KL) ")
    assert " more than that of a" in comparison_headline(differing(lower, KL))
    assert " less than that of a" in comparison_headline(differing(KL, lower))
    assert "read alike" in comparison_headline(differing(KL, KL))
    # The twin: the two differ, but by no more than their documents do.
    near = [1.01 * k for k in KL]
    sides = [
        Side(name=n, output=profile(kl=kl, seed=s, spread=0.5), through_input=None, translated=None)
        for n, kl, s in (("a", KL, 1), ("b", near, 2))
    ]
    unsure = compared(*sides, confounds=())
    assert "is undecided" in comparison_headline(unsure)
    assert "the sign is undecided" in comparison_lines(unsure)[0]


def test_every_kind_has_words() -> None:
    assert [r.kind for r in reasons(profile(kl=KL), profile(kl=KL))] == list(KINDS)
