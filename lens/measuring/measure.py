"""Run a lens over a corpus: document by document, resumable, mergeable."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens.checkpoint.plain_torch import in_plain_torch
from lens.corpus import Corpus, read_corpus, require_apart
from lens.errors import SelectionError
from lens.lenses.logit import provenance
from lens.measuring.baseline import Baseline, baseline_hash, fit_baseline
from lens.measuring.collect import Tally, tally
from lens.measuring.columns import BINS, COUNTS, FINAL_SUMS, MAX_POSITIONS, SAMPLED, SUMS
from lens.measuring.profile import N_FOLDS, LensProfile, ProfileProvenance, merged
from lens.measuring.reading import Reading, Translator, reading_of
from lens.measuring.shards import Shards
from lens.measuring.windows import Windows, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

SHARD_DOCUMENTS = 8
"""Documents between two saved states of a run that can resume."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a measurement is: positions done and in all, and the seconds since it began."""

    done: int
    total: int
    resumed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Positions a second in this run."""
        return (self.done - self.resumed) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """At this rate."""
        return (self.total - self.done) / self.rate if self.rate > 0 else float("inf")


@in_plain_torch
def measure(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    lens: "str | Translator" = "output",
    fit_on: Corpus | None = None,
    window_tokens: int | None = None,
    sample_positions: int = 0,
    seed: int = 0,
    documents: Sequence[int] | None = None,
    folder: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LensProfile:
    """Read every position of a corpus at every layer, and keep sums by layer and document.

    `corpus` is what `lens.read_corpus` takes. `lens` is "output" (W_U), "input" (W_E) or a fitted
    one. `fit_on` are other documents (`corpus.split()`), for the context-free guess that skill is
    measured against; without them there is no skill. `sample_positions` positions (at most 4,096)
    are read a second time for JS, TV, copy split, temperature and marginal bias. `documents`
    measures a part, to be merged. Windows are of `window_tokens`, 256 or the context where that is
    less. `seed` draws the sampled positions; `progress` is called with a `Progress` after each
    document. With a `folder`, finished documents are kept there and a run that was stopped
    continues.

    Raises SelectionError for options out of range and where a document of `fit_on` is measured too,
    ProvenanceError where the folder holds another measurement, ExportError and ResultFileError
    where it cannot be written or read, UnsupportedArchitectureError where the input lens or the
    second reading needs a direct readout, PromptError, TokenizerError, CorpusError.

    >>> lens.measure(model, held_out, fit_on=fit)  # doctest: +SKIP
    """
    texts = read_corpus(corpus)
    wanted = _wanted(documents, len(texts))
    if fit_on is not None:
        require_apart(fit_on, texts.select(wanted))
    reading = reading_of(model, lens)
    windows = windows_of(model, texts, window_tokens=window_tokens)
    if not 0 <= sample_positions <= MAX_POSITIONS:
        raise SelectionError(
            f"sample_positions is {sample_positions}; expected 0 to {MAX_POSITIONS}."
        )
    source = _provenance(model, reading, texts, windows, fit_on, sample_positions, seed)
    shards = Shards(None if folder is None else Path(folder), source)
    parts = shards.load(wanted)
    baseline = _baseline(model, fit_on, windows.window_tokens, shards)
    plan = _Plan(
        texts=texts,
        windows=windows,
        sampled=_sampled(windows, sample_positions, seed, d_vocab=model.d_vocab),
        baseline=None if baseline is None else torch.from_numpy(baseline.logprob_bits),
        source=source,
    )
    done = {int(d) for part in parts for d in part.documents}
    report = _reporter(windows, wanted, done, progress)
    for group in _groups([d for d in wanted if d not in done]):
        part = _measured(model, reading, plan, group, report)
        shards.save(part)
        parts.append(part)
    return merged(parts)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What every document of a run is measured with."""

    texts: Corpus
    windows: Windows
    sampled: list[np.ndarray] | None
    baseline: torch.Tensor | None
    source: ProfileProvenance


def _wanted(documents: Sequence[int] | None, count: int) -> list[int]:
    if documents is None:
        return list(range(count))
    wanted = sorted({int(d) for d in documents})
    wrong = [d for d in wanted if not 0 <= d < count]
    if wrong or not wanted:
        raise SelectionError(f"There are no documents {wrong}; the corpus has 0 to {count - 1}.")
    return wanted


