"""Texts to measure on: documents with ids and sources, and a hash of the whole."""

import hashlib
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

from lens.errors import CorpusError, MissingPackageError, SelectionError
from lens.files import expanded, is_file, is_folder

SAMPLE = "sample"
"""The name of the shipped sample: the first paragraphs of each chapter of Austen's six novels."""

MAX_CHARACTERS = 4000
"""Longest document that is made of paragraphs, where a text has no chapters."""

MAX_CHAPTER = 100_000
"""A chapter with more characters than this is taken for a book, and cut into paragraphs."""

_NUMBERS = (
    r"(?:[ivxlcdm]+|\d+|(?:the )?(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|first|second|third|fourth|fifth|last))"
)
# After an empty line, so that no line of prose that begins with "part two of" is one.
_HEADING = re.compile(
    r"(?:\A|(?<=\n\n))[ \t]*(?:(?=(?-i:[A-Z]))(?:chapter|letter|book|volume|part|act)[ \t]+"
    rf"{_NUMBERS}\b[^\n]{{0,60}}|(?-i:[IVXLCDM]+)\.?)[ \t]*(?=\n)",
    re.IGNORECASE,
)
_FEWEST_CHAPTERS = 3
_TEXT_SUFFIXES = (".txt", ".md", ".text")
_TABLE_SUFFIXES = (".json", ".csv", ".tsv", ".xml", ".html", ".htm", ".yaml", ".yml", ".ipynb")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, or one sequence of token ids where a model has no tokenizer.

    `source` names what it was taken from (a book, a file); documents of one source are alike.
    """

    id: str
    source: str
    text: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def n_bytes(self) -> int:
        """Length of the text in UTF-8 bytes; 0 for token ids."""
        return 0 if self.text is None else len(self.text.encode("utf-8", "surrogatepass"))

    @property
    def content(self) -> str | tuple[int, ...]:
        """The text without white space around it, or the ids: equal where documents repeat."""
        return (self.ids or ()) if self.text is None else self.text.strip()


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in a fixed order; two corpora with the same hash hold the same texts."""

    name: str
    documents: tuple[Document, ...]

    def __post_init__(self) -> None:
        if not self.documents:
            raise CorpusError(f"The corpus {self.name!r} holds no document with any text in it.")
        seen: set[str] = set()
        for document in self.documents:
            if document.id in seen:
                raise CorpusError(
                    f"Two documents of {self.name!r} have the id {document.id!r}; ids must differ, "
                    "because results are kept by them."
                )
            seen.add(document.id)

    def __len__(self) -> int:
        return len(self.documents)

    def __repr__(self) -> str:
        n_bytes = sum(document.n_bytes for document in self.documents)
        return (
            f"Corpus({self.name}: {len(self)} documents of {len(self.sources)} sources, "
            f"{n_bytes:,} bytes, {self.hash[:12]})"
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """What the documents were taken from, in order of first use."""
        return tuple(dict.fromkeys(document.source for document in self.documents))

    @cached_property
    def hash(self) -> str:
        """32 hex digits over the ids, sources and texts of all documents, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for d in self.documents:
            row = json.dumps([d.id, d.source, d.text, d.ids], ensure_ascii=True)
            digest.update(row.encode("ascii") + b"\n")
        return digest.hexdigest()

    def select(self, documents: Sequence[int], *, name: str | None = None) -> "Corpus":
        """The documents at these places, in this order. Raises SelectionError."""
        wrong = [i for i in documents if not -len(self) <= i < len(self)]
        if wrong:
            raise SelectionError(f"There are no documents {wrong[:5]}; there are {len(self)}.")
        chosen = tuple(self.documents[i] for i in documents)
        return replace(self, name=name or self.name, documents=chosen)

    def take(self, count: int) -> "Corpus":
        """`count` documents spread evenly over the corpus; all of them where there are fewer.

        Raises SelectionError for a count below 1.
        """
        if count < 1:
            raise SelectionError(f"Asked for {count} documents; expected at least 1.")
        if count >= len(self):
            return self
        return self.select([i * len(self) // count for i in range(count)])

    def in_runs(self) -> "Corpus":
        """The same texts, each cut into runs of whole paragraphs of up to 4,000 characters."""
        documents = []
        for document in self.documents:
            runs = [document.text] if document.text is None else _runs(document.text)
            documents += [
                replace(document, id=f"{document.id}/{number:03}", text=run)
                for number, run in enumerate(runs, 1)
            ]
        return replace(self, documents=tuple(documents))

    def split(self, *, fit_share: float = 0.2) -> tuple["Corpus", "Corpus"]:
        """(to fit on, to measure on): whole sources apart, so that no book is on both sides.

        The smallest sources go to fitting until they hold `fit_share` of the documents. With one
        source every fifth document (by `fit_share`) goes there, which is said in its name. A text
        that is there again goes there too. Raises SelectionError where nothing is left to measure.
        """
        if len(self) < 2 or not 0 < fit_share < 1:
            raise SelectionError(
                f"A split needs two documents and a share between 0 and 1; found {len(self)} and "
                f"{fit_share}."
            )
        places = self._places_to_fit(fit_share)
        fitted = {self.documents[i].content for i in places}
        places.update(i for i, d in enumerate(self.documents) if d.content in fitted)
        rest = [i for i in range(len(self)) if i not in places]
        if not rest:
            raise SelectionError(
                f"All {len(self)} documents of {self.name!r} hold what is fitted on, so none is "
                "left to measure on. Pass more texts."
            )
        how = "sources apart" if len(self.sources) > 1 else "one source, documents apart"
        return (
            self.select(sorted(places), name=f"{self.name} (fit, {how})"),
            self.select(rest, name=f"{self.name} (held out, {how})"),
        )

    def _places_to_fit(self, fit_share: float) -> set[int]:
        wanted = max(1, round(fit_share * len(self)))
        if len(self.sources) == 1:
            return {i * len(self) // wanted for i in range(wanted)}
        by_source = {
            s: [i for i, d in enumerate(self.documents) if d.source == s] for s in self.sources
        }
        places: set[int] = set()
        for source in sorted(by_source, key=lambda s: len(by_source[s]))[:-1]:
            if len(places) >= wanted:
                break
            places.update(by_source[source])
        return places


def require_apart(fit_on: Corpus, measured: Corpus) -> None:
    """Raise SelectionError where a document to measure on is also among those to fit on."""
    fitted = {document.content for document in fit_on.documents}
    both = [d.id for d in measured.documents if d.content in fitted]
    if both:
        raise SelectionError(
            f"{len(both)} of the {len(measured)} documents to measure on are also among those to "
            f"fit on, the first of them {both[0]!r}: what is fitted would be measured on its own "
            "documents. Pass others as fit_on, as corpus.split() gives them."
        )


def read_corpus(
    source: str | Path | Corpus | Sequence[str] | Sequence[Sequence[int]] = SAMPLE,
    *,
    text_column: str = "text",
    config: str | None = None,
    split: str = "test",
    max_documents: int | None = None,
) -> Corpus:
    """Documents from "sample", a file, a folder of text files, a list, or a dataset id of the hub.

    A row of JSONL or Parquet is a document; its text is in `text_column` (or ids in `input_ids`),
    its id and source in `id` and `source` where they are there. A text file is cut at its chapter
    headings, else into runs of paragraphs of up to 4,000 characters. `config` and `split` are
    those of a hub dataset. `max_documents` takes that many, spread evenly.

    Raises CorpusError for what is not there, empty or unreadable, MissingPackageError where a hub
    dataset needs a package.

    >>> len(read_corpus())
    269
    """
    corpus = source if isinstance(source, Corpus) else _read(source, text_column, config, split)
    return corpus if max_documents is None else corpus.take(max_documents)


def _read(source: Any, text_column: str, config: str | None, split: str) -> Corpus:
    if not isinstance(source, str | Path):
        return _from_list(source)
    if source == SAMPLE:
        return _sample()
    path = expanded(source)
    if is_folder(path):
        return _from_folder(path)
    if not is_file(path):
        if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            return _from_hub(source, text_column, config, split)
        raise CorpusError(
            f'There is no corpus at {str(source)[:200]!r}. Pass "sample", a .txt, .jsonl or '
            ".parquet file, a folder of text files, or a dataset id of the hub (owner/name)."
        )
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return Corpus(name=path.name, documents=_rows(_json_lines(path), path.stem, text_column))
    if path.suffix.lower() == ".parquet":
        return Corpus(name=path.name, documents=_rows(_parquet_rows(path), path.stem, text_column))
    if path.suffix.lower() in _TABLE_SUFFIXES:
        raise CorpusError(
            f"{path} is a table or a tree, and its marks would be read as text. Make .jsonl or "
            ".parquet of it, a row for each document, or .txt."
        )
    return Corpus(name=path.name, documents=tuple(_cut(_text_of(path), path.stem)))


def _sample() -> Corpus:
    packed = (files("lens") / "data" / "austen.jsonl.xz").read_bytes()
    rows = [json.loads(line) for line in lzma.decompress(packed).decode("utf-8").splitlines()]
    return Corpus(name=SAMPLE, documents=_rows(rows, SAMPLE, "text"))


def _from_list(items: Any) -> Corpus:
    if isinstance(items, Mapping) or hasattr(items, "columns") or not isinstance(items, Iterable):
        raise CorpusError(
            f"A corpus is a name or a list of texts or of token ids, not {type(items).__name__}. "
            "Pass the list of texts, as in table['text'].tolist()."
        )
    documents = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            if item.strip():
                documents.append(Document(id=str(number), source="list", text=item))
            continue
        ids = _ids_of(item.tolist() if hasattr(item, "tolist") else item, f"item {number}")
        if ids:
            documents.append(Document(id=str(number), source="list", ids=ids))
    return Corpus(name="list", documents=tuple(documents))


def _from_folder(folder: Path) -> Corpus:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in _TEXT_SUFFIXES)
    paths = sorted(p for p in found if is_file(p))
    if not paths:
        raise CorpusError(f"{folder} holds no {', '.join(_TEXT_SUFFIXES)} file.")
    documents = [
        document
        for path in paths
        for document in _cut(_text_of(path), path.relative_to(folder).as_posix())
    ]
    return Corpus(name=folder.name, documents=tuple(documents))


def _text_of(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8 at byte {error.start}. Convert it, or pass .jsonl or .parquet."
        ) from None
    except OSError as error:
        raise CorpusError(f"Cannot read {path}: {error.strerror}.") from error
    if "\0" in text:
        raise CorpusError(f"{path} holds NUL bytes: it is no text file.")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _cut(text: str, source: str) -> Iterator[Document]:
    """Chapters where a text has at least three headings, else runs of paragraphs.

    What stands before the first heading is left out as a title page, unless it is longer than what
    stands behind: then the headings are none of chapters.
    """
    starts = [match.start() for match in _HEADING.finditer(text)]
    parts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
    # A heading with nothing beneath it (a table of contents, VOLUME I) is no chapter.
    chapters = [part.strip() for part in parts if "\n" in part.strip()]
    in_chapters = bool(starts) and starts[0] <= len(text) // 2
    pieces = chapters if in_chapters and len(chapters) >= _FEWEST_CHAPTERS else [text]
    # A whole book has no headings, or stands behind the last heading of another.
    pieces = [p for c in pieces for p in ([c] if _is_chapter(c, text) else _runs(c))]
    for number, piece in enumerate(pieces, 1):
        yield Document(id=f"{source}/{number:04}", source=source, text=piece)


def _is_chapter(piece: str, text: str) -> bool:
    return piece is not text and len(piece) <= MAX_CHAPTER


def _runs(text: str) -> list[str]:
    """Whole paragraphs put together up to MAX_CHARACTERS; a longer one is cut at its lines."""
    pieces: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        for part in _short_parts(paragraph.strip("\n")):
            if pieces and len(pieces[-1]) + 2 + len(part) <= MAX_CHARACTERS:
                pieces[-1] += "\n\n" + part
            elif part.strip():
                pieces.append(part)
    return pieces


def _short_parts(paragraph: str) -> Iterator[str]:
    """The paragraph, cut at a line's, a sentence's or a word's end where it is too long."""
    start = 0
    while len(paragraph) - start > MAX_CHARACTERS:
        most = start + MAX_CHARACTERS
        ends = (paragraph.rfind(mark, start + 1, most) for mark in ("\n", ". ", " "))
        end = next((e + 1 for e in ends if e > start + MAX_CHARACTERS // 2), most)
        yield paragraph[start:end].rstrip("\n")
        start = end
        while start < len(paragraph) and paragraph[start] == "\n":
            start += 1
    yield paragraph[start:]


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path}, line {number} is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise CorpusError(f"{path}, line {number} is no JSON object but {type(row).__name__}.")
        yield row


def _parquet_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read as Parquet: {error}") from error


def _from_hub(name: str, text_column: str, config: str | None, split: str) -> Corpus:
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            f"{name!r} is no file here, and a dataset of the hub needs: pip install datasets"
        ) from error
    load: Callable[..., Any] = datasets.load_dataset
    try:
        rows = load(name, config, split=split)
    # Offline, gated, renamed, without that split: the hub's errors have no common class.
    except Exception as error:
        raise CorpusError(
            f"{name!r} is no file here, and as a dataset of the hub it cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Corpus(name=f"{name}:{split}", documents=_rows(rows, name, text_column))


def _rows(rows: Iterable[Mapping[str, Any]], source: str, text_column: str) -> tuple[Document, ...]:
    documents = []
    for number, row in enumerate(rows):
        text, ids = row.get(text_column), row.get("input_ids")
        if text is None and ids is None:
            raise CorpusError(
                f"Row {number} of {source!r} has no {text_column!r} and no 'input_ids'; it has "
                f"{', '.join(row)}. Name the column: text_column=… (--text-column)."
            )
        if text is not None and not isinstance(text, str):
            raise CorpusError(
                f"{text_column!r} in row {number} of {source!r} is {type(text).__name__}, no text."
            )
        kept = _ids_of(ids, f"row {number} of {source!r}") if text is None else ()
        if not (text.strip() if text is not None else kept):
            continue
        documents.append(
            Document(
                id=str(number if row.get("id") is None else row["id"]),
                source=str(source if row.get("source") is None else row["source"]),
                text=text,
                ids=None if text is not None else kept,
            )
        )
    return tuple(documents)


def _ids_of(held: Any, where: str) -> tuple[int, ...]:
    if not isinstance(held, Sequence) or not all(isinstance(i, Integral) for i in held):
        raise CorpusError(
            f"The token ids of {where} are {str(held)[:40]!r}; expected a list of whole numbers."
        )
    return tuple(int(i) for i in held)
