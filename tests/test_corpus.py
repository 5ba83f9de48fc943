import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lens.corpus import MAX_CHARACTERS, SAMPLE, Corpus, Document, read_corpus, require_apart
from lens.errors import CorpusError, SelectionError

ROOT = Path(__file__).parents[1]
NOVEL = "A TALE\n\n" + "\n\n".join(
    f"CHAPTER {number}\n\nIt was day {number}.\nAnd then\n\npart two of it came."
    for number in (1, 2, 3, 4)
)


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_the_shipped_sample_is_small_and_holds_a_document_for_each_chapter() -> None:
    packed = (ROOT / "lens" / "data" / "austen.jsonl.xz").read_bytes()
    assert len(packed) < 400_000
    corpus = read_corpus()
    assert len(corpus) >= 200
    assert len(corpus.sources) == 6
    assert max(len(d.text or "") for d in corpus.documents) <= MAX_CHARACTERS
    assert corpus.documents[0].text.startswith("Emma Woodhouse, handsome, clever, and rich")  # type: ignore[union-attr]
    assert corpus.hash == "3de05921f2c3" + corpus.hash[12:]


def test_a_split_of_the_sample_keeps_books_apart_and_200_documents_to_measure() -> None:
    fit, held_out = read_corpus().split()
    assert set(fit.sources) & set(held_out.sources) == set()
    assert len(fit) + len(held_out) == len(read_corpus())
    assert len(held_out) >= 200


def test_a_text_that_is_there_twice_is_on_one_side_of_a_split() -> None:
    texts = [f"text {i % 7}" for i in range(20)]
    for corpus in (read_corpus(texts), read_corpus([[i % 7, 1] for i in range(20)])):
        fit, held_out = corpus.split(fit_share=0.1)
        require_apart(fit, held_out)
        assert len(fit) + len(held_out) == len(corpus)
        assert {d.content for d in fit.documents} | {d.content for d in held_out.documents} == {
            d.content for d in corpus.documents
        }
    with pytest.raises(SelectionError, match="none is left to measure"):
        read_corpus(["the same", " the same\n", "the same"]).split()


def test_documents_on_both_sides_are_counted_and_the_first_is_named() -> None:
    texts = [f"text {i}" for i in range(6)]
    require_apart(read_corpus(texts[:3]), read_corpus(texts[3:]))
    with pytest.raises(SelectionError, match=r"2 of the 4 .* the first of them '2'"):
        require_apart(
            read_corpus(texts[4:]), read_corpus(texts[2:4] + [f"{t}\n" for t in texts[4:]])
        )


def test_a_split_of_one_source_keeps_documents_apart() -> None:
    fit, held_out = read_corpus([f"text {i}" for i in range(10)]).split()
    assert (len(fit), len(held_out)) == (2, 8)
    assert not {d.text for d in fit.documents} & {d.text for d in held_out.documents}
    with pytest.raises(SelectionError, match="two documents"):
        read_corpus(["only one"]).split()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_is_a_document(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": f"text {i}", "id": f"d{i}", "source": "s"} for i in range(3)]
    corpus = read_corpus(write(tmp_path / f"c{suffix}", rows))
    assert [(d.id, d.source, d.text) for d in corpus.documents] == [
        (row["id"], row["source"], row["text"]) for row in rows
    ]


def test_the_same_texts_have_the_same_hash_whatever_file_holds_them(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "id": f"d{i}", "source": "s"} for i in range(3)]
    one = read_corpus(write(tmp_path / "a.jsonl", rows))
    other = read_corpus(write(tmp_path / "b.parquet", rows))
    assert one.hash == other.hash
    rows[1]["text"] += "."
    assert read_corpus(write(tmp_path / "c.jsonl", rows)).hash != one.hash


def test_order_and_ids_are_part_of_the_hash() -> None:
    corpus = read_corpus(["a", "b"])
    assert corpus.select([1, 0]).hash != corpus.hash
    renamed = Corpus(name="x", documents=(Document(id="7", source="list", text="a"),))
    assert renamed.hash != corpus.select([0]).hash


def test_a_novel_is_cut_at_its_chapters(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text(NOVEL)
    corpus = read_corpus(path)
    assert [d.text.split("\n")[0] for d in corpus.documents] == [  # type: ignore[union-attr]
        f"CHAPTER {number}" for number in (1, 2, 3, 4)
    ]
    # "part two of it came." stands in the prose and is no heading.
    assert all("part two" in (d.text or "") for d in corpus.documents)


def test_text_without_chapters_becomes_runs_of_whole_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} " + "x" * 900 for i in range(12)]
    path = tmp_path / "plain.txt"
    path.write_text("\n\n".join(paragraphs))
    corpus = read_corpus(path)
    assert "\n\n".join(d.text or "" for d in corpus.documents) == "\n\n".join(paragraphs)
    assert 1 < len(corpus) < len(paragraphs)
    assert all(len(d.text or "") <= MAX_CHARACTERS for d in corpus.documents)


def test_a_book_behind_the_last_heading_is_not_one_document(tmp_path: Path) -> None:
    path = tmp_path / "books.txt"
    path.write_text(NOVEL + "\n\n".join("y" * 1000 for _ in range(120)))
    sizes = [len(d.text or "") for d in read_corpus(path).documents]
    assert max(sizes) <= MAX_CHARACTERS
    assert len(sizes) > 30


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert [d.source for d in read_corpus(tmp_path).documents] == ["a.txt", "b.txt"]


