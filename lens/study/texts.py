"""What twins are trained and measured on: chapters apart by book, a tokenizer, an order."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lens.corpus import Corpus, read_corpus
from lens.errors import CorpusError
from lens.measuring.passes import place_in_pass

END = "<|endoftext|>"
"""Stands between two documents in training."""

HELD_OUT_ONE_IN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyTexts:
    """A corpus split for training and measuring, with its tokenizer and the training stream.

    One document in four of each source is held out, and cut into runs of paragraphs of up to 4,000
    characters. The tokenizer is trained on the training documents alone.
    """

    train: Corpus
    held_out: Corpus
    tokenizer: PreTrainedTokenizerFast
    stream: Int[np.ndarray, " token"]

    @property
    def hash(self) -> str:
        """16 hex digits over both parts and the tokens."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{self.train.hash} {self.held_out.hash} ".encode("ascii"))
        digest.update(np.ascontiguousarray(self.stream, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def batch(
        self, step: int, *, windows: int, window_tokens: int, seed: int
    ) -> Int[np.ndarray, "batch pos"]:
        """The windows of one step, each with the token after it; a function of step and seed alone.

        Every epoch passes all windows once, in an order of its own.
        """
        count = (len(self.stream) - 1) // window_tokens
        if count < 1:
            raise CorpusError(
                f"{self.train.name} gives {len(self.stream)} tokens to train on, not one window "
                f"of {window_tokens}."
            )
        numbers = range(step * windows, (step + 1) * windows)
        places = [place_in_pass(n, count, seed) * window_tokens for n in numbers]
        return np.stack([self.stream[p : p + window_tokens + 1] for p in places])


def study_texts(corpus: Any = "sample", *, d_vocab: int) -> StudyTexts:
    """Split a corpus, train a tokenizer, and lay the training documents end to end.

    Raises CorpusError, also where a tokenizer of that size cannot be trained on it.
    """
    texts = read_corpus(corpus)
    if any(d.text is None for d in texts.documents):
        raise CorpusError(f"{texts.name} holds token ids; twins are trained on texts.")
    train, held_out = split_by_source(texts)
    tokenizer = train_tokenizer(train, d_vocab)
    end = [tokenizer.convert_tokens_to_ids(END)]
    ids = [[*tokenizer(d.text)["input_ids"], *end] for d in train.documents]
    return StudyTexts(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        stream=np.concatenate([np.array(i, dtype=np.int64) for i in ids]),
    )


def split_by_source(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """(to train on, held out): one document in four of each source held out, cut into runs."""
    places: set[int] = set()
    for source in corpus.sources:
        of_source = [i for i, d in enumerate(corpus.documents) if d.source == source]
        places.update(of_source[HELD_OUT_ONE_IN - 1 :: HELD_OUT_ONE_IN])
    rest = [i for i in range(len(corpus)) if i not in places]
    if not places or not rest:
        raise CorpusError(
            f"{corpus.name} has {len(corpus)} documents; {HELD_OUT_ONE_IN} of one source are the "
            "least that leave something to train on and something to measure on."
        )
    held_out = corpus.select(sorted(places), name=f"{corpus.name} (held out)")
    return corpus.select(rest, name=f"{corpus.name} (train)"), held_out.in_runs()


def train_tokenizer(corpus: Corpus, d_vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of that many tokens. Raises CorpusError where the text has too few."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=d_vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([d.text for d in corpus.documents], trainer)
    if tokenizer.get_vocab_size() != d_vocab:
        raise CorpusError(
            f"{corpus.name} gives a byte-level BPE of {tokenizer.get_vocab_size()} tokens, not "
            f"{d_vocab}: 257 is the least, and more text gives more."
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
