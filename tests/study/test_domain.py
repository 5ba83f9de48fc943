import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.corpus import Corpus, read_corpus
from lens.errors import CorpusError, ResultFileError, SelectionError
from lens.study.arms import PAIR, arm_of
from lens.study.domain import read_domains, reproduce_domain
from lens.study.effects import effect
from lens.study.held_out import held_out_loss_bits, ngram_losses
from lens.study.run import train
from tests.study.small import RECIPE, corpus, texts

FEW: dict[str, Any] = {"tuning_steps": 2, "sample_positions": 32}


def other() -> Corpus:
    """Chapters of a third book of the sample."""
    sample = read_corpus("sample")
    of_book = [i for i, d in enumerate(sample.documents) if d.source == sample.sources[2]]
    return sample.select(of_book[:4], name="a third book")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for arm in PAIR:
        train(arm_of(arm), 0, texts(), RECIPE, folder / f"{arm}-seed-0")
    return folder


@pytest.fixture(scope="module")
def results(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lens.study.measured.TRANSLATOR_DOCUMENTS", 4)
        patch.setattr("lens.study.measured.GUESS_DOCUMENTS", 2)
        written = measured(runs, folder)
    assert [path.name for path in written] == [f"domain-third-{arm}-0.json" for arm in PAIR]
    return folder


def measured(runs: Path, folder: Path, *, text: Any = None, **more: Any) -> list[Path]:
    given: dict[str, Any] = {"domain": "third", "seeds": 1, "documents": 3} | more
    return reproduce_domain(
        corpus(), text or other(), runs, folder, recipe=RECIPE, measuring=FEW, **given
    )


def test_what_is_measured_is_the_other_text(results: Path, runs: Path) -> None:
    from lens import load

    (rows,) = read_domains(results).values()
    taken = other().in_runs().take(3)
    elsewhere = replace(texts(), held_out=taken)
    for row in rows:
        model = load(runs / f"{row['arm']['name']}-seed-0" / "branch-00008")
        branch = row["branches"][-1]
        for where, same in ((elsewhere, True), (texts(), False)):
            loss = held_out_loss_bits(model.model, where, window_tokens=RECIPE.window_tokens)
            assert (branch["loss_bits"] == pytest.approx(loss, rel=1e-5)) == same
        assert row["ngram_bits"]["bigram"] == pytest.approx(
            ngram_losses(elsewhere, window_tokens=RECIPE.window_tokens).bigram, rel=1e-5
        )
        assert branch["n_documents"] == row["domain"]["documents"] == 3


def test_reading_loss_and_what_is_not_there_yet_add_up_to_the_kl(results: Path) -> None:
    (rows,) = read_domains(results).values()
    for row in rows:
        branch = row["branches"][-1]
        assert np.add(branch["reading_loss"], branch["not_there_yet"]) == pytest.approx(
            branch["kl"], abs=1e-4
        )
        assert branch["kl"][-1] == pytest.approx(0, abs=1e-6)
        assert branch["kl"][0] > 0


def test_the_pair_differs_by_seed_and_two_texts_are_not_one_effect(results: Path) -> None:
    (rows,) = read_domains(results).values()
    found = effect(rows, PAIR[1], PAIR[0], "held-out loss")
    losses = {row["arm"]["name"]: row["branches"][-1]["loss_bits"] for row in rows}
    assert found.mean[0] == pytest.approx(losses[PAIR[1]] - losses[PAIR[0]])
    mixed = [rows[0], rows[1] | {"options": rows[1]["options"] | {"measured_on": "another"}}]
    with pytest.raises(SelectionError, match="differ in options"):
        effect(mixed, PAIR[1], PAIR[0], "held-out loss")


def test_what_is_there_is_not_measured_again(results: Path, runs: Path) -> None:
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert measured(runs, results) == []
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_bad_input_gets_one_error_and_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    for error, says, more in (
        (SelectionError, "Third Book", {"domain": "Third Book"}),
        (SelectionError, "no arm 'other'", {"arms": ("other",)}),
        (CorpusError, "no corpus", {"text": "missing.txt"}),
        (ResultFileError, "no finished run", {"arms": ("untied-own",)}),
        (SelectionError, "at least 1", {"documents": 0}),
    ):
        with pytest.raises(error, match=says):
            measured(runs, tmp_path, **more)
    assert list(tmp_path.iterdir()) == []


def test_another_format_is_refused(results: Path, tmp_path: Path) -> None:
    row = json.loads((results / f"domain-third-{PAIR[0]}-0.json").read_text("utf-8"))
    (tmp_path / "domain-third-tied-0.json").write_text(json.dumps(row | {"format": "other"}))
    with pytest.raises(ResultFileError, match="other"):
        read_domains(tmp_path)
