"""From a checkpoint to the page: what is measured, what is refused, what is left behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.errors import ExportError, ProvenanceError, ResultFileError, SelectionError
from lens.measuring.measure import measure
from lens.measuring.tuning import tune
from lens.trust import report as module
from lens.trust.report import Report, report
from tests.measuring.small import checkpoint, id_corpus

OPTIONS: dict[str, Any] = {"window_tokens": 10, "sample_positions": 60}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Report:
    models = {"tied": checkpoint(tied=True), "untied": checkpoint()}
    place = tmp_path_factory.mktemp("reports") / "two.html"
    return report(models, id_corpus(12), place, **OPTIONS)


def test_its_profiles_are_those_of_measure(written: Report) -> None:
    fit, held_out = id_corpus(12).split()
    for found, tied in zip(written.findings, (True, False), strict=True):
        alone = measure(
            checkpoint(tied=tied), held_out, fit_on=fit, window_tokens=10, sample_positions=60
        )
        assert found.subject.output == alone


def test_both_lenses_of_an_untied_model_are_measured_and_one_of_a_tied(written: Report) -> None:
    tied, untied = (found.subject for found in written.findings)
    assert tied.through_input is None
    assert untied.through_input is not None
    assert "reads better than" in written.path.read_text(encoding="utf-8")


def test_the_translator_is_fitted_on_what_is_kept_back(written: Report) -> None:
    fit, _ = id_corpus(12).split()
    for found in written.findings:
        assert fit.hash in found.subject.translator
        assert found.subject.translated is not None
        assert found.subject.translated.provenance.reading.lens == "ridge"


def test_its_text_holds_the_verdicts_and_never_credits_the_tie(written: Report) -> None:
    text = str(written)
    assert text.startswith(("untied against tied", "The lens of untied"))
    assert "two checkpoints, not the tie" in text
    assert text.count("the top-1 token (top-1 agreement ≥\N{NO-BREAK SPACE}80%)") == 2
    assert "because of" not in text


def test_the_comparison_is_of_the_same_profiles(written: Report) -> None:
    assert written.comparison is not None
    first, second = (f.subject.output.mean("kl_bits") for f in written.findings)
    np.testing.assert_allclose(written.comparison.differences["KL"].estimate, second - first)


def test_two_models_of_other_context_are_read_in_windows_of_one_length(tmp_path: Path) -> None:
    models = {"short": checkpoint(n_ctx=16), "long": checkpoint()}
    options = {"translator": "none", "sample_positions": 0, "prompts": [[4, 5]]}
    found = report(models, id_corpus(4, 40), tmp_path / "two.html", **options)
    read = [f.subject.output.provenance.window_tokens for f in found.findings]
    assert read == [16, 16]


def test_one_checkpoint_gives_one_page_with_its_prompts(tmp_path: Path) -> None:
    found = report(
        checkpoint(),
        id_corpus(9),
        tmp_path / "one.html",
        prompts=[[4, 5, 6], [7, 8]],
        translator="none",
        **OPTIONS,
    )
    page = found.path.read_text(encoding="utf-8")
    assert page.count('class="heat"') == 2
    assert found.comparison is None
    assert 'lens.report(lens.load("tiny-gpt2"), "list", "one.html")' in page.replace("&quot;", '"')


def test_the_distance_can_be_taken_apart(tmp_path: Path) -> None:
    options = {**OPTIONS, "translator": "none", "gap_positions": 40, "folder": tmp_path / "run"}
    first = report({"m": checkpoint()}, id_corpus(9), tmp_path / "a.html", **options)
    found = first.findings[0].subject.decomposition
    assert found is not None
    assert found.layers.tolist() == [0, 1, 2]
    again = report({"m": checkpoint()}, id_corpus(9), tmp_path / "b.html", **options)
    assert again.findings[0].subject.decomposition == found
    place = tmp_path / "other" / "m"
    place.mkdir(parents=True)
    for corpus, change, named in (
        (id_corpus(9), {"gap_positions": 60}, r"positions \(40 there, 60 here\)"),
        (id_corpus(9), {"seed": 1}, r"seed \(0 there, 1 here\)"),
        (id_corpus(9), {"window_tokens": 12}, r"window_tokens \(10 there, 12 here\)"),
        (id_corpus(10), {}, "corpus .*, what it was fitted on"),
    ):
        (place / "gap.json").write_bytes((tmp_path / "run" / "m" / "gap.json").read_bytes())
        more = {**options, "folder": tmp_path / "other", **change}
        with pytest.raises(ProvenanceError, match=named):
            report({"m": checkpoint()}, corpus, tmp_path / "c.html", **more)
        assert [p.name for p in place.iterdir()] == ["gap.json"]  # nothing was measured before
    with pytest.raises(ProvenanceError, match="model_hash"):
        report({"m": checkpoint(tied=True)}, id_corpus(9), tmp_path / "c.html", **more)


def test_a_stopped_report_goes_on_from_its_folder(tmp_path: Path) -> None:
    def run(model: Any, corpus: Any) -> Report:
        page = tmp_path / "r.html"
        return report(model, corpus, page, folder=tmp_path / "run", **OPTIONS)

    told: list[str] = []
    first = run({"m": checkpoint()}, id_corpus(9))
    again = report(
        {"m": checkpoint()},
        id_corpus(9),
        tmp_path / "again.html",
        folder=tmp_path / "run",
        progress=lambda name, done: told.append(name),
        **OPTIONS,
    )
    assert again.findings[0].subject.translated == first.findings[0].subject.translated
    assert told == []  # nothing was measured or fitted again
    (tmp_path / "run" / "m" / "output-lens").rename(tmp_path / "elsewhere")
    with pytest.raises(ResultFileError, match="another folder"):
        run({"m": checkpoint()}, id_corpus(9, seed=1))


def test_a_report_with_tuned_translators_says_so_and_is_of_them(tmp_path: Path) -> None:
    model, (fit, held_out) = checkpoint(), id_corpus(9).split()
    options = {**OPTIONS, "sample_positions": 0, "prompts": [[4, 5]], "folder": tmp_path / "run"}
    pages, subjects = {}, {}
    for kind, said in (("tuned", "fitted by KL(final ‖ lens)"), ("ridge", "by least squares")):
        found = report(
            {"m": model},
            id_corpus(9),
            tmp_path / f"{kind}.html",
            translator=kind,
            tune_steps=3,
            **options,
        )
        pages[kind], subjects[kind] = found.path.read_text("utf-8"), found.findings[0].subject
        assert f"<dd>{kind}, affine, " in pages[kind]
        assert said in subjects[kind].translator
        assert subjects[kind].translated.provenance.reading.lens == kind
    assert "steps 3, " in pages["tuned"]
    assert "steps taken 3)" in pages["tuned"]
    assert "tuned, affine" not in pages["ridge"]
    lens = tune(model, fit, steps=3, window_tokens=10)
    alone = measure(model, held_out, lens=lens, fit_on=fit, window_tokens=10)
    assert subjects["tuned"].translated == alone
    tuned, ridge = (subjects[kind].translated.mean("kl_bits") for kind in ("tuned", "ridge"))
    assert np.abs(tuned - ridge).max() > 0.01
    told: list[str] = []
    again = {**options, "translator": "tuned", "progress": lambda name, done: told.append(name)}
    report({"m": model}, id_corpus(9), tmp_path / "again.html", tune_steps=3, **again)
    assert told == []
    with pytest.raises(ProvenanceError, match="differs in steps"):
        report({"m": model}, id_corpus(9), tmp_path / "more.html", tune_steps=4, **again)


def untouchable(*_: object, **__: object) -> None:
    raise AssertionError("a model was measured")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("r.docx", "one .html page"), ("no/r.html", "no folder"), ("", "one .html page")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "studied", untouchable)
    with pytest.raises(ExportError, match=complaint):
        report(checkpoint(), id_corpus(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("models", "corpus", "more", "complaint"),
    [
        ({}, id_corpus(9), {}, "found 0"),
        (dict.fromkeys("abc"), id_corpus(9), {}, "found 3"),
        ({"a": checkpoint(), "b": checkpoint(n_layers=1)}, id_corpus(9), {}, "b: one block"),
        ({"a": checkpoint()}, id_corpus(2), {}, "one more to fit on"),
        ({"a": checkpoint()}, id_corpus(9), {"fit_on": id_corpus(9)}, "9 of the 9 documents"),
        ({"a": checkpoint()}, id_corpus(9), {"translator": "affine"}, '"ridge", "tuned" or "none"'),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_measured(
    models: Any,
    corpus: Any,
    more: dict[str, Any],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "studied", untouchable)
    with pytest.raises(SelectionError, match=complaint):
        report(models, corpus, tmp_path / "r.html", **more)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_no_half_written_page_and_the_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "r.html"
    page.write_text("old", encoding="utf-8")
    monkeypatch.setattr(module, "page_of_one", lambda *_: "half \udce2")
    with pytest.raises(UnicodeEncodeError):
        report(checkpoint(), id_corpus(6), page, translator="none", **OPTIONS)
    assert page.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
