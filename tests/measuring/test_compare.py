from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from lens.corpus import read_corpus
from lens.errors import SelectionError
from lens.lenses.tiles import DirectRows
from lens.measuring.compare import compare
from lens.measuring.comparison import GRID, Comparison, Side, compared
from lens.measuring.confounds import confounds, facts
from lens.measuring.measure import measure
from lens.show.curves import comparison_curves, profile_curves, profile_finding
from lens.trust.evidence import skill_by_layer, usefulness_by_layer
from tests.measuring.small import checkpoint, id_corpus, word_tokenizer

OPTIONS = {"window_tokens": 10}


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    fit, held_out = id_corpus(12).split()
    models = {"tied": checkpoint(tied=True), "untied": checkpoint()}
    return compare(models, held_out, fit_on=fit, **OPTIONS)


class Shifted:
    """A translator that helps by nothing but is not the identity: it doubles every state."""

    name, hash = "tuned", "doubled"

    def check(self, _: object) -> None:
        return None

    def translate(self, layer: int, states: object) -> object:
        return states if layer == 3 else 2 * states  # type: ignore[operator]


def test_differences_are_second_less_first(comparison: Comparison) -> None:
    first, second = (s.output.mean("kl_bits") for s in (comparison.first, comparison.second))
    found = comparison.differences["KL"]
    np.testing.assert_allclose(found.estimate, second - first, atol=1e-12)
    useful = comparison.second.output.usefulness_bits - comparison.first.output.usefulness_bits
    np.testing.assert_allclose(comparison.differences["X"].estimate, useful, atol=1e-12)
    assert comparison.headline.estimate[0] == pytest.approx((second - first)[1:-1].mean())
    assert comparison.unit == "bits a token"


def test_the_other_order_turns_every_sign(comparison: Comparison) -> None:
    back = compared(comparison.second, comparison.first, confounds=())
    for name, found in comparison.differences.items():
        np.testing.assert_allclose(back.differences[name].estimate, -found.estimate, atol=1e-12)
        np.testing.assert_allclose(back.differences[name].low, -found.high, atol=1e-9)


def test_bands_are_as_wide_as_intervals_at_least_on_the_whole(comparison: Comparison) -> None:
    found = comparison.differences["KL"]
    assert (found.band_high - found.band_low).sum() > (found.high - found.low).sum()
    assert np.all((found.low <= found.estimate) & (found.estimate <= found.high))


def test_without_a_tuned_lens_G_and_R_are_absent_and_it_says_so(comparison: Comparison) -> None:
    assert set(comparison.differences) == {"KL", "X"}
    assert comparison.headline_of == "KL"
    assert "not told apart" in str(comparison)


def test_with_tuned_lenses_KL_is_G_plus_R() -> None:
    _, held_out = id_corpus(12).split()
    models = {"a": checkpoint(tied=True), "b": checkpoint()}
    found = compare(models, held_out, tuned={"a": Shifted(), "b": Shifted()}, **OPTIONS)  # type: ignore[dict-item]
    parts = found.differences["G"].estimate + found.differences["R"].estimate
    np.testing.assert_allclose(parts, found.differences["KL"].estimate, atol=1e-12)
    assert found.headline_of == "G"
    assert "not told apart" not in str(found)
    assert found.verdict is None  # no guess was fitted, so there is no skill
    with pytest.raises(SelectionError, match="a translator for"):
        compare(models, held_out, tuned={"a": Shifted()}, **OPTIONS)  # type: ignore[dict-item]


def test_it_never_credits_the_tie(comparison: Comparison) -> None:
    text = str(comparison)
    assert "because of" not in text
    assert "two checkpoints, not the tie" in text
    assert "training data and recipe: unknown / unknown" in text


def test_the_same_model_twice_is_equivalent() -> None:
    fit, held_out = id_corpus(12).split()
    found = compare({"a": checkpoint(), "b": checkpoint()}, held_out, fit_on=fit, **OPTIONS)
    assert found.verdict == "equivalent"
    assert np.all(found.differences["KL"].estimate == 0)
    assert found.confounds == ("training data and recipe: unknown / unknown",)


def test_an_untied_model_is_read_through_both_matrices(comparison: Comparison) -> None:
    assert comparison.first.through_input is None
    through = comparison.second.through_input
    assert through is not None
    assert through.provenance.reading.lens == "input"
    layer = comparison.second.overtaken_at
    better = comparison.second.output.mean("kl_bits") < through.mean("kl_bits")
    assert layer is not None
    assert better[layer:].all()
    assert layer == 0 or not better[layer - 1]


