"""Files are whole or not there, keep their permissions and links, and are refused beforehand."""

import os
from pathlib import Path

import numpy as np
import pytest

import lens
from lens import files
from lens.errors import ExportError, ResultFileError
from lens.measuring.profile_file import read_profile
from tests.measuring.small import checkpoint, id_corpus


def test_a_link_stays_and_its_file_changes(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o600)
    link.symlink_to(target)
    with files.written_whole(link) as partial:
        partial.write_text("new", encoding="utf-8")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.csv", "target.csv"]


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with files.written_whole(tmp_path / "a") as partial:
            partial.write_text("x", encoding="utf-8")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ExportError, match="No space left"), files.written_whole(path):
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyError), files.written_whole(path):
        raise KeyError
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("name", ["x" * 240 + ".csv", "漢" * 80 + ".csv"])
def test_a_long_name_is_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    files.require_writable(path)
    with files.written_whole(path) as partial:
        partial.write_text("x", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "x"
    too_long = tmp_path / ("x" * 300)
    assert not files.is_file(too_long)
    assert not files.is_folder(too_long)
    with pytest.raises(ExportError, match="too long"), files.written_whole(too_long):
        pass


def test_a_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    path.write_text("old", encoding="utf-8")
    files.require_writable(path)
    # As anyone but root: root may write anything.
    monkeypatch.setattr(os, "access", lambda *a: False)
    with pytest.raises(ExportError, match="write-protected"):
        files.require_writable(path)


def test_a_home_that_is_not_there_is_a_name() -> None:
    assert files.expanded("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    assert files.expanded("~") == Path.home()


def flipped(path: Path, place: int) -> bytes:
    held = bytearray(path.read_bytes())
    held[place] ^= 0x10
    return bytes(held)


def test_a_flipped_bit_of_a_table_is_refused_or_harmless(tmp_path: Path) -> None:
    model = checkpoint(n_layers=2)
    found = model.logit_lens([3, 4, 5, 6])
    profile = lens.measure(model, id_corpus(3, 12))
    one, other = tmp_path / "one.parquet", tmp_path / "profile.parquet"
    found.save(one)
    profile.save(other)
    generator = np.random.default_rng(0)
    refused = 0
    for path, read, fields in (
        (one, lens.read_predictions, ("top_logprob_bits", "top_ids", "kl_bits", "entropy_bits")),
        (other, lens.read_profile, ("kl_bins", "documents", "depths")),
    ):
        whole, expected = path.read_bytes(), read(path)
        # The pages; what the footer says of them is text.
        for place in generator.integers(4, len(whole) // 3, 30):
            path.write_bytes(flipped(path, int(place)))
            try:
                again = read(path)
            except ResultFileError:
                refused += 1
            else:
                for field in fields:
                    np.testing.assert_array_equal(getattr(again, field), getattr(expected, field))
            path.write_bytes(whole)
    assert refused > 40


@pytest.mark.parametrize("meta", [b"{", b"[]", b"null", b'{"format": "lens-profile-1"}'])
def test_a_damaged_profile_is_one_clear_error(meta: bytes, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "profile.parquet"
    lens.measure(checkpoint(n_layers=2), id_corpus(3, 12)).save(path)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"lens": meta}), path)
    with pytest.raises(ResultFileError, match=r"profile\.parquet"):
        read_profile(path)


def test_a_profile_with_rows_cut_off_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "profile.parquet"
    lens.measure(checkpoint(n_layers=2), id_corpus(3, 12)).save(path)
    table = pq.read_table(path)
    for short in (
        table.slice(0, len(table) - 2),
        table.slice(0, 0),
        table.drop_columns(["depths"]),
    ):
        pq.write_table(short, path)
        with pytest.raises(ResultFileError, match="damaged"):
            read_profile(path)
