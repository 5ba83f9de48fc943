import numpy as np

from lens.measuring.measure import measure
from lens.measuring.ridge import fit_ridge
from lens.measuring.tuning import tune
from lens.study.translators import CHECKED_ONE_IN, best_affine
from tests.measuring.small import checkpoint, id_corpus


def test_at_each_layer_the_better_of_both_fits_is_taken_on_documents_that_neither_saw() -> None:
    model, corpus = checkpoint(), id_corpus(12)
    how = {"steps": 6, "learning_rate": 1e-2, "window_tokens": 10}
    lens, by_kl = best_affine(model, corpus, **how)
    places = np.arange(len(corpus))
    seen = corpus.select(places[places % CHECKED_ONE_IN != 0].tolist())
    unseen = corpus.select(places[places % CHECKED_ONE_IN == 0].tolist())

    def kl(of: object) -> np.ndarray:
        return measure(model, unseen, lens=of, window_tokens=10).mean("kl_bits")

    squares, tuned = kl(fit_ridge(model, seen, window_tokens=10)), kl(tune(model, seen, **how))
    assert np.array_equal(kl(lens), np.minimum(squares, tuned))
    assert np.array_equal(by_kl, (tuned < squares)[:-1])
    # Neither is the better one everywhere by its making: one of them alone would fail above.
    assert not np.array_equal(squares, tuned)
