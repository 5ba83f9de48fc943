import numpy as np
import pytest

from lens.corpus import Corpus, Document
from lens.errors import CorpusError
from lens.study.held_out import _Counts, held_out_windows, ngram_losses
from lens.study.texts import END, split_by_source, study_texts
from tests.study.small import RECIPE, corpus, texts


def test_a_quarter_of_each_book_is_held_out_and_stands_nowhere_in_training() -> None:
    train, held_out = split_by_source(corpus())
    trained = {d.id for d in train.documents}
    apart = {d.id.rpartition("/")[0] for d in held_out.documents}
    assert trained.isdisjoint(apart)
    assert trained | apart == {d.id for d in corpus().documents}
    for book in corpus().sources:
        assert sum(d.source == book for d in train.documents) == 5
        assert any(d.source == book for d in held_out.documents)


def test_held_out_runs_hold_the_whole_text_of_their_chapters() -> None:
    chapter = Document(id="a", source="book", text="\n".join("word " * 40 for _ in range(60)))
    others = [Document(id=str(i), source="book", text="short") for i in range(3)]
    _, held_out = split_by_source(Corpus(name="c", documents=(*others, chapter)))
    assert len(held_out) > 1
    assert all(len(d.text or "") <= 4000 for d in held_out.documents)
    joined = "".join(d.text or "" for d in held_out.documents)
    assert joined.split() == (chapter.text or "").split()


def test_the_tokenizer_is_the_same_each_time_and_spells_every_byte() -> None:
    one, other = texts().tokenizer, study_texts(corpus(), d_vocab=RECIPE.d_vocab).tokenizer
    assert one.get_vocab() == other.get_vocab()
    assert len(one) == RECIPE.d_vocab
    for text in ("Emma \N{GREEK SMALL LETTER ALPHA}\n", "\x00 \N{SNOWMAN}"):
        assert one.decode(one(text)["input_ids"]) == text


def test_the_tokenizer_has_not_seen_what_is_held_out() -> None:
    marked = [
        Document(id=str(i), source="b", text=("xqzxqz " if i == 3 else "emma was ") * 200)
        for i in range(4)
    ]
    found = study_texts(Corpus(name="c", documents=tuple(marked)), d_vocab=262)
    assert not any("xq" in word for word in found.tokenizer.get_vocab())


def batch(step: int, seed: int = 0) -> np.ndarray:
    return texts().batch(step, windows=4, window_tokens=16, seed=seed)


def test_every_epoch_passes_all_windows_once() -> None:
    count = (len(texts().stream) - 1) // 16
    steps = -(-count // 4)
    windows = np.concatenate([batch(s) for s in range(steps)])[:count]
    expected = np.stack([texts().stream[i * 16 : i * 16 + 17] for i in range(count)])
    assert sorted(map(bytes, windows)) == sorted(map(bytes, expected))


def test_the_order_depends_on_step_and_seed_alone() -> None:
    assert np.array_equal(batch(7), batch(7))
    assert not np.array_equal(batch(7), batch(7, seed=1))
    assert not np.array_equal(batch(7), batch(8))


def test_documents_are_kept_apart_in_the_stream() -> None:
    end = texts().tokenizer.convert_tokens_to_ids(END)
    assert int((texts().stream == end).sum()) == len(texts().train)


def test_texts_with_another_document_have_another_hash() -> None:
    fewer = Corpus(name="two books", documents=corpus().documents[:-1])
    assert study_texts(fewer, d_vocab=RECIPE.d_vocab).hash != texts().hash
    assert study_texts(corpus(), d_vocab=RECIPE.d_vocab).hash == texts().hash


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(CorpusError, match="least"):
        split_by_source(Corpus(name="c", documents=corpus().documents[:1]))
    with pytest.raises(CorpusError, match="BPE"):
        study_texts(corpus(), d_vocab=200_000)
    ids = tuple(Document(id=str(i), source="b", ids=(1, 2)) for i in range(8))
    with pytest.raises(CorpusError, match="token ids"):
        study_texts(Corpus(name="c", documents=ids), d_vocab=RECIPE.d_vocab)


def test_ngrams_agree_with_counting_by_hand_and_longer_ones_guess_better() -> None:
    found = ngram_losses(texts(), window_tokens=16)
    assert found.trigram < found.bigram < found.unigram < np.log2(RECIPE.d_vocab)
    scored = np.concatenate([w[1:] for w in held_out_windows(texts(), 16)])
    stream = texts().stream
    kept = stream[: len(stream) - len(stream) // 10]
    share = np.bincount(kept, minlength=RECIPE.d_vocab) / len(kept)
    fitted = share[stream[len(kept) + 1 :]]
    grid = 1 - np.geomspace(1e-5, 0.5, 4000)
    likely = [
        np.log(w * fitted + (1 - w) / RECIPE.d_vocab).sum() + np.log(w) + np.log1p(-w) for w in grid
    ]
    best = grid[int(np.argmax(likely))]
    whole = np.bincount(stream, minlength=RECIPE.d_vocab) / len(stream)
    by_hand = -np.log2(best * whole[scored] + (1 - best) / RECIPE.d_vocab).mean()
    assert found.unigram == pytest.approx(by_hand, abs=5e-3)


def test_each_ngram_is_a_distribution_after_any_context() -> None:
    stream, d_vocab = np.array([0, 1, 2, 0, 1, 3, 0, 1]), 6
    counts = _Counts(stream, d_vocab)
    # Seen, a pair that was never seen, a token that was never seen; the first target has no pair.
    for context in ([0, 1], [2, 1], [5, 4]):
        told = np.stack(
            [counts.orders(np.array([*context, token]))[:, -1] for token in range(d_vocab)]
        )
        assert told.sum(axis=0) == pytest.approx(np.ones(4))
    first, second = counts.orders(np.array([0, 1, 3])).T
    assert first[3] == first[2] == 1.0
    assert (second[2], second[3]) == (0.5, 0.5)
