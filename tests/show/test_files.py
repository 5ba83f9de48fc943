import json
import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lens.errors import ExportError, ResultFileError
from lens.lenses.predictions import LayerPredictions
from lens.show import export as export_module
from lens.show.export import WRITERS, export, predictions_to_frame, read_predictions
from tests.show.made import AWKWARD, made, provenance

NUMBERS = [".json", ".csv", ".parquet"]
ARRAYS = [
    name
    for name, value in vars(made(prompt=2, layers=2)).items()
    if isinstance(value, np.ndarray) or name == "set_logprob_bits"
]


def bits(result: LayerPredictions) -> dict:
    held = {name: getattr(result, name) for name in ARRAYS}
    return {n: None if a is None else (a.dtype.str, a.shape, a.tobytes()) for n, a in held.items()}


def odd_numbers(result):
    """NaN, infinities, minus zero, the smallest and the largest float in every float array."""
    odd = [np.nan, np.inf, -np.inf, -0.0]
    changes = {}
    for name in ARRAYS:
        value = getattr(result, name)
        if value is not None and value.dtype.kind == "f":
            info = np.finfo(value.dtype)
            flat = value.copy().reshape(-1)
            flat[:6] = [*odd, info.smallest_subnormal, info.max]
            changes[name] = flat.reshape(value.shape)
    return replace(result, **changes)


CASES = {
    "plain": lambda: made(awkward=False),
    "awkward": lambda: made(prompt=40, seed=3),
    "sets": lambda: made(sets={"right": [3], "wr\udce2ong, \n": [4, 5]}, seed=1),
    "sets that are written alike": lambda: made(sets={"\udce2": [3], "\\udce2": [4]}),
    "no set but an array": lambda: replace(
        made(), set_logprob_bits=np.empty((0, 13, 12), dtype=np.float32)
    ),
    "float64": lambda: made(dtype=np.float64, seed=2),
    "float16": lambda: made(dtype=np.float16, seed=2),
    "odd numbers": lambda: odd_numbers(made(sets={"a": [1]})),
    "one cell": lambda: made(prompt=1, layers=1, k=1),
    "some layers and positions": lambda: made(prompt=9).select(layers=[0, 6, 12], positions=[8, 2]),
    "no position": lambda: made().select(positions=[]),
    "no layer": lambda: made().select(layers=[]),
    "notes": lambda: made(notes=("cut, at 12\n", '"\\', "\udcff")),
    "rows of no token": lambda: replace(
        made(), padding_mass=np.random.default_rng(1).random((13, 12), dtype=np.float32)
    ),
    "layers and mids": lambda: replace(made(layers=5), layers=np.array([0, 0.5, 1, 1.5, 2])),
    "small ints": lambda: replace(made(), top_ids=made().top_ids.astype(np.int32)),
    "masked": lambda: made(target="same", revision="step1000"),
}


@pytest.mark.parametrize("suffix", NUMBERS)
@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "_") for name in CASES])
def test_a_file_reads_back_equal_to_the_last_bit(case, suffix, tmp_path):
    result = CASES[case]()
    back = read_predictions(export(result, tmp_path / f"result{suffix}"))
    assert back == result
    assert bits(back) == bits(result)
    assert back.provenance == result.provenance
    assert dict(back.vocabulary) == dict(result.vocabulary)


@pytest.mark.parametrize("suffix", NUMBERS)
def test_a_changed_number_or_text_does_not_read_back_equal(suffix, tmp_path):
    result = made()
    lowest = np.nextafter(result.kl_bits, np.float32(np.inf))
    back = read_predictions(export(replace(result, kl_bits=lowest), tmp_path / f"a{suffix}"))
    assert back != result
    other = replace(result, vocabulary={**result.vocabulary, 0: "other"})
    assert read_predictions(export(other, tmp_path / f"b{suffix}")) != result


@pytest.mark.parametrize("suffix", NUMBERS)
def test_random_texts_of_any_code_points_read_back(suffix, tmp_path):
    rng = np.random.default_rng(7)
    points = np.concatenate([np.arange(0x300), [0xD83D, 0xDE00, 0xDCE2, 0x2028, 0xFEFF, 0x1F600]])
    texts = {
        i: "".join(map(chr, rng.choice(points, rng.integers(0, 6)).tolist())) for i in range(96)
    }
    result = replace(made(prompt=60), vocabulary=texts)
    assert read_predictions(export(result, tmp_path / f"r{suffix}")) == result


def test_the_frame_has_a_row_for_each_cell_with_ids_beside_texts():
    result = made(prompt=9, sets={"right": [3]})
    frame = predictions_to_frame(result)
    assert len(frame) == 13 * 9
    cell = frame[(frame.layer == 4) & (frame.position == 7)].iloc[0]
    assert cell.top_1_id == result.top_ids[4, 7, 0]
    assert cell.top_1_logprob_bits == result.top_logprob_bits[4, 7, 0]
    assert cell.kl_bits == result.kl_bits[4, 7]
    assert cell.input_id == result.input_ids[7]
    assert cell.target_id == result.input_ids[8]
    assert cell.set_right_logprob_bits == result.set_logprob_bits[0, 4, 7]
    last = frame[frame.position == 8].iloc[0]
    assert (last.target_id, last.target_token) == (-1, "")
    assert np.isnan(last.target_logprob_bits)


