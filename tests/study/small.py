"""A recipe and texts that train in seconds."""

from functools import cache

from lens.corpus import Corpus, Document, read_corpus
from lens.study.recipe import Recipe
from lens.study.texts import StudyTexts, study_texts

RECIPE = Recipe(
    d_vocab=300,
    d_model=16,
    n_layers=2,
    n_heads=2,
    window_tokens=16,
    batch_windows=4,
    warmup_steps=2,
    branch_at=(4, 8),
    branch_steps=3,
)


def corpus() -> Corpus:
    """Two books of the sample, six short chapters each."""
    books = read_corpus("sample").sources[:2]
    documents: list[Document] = []
    for book in books:
        of_book = [d for d in read_corpus("sample").documents if d.source == book][:6]
        documents += [
            Document(id=d.id, source=d.source, text=(d.text or "")[:1200]) for d in of_book
        ]
    return Corpus(name="two books", documents=tuple(documents))


@cache
def texts() -> StudyTexts:
    """Split and tokenized."""
    return study_texts(corpus(), d_vocab=RECIPE.d_vocab)
