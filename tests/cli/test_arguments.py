import io
import json
import sys
from pathlib import Path

import pytest
import typer

from lens.cli_text import (
    layers_from,
    messages_from,
    numbers_from,
    prompt_from,
    sets_from,
    text_from,
)


class Bytes(io.TextIOWrapper):
    """Standard input that holds these bytes."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("hello", "hello"),
        ("", ""),
        ("@@", "@"),
        ("@@home", "@home"),
        ("@@@x", "@@x"),
        ("a@b", "a@b"),
        ("--top-k", "--top-k"),
        (" -", " -"),
    ],
)
def test_text_is_taken_as_it_stands_and_a_doubled_at_sign_is_one(argument: str, text: str) -> None:
    assert text_from(argument, "TEXT") == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"one line\n", "one line"),
        (b"one line", "one line"),
        (b"dos\r\n", "dos"),
        (b"two\n\n", "two\n"),
        (b"  kept \n", "  kept "),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("Zürich 東京".encode(), "Zürich 東京"),
        (b"", ""),
    ],
)
def test_a_file_and_standard_input_are_read_but_for_one_final_newline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, text: str
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(raw)
    monkeypatch.setattr(sys, "stdin", Bytes(raw))
    assert text_from(f"@{path}", "TEXT") == text
    assert text_from("-", "TEXT") == text


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()], ids=["absent", "folder"])
def test_a_file_that_cannot_be_read_is_a_wrong_call(tmp_path: Path, make: object) -> None:
    path = tmp_path / "prompt.txt"
    make(path)
    with pytest.raises(typer.BadParameter, match=r"cannot read .*prompt\.txt.*@@"):
        text_from(f"@{path}", "TEXT")


def test_bytes_that_are_no_text_are_a_wrong_call(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(typer.BadParameter, match="not UTF-8 at byte 2"):
        text_from(f"@{path}", "TEXT")


def test_numbers_stand_between_commas() -> None:
    assert numbers_from("0,6, 12,-1", "--layers") == [0, 6, 12, -1]
    assert numbers_from(None, "--layers") is None


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5", "0-3", "1;2"])
def test_what_is_no_list_of_numbers_is_a_wrong_call(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a list of whole numbers"):
        numbers_from(text, "--layers")


def test_targets_of_one_name_make_a_set_and_keep_their_spaces_and_equal_signs() -> None:
    pairs = ["right= Paris", "wrong= Rome", "right==", "right=Paris "]
    assert sets_from(pairs) == {"right": [" Paris", "=", "Paris "], "wrong": [" Rome"]}
    assert sets_from(None) is None
    assert sets_from([]) is None


@pytest.mark.parametrize("pair", ["Paris", "=Paris", "right=", ""])
def test_a_target_without_name_or_token_is_a_wrong_call(pair: str) -> None:
    with pytest.raises(typer.BadParameter, match="not NAME=TOKEN"):
        sets_from([pair])


def test_messages_are_read_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
    path.write_text(json.dumps(chat))
    assert messages_from(path) == chat
    assert messages_from(None) is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "no list of messages"),
        ('{"role": "user", "content": "x"}', "no list of messages"),
        ('[{"role": "user"}]', "no list of messages"),
        ('["x"]', "no list of messages"),
    ],
)
def test_what_is_no_chat_is_a_wrong_call(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(typer.BadParameter, match=complaint):
        messages_from(path)


def test_one_prompt_is_given_in_one_way() -> None:
    assert prompt_from("text", None, None) == "text"
    assert prompt_from(None, "1,2", None) == [1, 2]
    assert prompt_from(None, None, Path("chat.json")) is None
    assert prompt_from(None, None, None, source="a text to translate") is None
    with pytest.raises(typer.BadParameter, match="found none of them"):
        prompt_from(None, None, None)
    with pytest.raises(typer.BadParameter, match="found TEXT and --ids"):
        prompt_from("text", "1", None)


def test_layers_are_whole_and_half_numbers() -> None:
    assert layers_from("0,6.5, -1", "--layers") == [0, 6.5, -1]
    assert [type(one) for one in layers_from("0,6.5", "--layers") or ()] == [int, float]
    assert layers_from(None, "--layers") is None


@pytest.mark.parametrize("text", ["", "one", "1,,2", "0.25", "nan", "inf"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a list of layers"):
        layers_from(text, "--layers")