def _groups(documents: list[int]) -> Iterator[list[int]]:
    """Neighbours, in groups that begin at the same places whatever part of a corpus is measured."""
    by_shard: dict[int, list[int]] = {}
    for document in documents:
        by_shard.setdefault(document // SHARD_DOCUMENTS, []).append(document)
    yield from by_shard.values()


def _measured(
    model: "Checkpoint",
    reading: Reading,
    plan: _Plan,
    documents: list[int],
    report: Callable[[int], None],
) -> LensProfile:
    """The profile of some documents."""
    tallies = []
    for document in documents:
        sampled = None if plan.sampled is None else plan.sampled[document]
        windows = plan.windows.by_document[document]
        tallies.append(
            tally(model, reading, windows, baseline_logprob_bits=plan.baseline, sampled=sampled)
        )
        report(document)
    return _profile(plan, documents, tallies)


def _profile(plan: _Plan, documents: list[int], tallies: list[Tally]) -> LensProfile:
    n_folds, count = N_FOLDS, len(plan.texts)
    folds = np.array([document * n_folds // count for document in documents])
    marginals: dict[int, np.ndarray] = {}
    for fold, t in zip(folds.tolist(), tallies, strict=True):
        if t.marginals is not None:
            marginals[fold] = marginals[fold] + t.marginals if fold in marginals else t.marginals

    def by_fold(arrays: list[np.ndarray]) -> np.ndarray:
        total = np.zeros((n_folds, *arrays[0].shape), dtype=np.int64)
        np.add.at(total, folds, np.stack(arrays))
        return total

    held = [plan.texts.documents[document] for document in documents]
    return LensProfile(
        provenance=plan.source,
        documents=np.array(documents, dtype=np.int64),
        ids=tuple(d.id for d in held),
        sources=tuple(d.source for d in held),
        counts={n: np.array([t.counts[n] for t in tallies], dtype=np.int64) for n in COUNTS},
        final_sums={n: np.array([t.final_sums[n] for t in tallies]) for n in FINAL_SUMS},
        sums={n: np.stack([t.sums[n] for t in tallies]) for n in (*SUMS, *SAMPLED)},
        tau_kl_bits=np.stack([t.tau_kl_bits for t in tallies]),
        depths=np.stack([t.depths for t in tallies]),
        kl_bins=by_fold([t.kl_bins for t in tallies]),
        confidence={n: by_fold([t.confidence[n] for t in tallies]) for n in BINS},
        marginals=marginals,
    )


def _sampled(windows: Windows, count: int, seed: int, *, d_vocab: int) -> list[np.ndarray] | None:
    """For each document the places of its sampled positions, its windows laid end to end.

    A token that the unembedding has no row for (of a padded lookup) cannot be copied: positions
    of such tokens are not drawn.
    """
    if count == 0:
        return None
    places = []
    for document, held in enumerate(windows.by_document):
        begin = 0
        for window in held:
            at = np.flatnonzero(window.ids[1 : window.n_read] < d_vocab) + 1 + begin
            places.append(np.stack([np.full(len(at), document), at], axis=1))
            begin += len(window.ids)
    every = np.concatenate(places)
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.choice(len(every), min(count, len(every)), replace=False))
    return [every[chosen][every[chosen][:, 0] == d, 1] for d in range(len(windows.by_document))]


def _baseline(
    model: "Checkpoint", fit_on: Corpus | None, window_tokens: int, shards: Shards
) -> Baseline | None:
    """Fitted, or as an earlier run of the same measurement fitted it."""
    if fit_on is None:
        return None
    found = shards.load_baseline()
    if found is None:
        found = fit_baseline(model, fit_on, window_tokens=window_tokens)
        shards.save_baseline(found)
    return found


def _provenance(
    model: "Checkpoint",
    reading: Reading,
    texts: Corpus,
    windows: Windows,
    fit_on: Corpus | None,
    sample_positions: int,
    seed: int,
) -> ProfileProvenance:
    fitted = "" if fit_on is None else baseline_hash(model, fit_on, windows.window_tokens)
    return ProfileProvenance(
        reading=provenance(model, reading.name),
        lens_hash=reading.hash,
        corpus_name=texts.name,
        corpus_hash=texts.hash,
        n_documents=len(texts),
        n_sources=len(texts.sources),
        window_tokens=windows.window_tokens,
        tokenizer_hash=tokenizer_hash(model.tokenizer),
        baseline_hash=fitted,
        baseline_name="" if fit_on is None else fit_on.name,
        sample_positions=sample_positions,
        seed=seed,
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """A digest of the vocabulary, "" without a tokenizer: equal where ids mean the same texts."""
    if tokenizer is None:
        return ""
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.blake2b(words.encode("ascii"), digest_size=16).hexdigest()


def _reporter(
    windows: Windows,
    wanted: list[int],
    done: set[int],
    progress: Callable[[Progress], None] | None,
) -> Callable[[int], None]:
    sizes = windows.n_positions
    total = sum(sizes[d] for d in wanted)
    resumed = sum(sizes[d] for d in wanted if d in done)
    began, count = time.monotonic(), [resumed]

    def report(document: int) -> None:
        count[0] += sizes[document]
        if progress is not None:
            seconds = time.monotonic() - began
            progress(Progress(done=count[0], total=total, resumed=resumed, seconds=seconds))

    return report