def test_token_ids_are_documents_too() -> None:
    corpus = read_corpus([[1, 2, 3], [4]])
    assert [d.ids for d in corpus.documents] == [(1, 2, 3), (4,)]
    assert corpus.documents[0].n_bytes == 0


def test_documents_taken_are_spread_over_the_corpus() -> None:
    corpus = read_corpus(max_documents=6)
    assert len(corpus) == 6
    assert len(corpus.sources) >= 4


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "no document"),
        ("a.txt", b"caf\xe9", "not UTF-8 at byte 3"),
        ("a.txt", b"a\0b", "NUL"),
        ("a.jsonl", b'{"text": "x"}\nnonsense', "line 2 is not JSON"),
        ("a.jsonl", b"[1]", "no JSON object"),
        ("a.jsonl", b'{"body": "x"}', "it has body"),
        ("a.jsonl", b'{"text": 3}', "is int, no text"),
        ("a.jsonl", b'{"text": "x", "id": 1}\n{"text": "y", "id": 1}', "Two documents"),
        ("a.jsonl", b'{"input_ids": 5}', "row 0 of 'a' are '5'; expected a list of whole numbers"),
        ("a.jsonl", b'{"input_ids": "abc"}', "'abc'; expected a list"),
        ("a.jsonl", b'{"input_ids": [1, 2.5]}', "expected a list"),
        ("a.parquet", b"nonsense", "cannot be read as Parquet"),
    ],
)
def test_what_is_no_corpus_is_refused(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=complaint):
        read_corpus(tmp_path / name)


def test_a_name_that_is_nothing_lists_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r'"sample".*\.parquet.*owner/name'):
        read_corpus(tmp_path / "missing.txt")
    with pytest.raises(CorpusError, match="as a dataset of the hub it cannot be read"):
        read_corpus("nobody-at-all/no-such-dataset")


def test_the_sample_is_what_its_script_makes(tmp_path: Path) -> None:
    """A package of one novel in R's format, written here, goes through the script's reader."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import sample_corpus
    finally:
        sys.path.pop(0)
    lines = NOVEL.split("\n")
    assert [c[0] for c in sample_corpus.chapters(lines)] == [
        f"It was day {number}. And then" for number in (1, 2, 3, 4)
    ]
    data = _strings(["first", "höre"])
    assert sample_corpus.Serialized(data).item() == ["first", "höre"]
    with pytest.raises(ValueError, match="XDR"):
        sample_corpus.Serialized(b"B\n" + data)


def _strings(values: list[str]) -> bytes:
    """R's serialization of a character vector: version 2, flags, then each string."""
    import struct

    out = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 16, len(values))
    for value in values:
        raw = value.encode()
        out += struct.pack(">ii", 9, len(raw)) + raw
    return out


def test_the_sample_file_is_plain_json_lines() -> None:
    text = lzma.decompress((ROOT / "lens" / "data" / "austen.jsonl.xz").read_bytes()).decode()
    assert {tuple(json.loads(line)) for line in text.splitlines()} == {("id", "source", "text")}
    assert json.loads(text.splitlines()[0])["source"] == "Emma"
    assert SAMPLE == "sample"


def test_reading_a_corpus_imports_no_torch() -> None:
    code = "import sys, lens.corpus as c; c.read_corpus(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "False", run.stderr


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.HTML"])
def test_a_table_is_not_read_as_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('[{"text": "one"}, {"text": "two"}]', encoding="utf-8")
    with pytest.raises(CorpusError, match="marks would be read as text"):
        read_corpus(path)
    path.rename(tmp_path / "x.txt")
    assert len(read_corpus(tmp_path / "x.txt")) == 1


@pytest.mark.parametrize("items", [[1, 2, 3], [[1.9, 2.2]], [{"text": "one"}], [None]])
def test_a_list_of_something_else_is_refused(items: list[object]) -> None:
    from lens.corpus import _from_list

    with pytest.raises(CorpusError, match="whole numbers"):
        _from_list(items)


def test_a_mapping_of_columns_is_no_list_of_texts() -> None:
    from lens.corpus import _from_list

    for table in ({"text": ["one", "two"]}, 3, None):
        with pytest.raises(CorpusError, match="list of texts"):
            _from_list(table)
    assert [d.ids for d in _from_list([np.array([1, 2]), (3,)]).documents] == [(1, 2), (3,)]


def test_headings_behind_most_of_a_text_are_none_of_chapters(tmp_path: Path) -> None:
    prose = "\n\n".join(
        f"Paragraph {i} of an essay, which goes on for a while." for i in range(300)
    )
    notes = "\n\n".join(f"{n}\n\nA note." for n in ("I", "II", "III"))
    path = tmp_path / "essay.txt"
    path.write_text(f"{prose}\n\n{notes}", encoding="utf-8")
    read = "".join(d.text or "" for d in read_corpus(path).documents)
    assert "Paragraph 0 " in read
    assert "A note." in read
    path.write_text(f"A title\n\n{notes}", encoding="utf-8")
    assert (read_corpus(path).documents[0].text or "").startswith("I\n")


def test_an_id_of_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "id": null}\n{"text": "b", "id": null, "source": null}\n')
    assert [(d.id, d.source) for d in read_corpus(path).documents] == [("0", "x"), ("1", "x")]
