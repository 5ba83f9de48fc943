import numpy as np
import pytest

from lens.corpus import read_corpus
from lens.errors import PromptError, SelectionError, TokenizerError
from lens.measuring.windows import NO_TOKEN, windows_of
from tests.measuring.small import checkpoint, id_corpus, word_tokenizer


def test_windows_hold_every_token_once_and_never_cross_documents() -> None:
    corpus = id_corpus(5, 24)
    cut = windows_of(checkpoint(), corpus, window_tokens=10)
    for document, windows in zip(corpus.documents, cut.by_document, strict=True):
        assert np.concatenate([w.ids for w in windows]).tolist() == list(document.ids or ())


def test_a_last_token_alone_makes_no_window() -> None:
    """It would be a position 0, with nothing read."""
    cut = windows_of(checkpoint(), read_corpus([list(range(3, 14))]), window_tokens=10)
    assert [len(w.ids) for w in cut.by_document[0]] == [10]
    assert cut.by_document[0][0].targets.tolist() == list(range(4, 14))


def test_each_position_is_scored_against_the_next_token_of_its_document() -> None:
    corpus = id_corpus(3, 24)
    cut = windows_of(checkpoint(), corpus, window_tokens=10)
    for document, windows in zip(corpus.documents, cut.by_document, strict=True):
        targets = np.concatenate([w.targets for w in windows]).tolist()
        assert targets == [*list(document.ids or ())[1:], NO_TOKEN]


def test_a_masked_model_is_scored_against_the_token_itself() -> None:
    cut = windows_of(checkpoint("bert"), id_corpus(1, 12), window_tokens=8)
    assert all(w.targets.tolist() == w.ids.tolist() for w in cut.by_document[0])


def test_special_tokens_stand_in_every_window_and_the_last_ones_are_not_read() -> None:
    model = checkpoint(tokenizer=word_tokenizer(special=True))
    windows = windows_of(model, read_corpus(["a b c d e f"]), window_tokens=6).by_document[0]
    assert [w.ids.tolist() for w in windows] == [[1, 3, 4, 5, 6, 2], [1, 7, 8, 2]]
    assert [w.n_read for w in windows] == [5, 3]
    assert [w.targets.tolist() for w in windows] == [[3, 4, 5, 6, 7, -1], [7, 8, -1, -1]]


def test_the_bytes_are_those_of_the_scored_targets() -> None:
    model = checkpoint(tokenizer=word_tokenizer(special=False))
    text = "a é 漢 b"
    (window,) = windows_of(model, read_corpus([text]), window_tokens=6).by_document[0]
    # Position 0 is apart: scored are the targets of positions 1 and 2, after "é".
    assert window.n_bytes == len(" 漢 b".encode())
    special = checkpoint(tokenizer=word_tokenizer(special=True))
    (window,) = windows_of(special, read_corpus([text]), window_tokens=6).by_document[0]
    assert window.n_bytes == len(" é 漢 b".encode())


def test_bytes_of_all_windows_together_miss_only_what_is_not_scored() -> None:
    model = checkpoint(tokenizer=word_tokenizer(special=True))
    text = "a é 漢 b c d e f g"
    windows = windows_of(model, read_corpus([text]), window_tokens=5).by_document[0]
    # With a beginning token, a window's first content token is position 0's target: not scored,
    # but for the last target of the window before, which is that very token.
    assert sum(w.n_bytes for w in windows) == len(text.encode()) - len("a")


@pytest.mark.parametrize("size", [1, 65])
def test_a_window_that_the_model_does_not_take_is_refused(size: int) -> None:
    with pytest.raises(SelectionError, match="takes 2 to 64"):
        windows_of(checkpoint(), id_corpus(), window_tokens=size)


def test_texts_need_a_tokenizer_and_an_encoder_a_source() -> None:
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        windows_of(checkpoint(), read_corpus(["a b c"]))
    with pytest.raises(PromptError, match="encoder-decoder"):
        windows_of(checkpoint("t5"), id_corpus())
    with pytest.raises(PromptError, match="two tokens"):
        windows_of(checkpoint(), read_corpus([[5], [6]]))
