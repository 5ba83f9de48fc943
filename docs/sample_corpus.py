"""Rebuilds lens/data/austen.jsonl.xz from the Debian package r-cran-janeaustenr (public domain).

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb unpacked
    python docs/sample_corpus.py unpacked/usr/lib/R/site-library/janeaustenr/data
    python docs/sample_corpus.py unpacked/usr/lib/R/site-library/janeaustenr/data --whole FILE

One document for each chapter of the six novels: its first paragraphs, up to 4,000 characters. With
--whole the whole chapters are written to FILE (JSONL) instead, on which the twins are trained.
A paragraph stands on one line: the breaks inside it are those of a printed page. The two files
Rdata.rdx (an index of offset and length) and Rdata.rdb (zlib blocks) are read without R.
"""

import argparse
import gzip
import json
import lzma
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).parents[1] / "lens" / "data" / "austen.jsonl.xz"
NOVELS = {
    "emma": "Emma",
    "mansfieldpark": "Mansfield Park",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
    "prideprejudice": "Pride and Prejudice",
    "sensesensibility": "Sense and Sensibility",
}
MAX_CHARACTERS = 4000
HEADING = re.compile(r"^chapter\s+[\divxlc]+\.?$", re.IGNORECASE)
NOT_PROSE = re.compile(r"^(volume\s+[ivx]+|the end|finis)\.?$", re.IGNORECASE)

# R's serialization: the type of an item, in the low byte of its flags.
NIL, SYMBOL, PAIRS, CHARS, LOGICALS, INTEGERS, STRINGS, LIST, SEEN = (
    254, 1, 2, 9, 10, 13, 16, 19, 255,
)  # fmt: skip
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10


class Serialized:
    """One value in R's binary (XDR) serialization, of the few types that occur here."""

    def __init__(self, data: bytes):
        self.data, self.at, self.symbols = data, 2, []
        if data[:2] != b"X\n":
            raise ValueError(f"Expected R's XDR serialization (X), found {data[:2]!r}.")
        version = self.integer()
        self.at += 8
        if version == 3:
            self.text(self.integer())

    def integer(self) -> int:
        (value,) = struct.unpack_from(">i", self.data, self.at)
        self.at += 4
        return value

    def text(self, length: int) -> str | None:
        if length == -1:
            return None
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def item(self) -> Any:
        """The next value; a list with names becomes a dict, attributes else are dropped."""
        flags = self.integer()
        kind = flags & 0xFF
        if kind == NIL:
            return None
        if kind == SEEN:
            return self.symbols[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == PAIRS:
            return self.pairs(flags)
        if kind == CHARS:
            return self.text(self.integer())
        count = self.integer()
        if kind in (LOGICALS, INTEGERS):
            value: Any = [self.integer() for _ in range(count)]
        elif kind in (STRINGS, LIST):
            value = [self.item() for _ in range(count)]
        else:
            raise ValueError(f"R type {kind} at byte {self.at} is not one that this reader knows.")
        attributes = self.item() if flags & HAS_ATTRIBUTES else None
        names = (attributes or {}).get("names")
        return dict(zip(names, value, strict=True)) if kind == LIST and names else value

    def pairs(self, flags: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while flags & 0xFF == PAIRS:
            if flags & HAS_ATTRIBUTES:
                self.item()
            name = self.item() if flags & HAS_TAG else str(len(found))
            found[name] = self.item()
            flags = self.integer()
        return found


def lines_of(folder: Path) -> dict[str, list[str]]:
    """The lines of each novel."""
    index = Serialized(gzip.decompress((folder / "Rdata.rdx").read_bytes())).item()
    blocks = (folder / "Rdata.rdb").read_bytes()
    novels = {}
    for name, (offset, length) in index["variables"].items():
        data = zlib.decompress(blocks[offset + 4 : offset + length])
        novels[name] = Serialized(data).item()
    return novels


def chapters(lines: list[str]) -> list[list[str]]:
    """The paragraphs of each chapter, one line each, without headings."""
    found: list[list[str]] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        stripped = line.strip()
        if HEADING.match(stripped):
            found.append([])
        elif stripped and not NOT_PROSE.match(stripped):
            paragraph.append(stripped)
        elif paragraph:
            if found:
                found[-1].append(" ".join(paragraph))
            paragraph = []
    return found


def beginning(paragraphs: list[str]) -> str:
    """The first paragraphs that fit; of a longer first one, whole sentences."""
    text = paragraphs[0]
    if len(text) > MAX_CHARACTERS:
        return text[: text.rfind(". ", 0, MAX_CHARACTERS) + 1]
    for paragraph in paragraphs[1:]:
        if len(text) + 1 + len(paragraph) > MAX_CHARACTERS:
            break
        text += "\n" + paragraph
    return text


def rows(folder: Path, text_of: Callable[[list[str]], str]) -> bytes:
    """The chapters as JSON lines, of each what `text_of` makes of its paragraphs."""
    found = []
    for name, lines in sorted(lines_of(folder).items()):
        for number, paragraphs in enumerate(chapters(lines), 1):
            row = {"id": f"{name}/{number:02}", "source": NOVELS[name]}
            found.append(json.dumps({**row, "text": text_of(paragraphs)}, ensure_ascii=False))
    return ("\n".join(found) + "\n").encode("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the unpacked package's data")
    parser.add_argument("--whole", type=Path, metavar="FILE", help="write whole chapters here")
    arguments = parser.parse_args()
    if arguments.whole is not None:
        novels = rows(arguments.folder, "\n".join)
        arguments.whole.write_bytes(novels)
        print(f"{len(novels.splitlines())} chapters, {len(novels):,} bytes")
        return
    sample = rows(arguments.folder, beginning)
    packed = lzma.compress(sample, preset=9 | lzma.PRESET_EXTREME)
    SAMPLE.write_bytes(packed)
    count = len(sample.splitlines())
    print(f"{count} documents, {len(sample):,} bytes, {len(packed):,} compressed")


if __name__ == "__main__":
    main()
