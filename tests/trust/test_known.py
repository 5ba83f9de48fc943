"""What is known of a model from before stands beside the verdict, and is set against it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lens.measuring import known_profile as module
from lens.measuring.known_profile import KnownProfile, known_of
from lens.measuring.measure import measure
from lens.trust.report import report
from lens.trust.verdict import verdicts
from lens.trust.words import known_line
from tests.measuring.small import checkpoint, id_corpus
from tests.trust.made import profile

# By the made profile skill is above 0 from layer 3 on, and agreement 50 % between 3 and 4.
KL = [30.0, 9.0, 6.0, 3.0, 1.2, 0.3, 0.0]
AGREEMENT = [0.0, 0.05, 0.2, 0.5, 0.7, 0.9, 1.0]


def known(guess: int, half: int, *, n_layers: int = 6) -> KnownProfile:
    layers = np.arange(n_layers + 1)
    zero = np.zeros(n_layers + 1)
    return KnownProfile(
        model_id="one/known",
        unembedding_hash="a" * 32,
        n_layers=n_layers,
        d_model=8,
        d_vocab=16,
        dtype="float32",
        corpus="some novels",
        corpus_hash="c" * 32,
        n_documents=64,
        n_sources=4,
        n_positions=12345,
        versions={},
        date="2026-01-02",
        kl_bits=zero,
        kl_low_95=zero,
        kl_high_95=zero,
        median_kl_bits=zero,
        skill=np.where(layers >= guess, 0.5, -0.5),
        agreement=np.where(layers >= half, 0.6, 0.4),
        self_copy_mass=zero,
    )


@pytest.mark.parametrize(
    ("guess", "half", "said"),
    [
        (3, 3, ["agrees", "agrees"]),
        (3, 4, ["agrees", "agrees"]),
        (2, 4, ["differs", "agrees"]),
        (4, 2, ["differs", "differs"]),
        (3, 5, ["agrees", "differs"]),
    ],
)
def test_a_report_agrees_on_what_it_neither_refutes_nor_passes(
    guess: int, half: int, said: list[str]
) -> None:
    line = known_line(known(guess, half), verdicts(profile(kl=KL, agreement=AGREEMENT)))
    assert line.startswith("Known before, 2026-01-02: on 12,345 positions of 64 documents of some")
    assert f"beats a context-free guess from layer {guess} of 6 on" in line
    assert f"half of the positions from layer {half} on" in line
    _, _, ours = line.partition("By this report")
    assert "beaten from layer 3 on (" in ours
    assert "from layer 4 on (layer 3 undecided) (" in ours
    words = ours.replace("(", " ").replace(")", " ").split()
    assert [word for word in words if word in ("agrees", "differs")] == said


def test_the_page_tells_of_the_known_model_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint()
    before = measure(model, id_corpus(4), fit_on=id_corpus(3, seed=1), window_tokens=10)
    held = known_of(model, before, name="a known one", date="2026-01-02")
    monkeypatch.setattr(module, "shipped", lambda: iter([held]))
    options: dict[str, Any] = {"window_tokens": 10, "sample_positions": 0, "translator": "none"}
    # Of the same sizes, with another matrix: nothing is known of it.
    models = {"tied": checkpoint(tied=True), "untied": model}
    both = report(models, id_corpus(9), tmp_path / "both.html", prompts=[[4, 5]], **options)
    page = both.path.read_text(encoding="utf-8")
    assert page.count("Known before, 2026-01-02: ") == 1
    assert str(both).count("the logit lens of a known one beats a context-free guess") == 1
    assert [found.known_line != "" for found in both.findings] == [False, True]
    lead, line = page.index('class="lead"'), page.index("Known before")
    assert lead < line < page.index('<figure class="wide">')