def test_pandas_reads_the_csv_below_its_first_line(tmp_path):
    result = made(prompt=60, seed=5)
    path = export(result, tmp_path / "r.csv")
    read = pd.read_csv(path, skiprows=1, float_precision="round_trip")
    frame = predictions_to_frame(result)
    assert list(read.columns) == list(frame.columns)
    assert len(read) == len(frame)
    np.testing.assert_array_equal(read.top_1_id, frame.top_1_id)
    np.testing.assert_array_equal(read.kl_bits.to_numpy(np.float32), frame.kl_bits)
    exact = pd.read_csv(path, skiprows=1, keep_default_na=False)
    assert exact.input_token.tolist() == frame.input_token.tolist()
    # The twin: a reader's defaults take the token NA for a missing value.
    assert read.input_token.isna().sum() > 0


def test_parquet_opens_as_a_table(tmp_path):
    result = made()
    table = pd.read_parquet(export(result, tmp_path / "r.parquet"))
    assert len(table) == 13 * 12
    assert table.kl_bits.dtype == np.float32


@pytest.mark.parametrize("name", ["a.xlsx", "a", "a.json.gz"])
def test_an_unknown_extension_lists_the_known_ones(name, tmp_path):
    with pytest.raises(ExportError, match=r"\.html, \.json, \.csv, \.parquet, \.png"):
        export(made(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_extensions_are_read_without_regard_to_case(tmp_path):
    assert read_predictions(export(made(), tmp_path / "a.JSON")) == made()


@pytest.mark.parametrize(
    ("place", "words"),
    [("missing/a.json", "make it first"), ("file/a.json", "no folder"), ("folder.json", "folder")],
)
def test_a_place_that_cannot_be_written_is_an_error(place, words, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ExportError, match=words):
        export(made(), tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_refuses_new_files_is_an_error():
    with pytest.raises(ExportError, match="Cannot write"):
        export(made(), "/proc/self/a.json")


def test_another_kind_of_result_is_refused(tmp_path):
    with pytest.raises(ExportError, match="given dict"):
        export({}, tmp_path / "a.json")


class Broken(Exception):
    pass


@pytest.mark.parametrize("fault", [Broken, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, "mine"])
def test_a_failure_midway_leaves_nothing_and_keeps_the_old_file(
    fault, before, tmp_path, monkeypatch
):
    path = tmp_path / "a.json"
    if before:
        path.write_text(before)

    def halfway(result, partial, colour):
        partial.write_text("half")
        raise fault("stop")

    monkeypatch.setattr(export_module, "WRITERS", {**WRITERS, ".json": halfway})
    with pytest.raises(ExportError if fault is OSError else fault):
        export(made(), path)
    assert list(tmp_path.iterdir()) == ([path] if before else [])
    assert not before or path.read_text() == before


def test_a_file_has_the_permissions_that_the_umask_gives(tmp_path):
    old = os.umask(0o027)
    try:
        assert export(made(), tmp_path / "a.json").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


def test_through_a_link_the_file_changes_and_the_link_stays(tmp_path):
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    export(made(), link)
    assert link.is_symlink()
    assert read_predictions(tmp_path / "real.json") == made()


def newer(path):
    whole = json.loads(export(made(), path.with_suffix(".json")).read_text())
    path.write_text(json.dumps({**whole, "version": 99}))


def missing_array(path):
    whole = json.loads(export(made(), path.with_suffix(".json")).read_text())
    del whole["arrays"]["kl_bits"]
    path.write_text(json.dumps(whole))


def fewer_rows(path):
    export(made(), path)
    path.write_bytes(path.read_bytes().rsplit(b"\n", 3)[0] + b"\n")


def foreign_parquet(path):
    pq.write_table(pa.table({"price": [1.0]}), path)


def cut(suffix):
    def write(path):
        other = export(made(), path.with_suffix(suffix))
        path.write_bytes(other.read_bytes()[:-400])

    return write


BAD = {
    "newer": (newer, r"version 99.*up to 1.*[Uu]pgrade"),
    "missing_array": (missing_array, "kl_bits"),
    "fewer_rows": (lambda p: fewer_rows(p.with_suffix(".csv")), "where 13 x 12 were written"),
    "foreign_parquet": (foreign_parquet, "another origin.*price"),
    "foreign_json": (lambda p: p.write_text('{"a": 1}'), "no format field"),
    "other_result": (lambda p: p.write_text('{"format": "lens.LensProfile"}'), "LensProfile"),
    "picture": (lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n"), "begins with b'.x89PNG"),
    "empty": (lambda p: p.write_bytes(b""), "begins with b''"),
    "cut_json": (cut(".json"), "damaged"),
    "cut_csv": (cut(".csv"), "damaged"),
    "cut_parquet": (cut(".parquet"), "damaged"),
    "absent": (lambda p: None, "Cannot read"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_file_that_cannot_be_read_says_what_was_found(fault, tmp_path):
    write, words = BAD[fault]
    path = tmp_path / "bad.dat"
    write(path)
    if fault == "fewer_rows":
        path = path.with_suffix(".csv")
    with pytest.raises(ResultFileError, match=words):
        read_predictions(path)


def test_awkward_texts_are_all_in_the_made_vocabulary():
    assert set(AWKWARD.values()) <= set(made().vocabulary.values())
    assert provenance(revision="x").revision == "x"