def test_a_tied_model_passes_its_matrix_once_for_both_lenses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    tile = DirectRows.tile

    def count(self: DirectRows, first: int) -> object:
        if first == 0:
            rows.append(self.n_rows)
        return tile(self, first)

    def multiplied(work: Callable[[], object]) -> int:
        rows.clear()
        work()
        return sum(rows)

    monkeypatch.setattr(DirectRows, "tile", count)
    fit, held_out = id_corpus(6).split()
    tied, untied = checkpoint(tied=True), checkpoint()
    read = partial(measure, corpus=held_out, fit_on=fit, **OPTIONS)
    once = multiplied(lambda: read(tied))
    assert multiplied(lambda: read(tied, lens="input")) == once
    assert multiplied(lambda: read(untied)) == once
    # Two matrices are two products, and the last row of the second is not the model's own.
    assert multiplied(lambda: read(untied, lens="input")) > once
    both = multiplied(lambda: compare({"a": tied, "b": tied}, held_out, fit_on=fit, **OPTIONS))
    assert both == 2 * once
    for name in ("kl_bits", "nll_bits", "agreement"):
        through = read(tied, lens="input").mean(name)
        np.testing.assert_array_equal(through, read(tied).mean(name))


def test_models_of_other_depth_meet_at_relative_depths() -> None:
    fit, held_out = id_corpus(8).split()
    shallow = measure(checkpoint("gpt2"), held_out, fit_on=fit, **OPTIONS)
    deep = measure(checkpoint("gpt2", n_layers=5), held_out, fit_on=fit, **OPTIONS)
    sides = [
        Side(name=n, output=p, through_input=None, translated=None)
        for n, p in (("shallow", shallow), ("deep", deep))
    ]
    found = compared(*sides, confounds=())
    assert np.array_equal(found.depth, GRID)
    at = np.interp(GRID, np.arange(6) / 5, deep.mean("kl_bits"))
    at -= np.interp(GRID, np.arange(4) / 3, shallow.mean("kl_bits"))
    np.testing.assert_allclose(found.differences["KL"].estimate, at, atol=1e-12)
    inner = (GRID >= 1 / 3 - 1e-9) & (GRID <= 2 / 3 + 1e-9)
    assert found.headline.estimate[0] == pytest.approx(at[inner].mean())


def test_other_tokenizers_are_compared_by_bytes() -> None:
    texts = read_corpus(["a b c d e f g h", "h g f e d c b a", "a a b b é é 漢 漢"])
    models = {
        "with": checkpoint(tokenizer=word_tokenizer(special=True)),
        "without": checkpoint(tokenizer=word_tokenizer(special=False, more="k")),
    }
    found = compare(models, texts, **OPTIONS)
    assert found.unit == "bits a byte"
    first, second = (
        s.output.sums["kl_bits"].sum(axis=0) / s.output.counts["n_bytes"].sum()
        for s in (found.first, found.second)
    )
    np.testing.assert_allclose(found.differences["KL"].estimate, second - first, atol=1e-12)
    assert any(c.startswith("tokenizer:") for c in found.confounds)


def test_no_common_unit_or_documents_is_refused(comparison: Comparison) -> None:
    other = measure(checkpoint(), id_corpus(10, seed=5), **OPTIONS)
    stranger = Side(name="x", output=other, through_input=None, translated=None)
    with pytest.raises(SelectionError, match="not measured on the same documents"):
        compared(comparison.first, stranger, confounds=())
    with pytest.raises(SelectionError, match="two models by name"):
        compare({"a": checkpoint()}, id_corpus(), **OPTIONS)
    words = checkpoint(tokenizer=word_tokenizer(special=False))
    with pytest.raises(SelectionError, match="no common unit"):
        compare({"a": words, "b": checkpoint()}, id_corpus(4), **OPTIONS)


def test_models_of_other_context_are_compared_in_windows_of_one_length() -> None:
    models = {"short": checkpoint(n_ctx=16), "long": checkpoint()}
    corpus = id_corpus(3, 60)
    found = compare(models, corpus)
    sides = (found.first.output, found.second.output)
    assert [s.provenance.window_tokens for s in sides] == [16, 16]
    assert sides[0].n_positions == sides[1].n_positions
    own = [
        Side(name=n, output=measure(m, corpus), through_input=None, translated=None)
        for n, m in models.items()
    ]
    with pytest.raises(SelectionError, match=r"windows of 16 tokens, long of .* window_tokens=16"):
        compared(*own, confounds=())


def test_a_document_of_one_token_is_in_no_interval_and_not_counted() -> None:
    texts = read_corpus([*(d.ids for d in id_corpus(4).documents), [5]])
    fit = id_corpus(3, seed=1)
    found = compare({"a": checkpoint(), "b": checkpoint(tied=True)}, texts, fit_on=fit, **OPTIONS)
    profile = found.first.output
    intervals = [profile.interval("kl_bits"), profile.skill_area_interval()]
    intervals += [skill_by_layer(profile), usefulness_by_layer(profile)]
    intervals += [*found.differences.values(), found.headline, found.skill_difference]
    for interval in intervals:
        assert interval.n_documents == 4
        assert np.isfinite(interval.low).all()
    lone = measure(checkpoint(), read_corpus([[4, 5, 6], [5]]), **OPTIONS)
    assert "kl_bits_low_95" not in lone.to_frame()


