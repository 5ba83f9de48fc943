from pathlib import Path

import pytest

from lens.cli import main
from tests.checkpoint.tiny import BY_NAME
from tests.measuring.small import word_tokenizer

TEXTS = [
    "a b c d e f g h i j",
    "j i h g f e d c b a",
    "a a b b c c d d",
    "é 漢 a b é 漢",
    "b c d b c d",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saved models, tied and untied, with a tokenizer, and a corpus of five texts."""
    import json

    place = tmp_path_factory.mktemp("models")
    for name, tied in (("tied", True), ("untied", False)):
        BY_NAME["gpt2"].build(tied=tied).save_pretrained(place / name)
        word_tokenizer(special=True).save_pretrained(place / name)
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    (place / "texts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return place


def test_measure_prints_a_row_for_each_layer_and_writes_what_it_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import lens

    written = tmp_path / "profile.parquet"
    corpus = str(folder / "texts.jsonl")
    command = ["measure", str(folder / "untied"), "--corpus", corpus, "-o", str(written)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    profile = lens.read_profile(written)
    assert len(profile.documents) == 4  # one of five is kept back for the guess
    for layer, kl in enumerate(profile.mean("kl_bits")):
        assert any(
            line.split()[:2] == [str(layer), f"{kl:.3f}"] for line in printed.splitlines()
        ), printed
    assert "Skill area over layers 1 to 3" in printed


def test_compare_prints_signed_differences_and_the_confounds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, table = str(folder / "texts.jsonl"), tmp_path / "c.csv"
    command = ["compare", str(folder / "tied"), str(folder / "untied"), "--corpus", corpus]
    assert main([*command, "-o", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "untied less tied, mean dKL" in printed
    assert "not the tie: they also differ in parameters" in printed
    assert table.read_text().startswith("depth,dKL_bits_a_token")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--corpus", "missing.txt"], "There is no corpus at"),
        (["-o", "profile.docx"], ".parquet"),
        (["-o", "no/such/folder/p.csv"], "folder"),
        (["--folder", __file__], "is a file; give the name of a folder"),
    ],
)
def test_a_wrong_call_is_one_line_before_any_model_is_loaded(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "no-such-model", *arguments]) == 1
    told = capsys.readouterr().err.strip()
    assert told.startswith("lens: ")
    assert complaint in told
    assert "no-such-model" not in told


def test_tune_writes_a_lens_that_measure_takes_and_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import lens

    corpus = str(folder / "texts.jsonl")
    command = ["tune", str(folder / "untied"), "--corpus", corpus, "-o", str(tmp_path / "lens")]
    options = ["--steps", "4", "--positions", "8", "--check-every", "2", "--optimiser", "muon"]
    assert main([*command, *options]) == 0
    printed = capsys.readouterr().out
    fitted = lens.load_affine(tmp_path / "lens")
    for layer, kl in enumerate(fitted.source.options["held_out_kl_bits"]):
        assert any(
            line.split()[0::2] == [str(layer), f"{kl:.3f}"] for line in printed.splitlines()
        ), printed
    assert "4 steps; wrote" in printed
    assert main([*command, *options]) == 0  # finished already
    assert main([*command, *options, "--seed", "1"]) == 1
    assert "differs in seed" in capsys.readouterr().err
    assert main(["tune", str(folder / "untied"), "--corpus", corpus]) == 2


def test_run_says_of_a_known_model_from_which_layer_on_its_lens_may_be_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lens
    from lens.measuring import known_profile

    model = lens.load(folder / "untied")
    profile = lens.measure(model, TEXTS[:2], fit_on=lens.read_corpus(TEXTS[2:]))
    known = known_profile.known_of(model, profile, name="a known one", date="2026-01-01")
    monkeypatch.setattr(known_profile, "shipped", lambda: iter([known]))
    assert main(["run", str(folder / "untied"), "a b c"]) == 0
    assert "the logit lens of a known one beats a context-free guess" in capsys.readouterr().out
    for other in (["tied"], ["untied", "--readout", "input"]):
        assert main(["run", str(folder / other[0]), "a b c", *other[1:]]) == 0
        assert "a known one" not in capsys.readouterr().out
