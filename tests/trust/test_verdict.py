import numpy as np
import pytest

from lens.measuring.statistics import Interval, bootstrap
from lens.trust.evidence import (
    confidence_gap,
    marginal_share,
    of_folds,
    reading_loss_share,
    skill_by_layer,
    temperature_share,
    usefulness_by_layer,
)
from lens.trust.uses import USES
from lens.trust.verdict import (
    Crossing,
    UseVerdict,
    crossing_of,
    layers_in_words,
    states_of,
    verdicts,
)
from tests.trust.made import GUESS_BITS, profile

KL = [30.0, 9.0, 6.0, 3.0, 1.2, 0.3, 0.0]


def verdict_on(key: str, **options: object) -> UseVerdict:
    found = profile(**{"kl": KL, **options})  # type: ignore[arg-type]
    return next(v for v in verdicts(found) if v.use.key == key)


def test_the_lens_is_trusted_from_the_layer_at_which_agreement_rises_for_good() -> None:
    verdict = verdict_on("top-1", agreement=[0.1, 0.2, 0.3, 0.5, 0.9, 0.95, 1.0])
    assert verdict.crossing() == Crossing(earliest=4, proved=4, n_layers=6)
    assert str(verdict.crossing()) == "from layer 4 on"


def test_a_later_layer_that_fails_takes_the_verdict_back() -> None:
    """The twin: high at layer 4, but not at 5."""
    verdict = verdict_on("top-1", agreement=[0.1, 0.2, 0.3, 0.5, 0.9, 0.5, 1.0])
    assert str(verdict.crossing()) == "only at the output"


def test_what_the_documents_do_not_decide_is_undecided() -> None:
    wide = {"agreement": [0.1, 0.2, 0.3, 0.5, 0.8, 0.97, 1.0], "documents": 12, "spread": 0.1}
    verdict = verdict_on("top-1", **wide)
    assert verdict.states()[4] == "undecided"
    assert verdict.crossing() == Crossing(earliest=4, proved=5, n_layers=6)
    assert str(verdict.crossing()) == "from layer 5 on (layer 4 undecided)"


def test_many_documents_decide_what_few_leave_open() -> None:
    numbers = {"agreement": [0.1, 0.2, 0.3, 0.5, 0.85, 0.97, 1.0], "spread": 0.2}
    few, many = (verdict_on("top-1", documents=n, **numbers) for n in (6, 1000))
    assert few.states()[4] == "undecided"
    assert many.states()[4] == "yes"


def test_a_stricter_threshold_is_never_met_earlier() -> None:
    for verdict in verdicts(profile(kl=KL, agreement=[0, 0.1, 0.3, 0.55, 0.85, 0.93, 1.0])):
        harder = sorted(
            {verdict.use.threshold, *verdict.use.others}, reverse=verdict.use.better == "lower"
        )
        found = [verdict.crossing(threshold).earliest for threshold in harder]
        assert found == sorted(found), verdict.use.key


@pytest.mark.parametrize(
    ("states", "expected", "words"),
    [
        ("nnyyy", (2, 2), "from layer 2 on"),
        ("nynyy", (3, 3), "from layer 3 on"),
        ("nuuyy", (1, 3), "from layer 3 on (layers 1 to 2 undecided)"),
        ("nyuyy", (1, 3), "from layer 3 on (layers 1 to 2 undecided)"),
        ("nnnny", (4, 4), "only at the output"),
        ("nnnuy", (3, 4), "only at the output (layer 3 undecided)"),
        ("yyyyy", (0, 0), "from the embedding on"),
        ("uuuuu", (0, None), "undecided at every layer"),
        ("nnnnn", (5, None), "at no layer"),
        ("aannn", (5, None), "at no layer"),
    ],
)
def test_the_crossing_lies_between_the_last_refuted_and_the_first_shown(
    states: str, expected: tuple[int, int | None], words: str
) -> None:
    names = {"n": "no", "y": "yes", "u": "undecided", "a": "absent"}
    found = crossing_of([names[s] for s in states])  # type: ignore[misc]
    assert (found.earliest, found.proved) == expected
    assert str(found) == words


def band(low: float, high: float) -> Interval:
    middle = np.array([(low + high) / 2])
    edges = {"low": middle, "high": middle, "band_low": np.array([low])}
    return Interval(
        estimate=middle,
        band_high=np.array([high]),
        level=0.95,
        n_documents=9,
        replicates=middle[None],
        **edges,
    )


@pytest.mark.parametrize(
    ("low", "high", "better", "state"),
    [
        (0.6, 0.7, "higher", "yes"),
        (0.4, 0.7, "higher", "undecided"),
        (0.4, 0.45, "higher", "no"),
        (0.4, 0.45, "lower", "yes"),
        (0.4, 0.7, "lower", "undecided"),
        (0.6, 0.7, "lower", "no"),
    ],
)
def test_a_state_is_decided_by_the_joint_band(
    low: float, high: float, better: str, state: str
) -> None:
    assert states_of(band(low, high), 0.5, better) == (state,)


def test_a_number_that_is_not_there_grants_nothing() -> None:
    nothing = band(float("nan"), float("nan"))
    assert states_of(nothing, 0.5, "higher") == ("absent",)
    assert crossing_of(("absent",)).proved is None


def test_the_evidence_is_the_profile_s_own_means() -> None:
    gap = [0.5, 0.4, 0.3, 0.2, 0.1, 0.01, 0.0]
    found = profile(kl=KL, gap=gap)
    np.testing.assert_allclose(skill_by_layer(found).estimate, found.skill)
    np.testing.assert_allclose(usefulness_by_layer(found).estimate, found.usefulness_bits)
    np.testing.assert_allclose(found.skill, 1 - found.mean("kl_bits") / GUESS_BITS)
    np.testing.assert_allclose(confidence_gap(found).estimate, gap, atol=1e-6)


def test_shares_of_the_distance_are_those_that_were_put_in() -> None:
    share = [0.1, 0.7, 0.4, 0.3, 0.2, 0.6]
    found = profile(kl=KL, marginal=[*share, 0.0], cooled=[*share, 0.0], spread=0.0)
    np.testing.assert_allclose(temperature_share(found).estimate, share, atol=1e-9)
    np.testing.assert_allclose(marginal_share(found).estimate, share, atol=1e-6)
    left = profile(kl=[k * (1 - s) for k, s in zip(KL, [*share, 0.0], strict=True)], seed=0)
    both = reading_loss_share(profile(kl=KL, seed=0), left)
    np.testing.assert_allclose(both.estimate, share, atol=1e-9)


def test_pseudo_values_of_a_mean_are_the_folds_themselves() -> None:
    rows = np.random.default_rng(4).normal(size=(20, 3))
    without = (rows.sum(axis=0) - rows) / 19
    found = of_folds(rows.mean(axis=0), without)
    direct = bootstrap(rows, lambda totals: totals / 20)
    np.testing.assert_allclose(found.low, direct.low, atol=1e-12)
    np.testing.assert_allclose(found.band_high, direct.band_high, atol=1e-12)


def test_layers_are_told_as_runs() -> None:
    assert layers_in_words([3]) == "layer 3"
    assert layers_in_words([0, 1, 2, 5, 7, 8]) == "layers 0 to 2, 5 and 7 to 8"


def test_every_use_has_evidence_and_a_threshold_of_its_own() -> None:
    assert len({use.key for use in USES}) == len(USES)
    assert all(use.threshold not in use.others for use in USES)
    assert {v.use.key for v in verdicts(profile(kl=KL))} == {use.key for use in USES}