def test_where_no_layer_lies_between_there_is_nothing_to_compare() -> None:
    flat, deep = checkpoint(n_layers=1), checkpoint(n_layers=2)
    with pytest.raises(SelectionError, match=r"^flat: one block"):
        compare({"flat": flat, "deep": deep}, id_corpus(4), **OPTIONS)
    profile = measure(flat, id_corpus(3), fit_on=id_corpus(3, seed=1), **OPTIONS)
    side = Side(name="flat", output=profile, through_input=None, translated=None)
    with pytest.raises(SelectionError, match=r"^flat and flat: one block"):
        compared(side, side, confounds=())
    found = compare({"a": deep, "b": deep}, id_corpus(3), fit_on=id_corpus(3, seed=1), **OPTIONS)
    assert found.headline.estimate.tolist() == [0.0]


def test_confounds_are_read_from_both_models() -> None:
    found = {c.what: (c.first, c.second) for c in confounds(checkpoint("gpt2"), checkpoint("gptj"))}
    assert found["parallel blocks"] == ("no", "yes")
    assert found["positions"] == ("other", "rotary")
    assert found["architecture"] == ("GPT2LMHeadModel", "GPTJForCausalLM")
    capped = {c.what: c.second for c in confounds(checkpoint("llama"), checkpoint("gemma2"))}
    assert "tanh" in capped["readout"]
    assert capped["lookup scale"] == "8"
    assert "d_model" not in found
    assert set(facts(checkpoint())) >= {"dtype", "tokenizer", "layers", "rows without a token"}


def test_depths_are_compared_within_bins_of_entropy() -> None:
    models = {"a": checkpoint(n_layers=2), "b": checkpoint("llama", n_layers=2)}
    found = compare(models, id_corpus(6), **OPTIONS)
    for i, side in enumerate((found.first, found.second)):
        own = side.output.depth_by_entropy()
        counts = side.output.depths[:, 0].sum(axis=0)[:, :-1]
        for entry, row in enumerate(counts):
            # By hand: positions that settle at 0, 1 and 2 of two layers.
            mean = (row @ [0.0, 0.5, 1.0]) / row.sum() if row.sum() else np.nan
            np.testing.assert_allclose(own.estimate[entry], mean)
        share = counts.sum(axis=1) / counts.sum()
        np.testing.assert_allclose(
            np.nansum(own.estimate * share), side.output.mean_depth(), err_msg=str(i)
        )
    ours, theirs = (s.output.depth_by_entropy().estimate for s in (found.first, found.second))
    np.testing.assert_allclose(found.depth_by_entropy.estimate, theirs - ours)
    assert np.isfinite(found.depth_by_entropy.estimate).any()
    assert not np.allclose(np.nan_to_num(found.depth_by_entropy.estimate), 0)
    assert "by entropy of the output: " in str(found)
    assert all(" bits " in words for words in found.depths_in_words())
    alike = compare({"a": models["a"], "b": models["a"]}, id_corpus(6), **OPTIONS)
    assert set(alike.depth_by_entropy.estimate[np.isfinite(alike.depth_by_entropy.low)]) == {0.0}
    with pytest.raises(SelectionError, match="no depth '2 bit'"):
        found.first.output.depth_by_entropy("2 bit")


def test_the_table_has_bands_and_units(comparison: Comparison) -> None:
    table = comparison.to_frame()
    assert list(table)[:2] == ["depth", "dKL_bits_a_token"]
    assert {"dX_band_low_95", "dX_band_high_95"} <= set(table)
    assert len(table) == 4


def test_the_curves_state_the_finding_and_draw_the_numbers(comparison: Comparison) -> None:
    figure = comparison_curves(comparison)
    assert f"{comparison.headline.estimate[0]:+.2f} bits a token" in figure.layout.title.text
    drawn = [t for t in figure.data if t.mode == "lines+markers"]
    np.testing.assert_array_equal(drawn[0].y, comparison.differences["KL"].estimate)
    profile = comparison.first.output
    figure = profile_curves(profile, comparison.second.output)
    assert profile_finding(profile) in figure.layout.title.text
    assert str(profile.n_positions) in figure.layout.title.subtitle.text.replace(",", "")
    drawn = [t for t in figure.data if t.mode == "lines+markers"]
    np.testing.assert_array_equal(drawn[0].y, profile.mean("kl_bits"))
    assert len(drawn) == 6


def test_names_in_figures_are_escaped(comparison: Comparison) -> None:
    side = Side(name="<b>x", output=comparison.first.output, through_input=None, translated=None)
    figure = comparison_curves(compared(side, comparison.second, confounds=()))
    assert "<b>x" not in figure.layout.title.text.removeprefix("<b>")
