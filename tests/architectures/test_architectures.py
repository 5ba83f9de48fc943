"""Every language-model class is read exactly or refused: no silent error on any of them."""

import dataclasses
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from lens.checkpoint.checkpoint import Checkpoint
from lens.checkpoint.origin import Origin
from lens.checkpoint.readout import DirectReadout
from lens.errors import LensError
from tests.architectures.build import Architecture, architectures
from tests.architectures.examine import CRASHED, EXACT, REFUSED, UNBUILT, examine, trouble_of
from tests.architectures.report import PAGE, table_line
from tests.architectures.sweep import swept

ALL = architectures()
# Streams, prefixes, padding, pairs, loops, hidden blocks, joined tails, refusals.
HARD = frozenset(
    (
        *("blt", "cpmant", "deepseek_v4", "esm", "flaubert", "fsmt", "gemma3n_text"),
        *("gemma4_assistant", "hrm_text", "hy_v4", "inkling2_text", "led", "longformer"),
        *("mobilebert", "musicgen", "neomme", "perceiver", "prophetnet", "reformer", "rwkv"),
        *("squeezebert", "xlm", "xlnet", "zamba2"),
    )
)
_hard = [a for a in ALL if a.model_type in HARD]
_rest = [a for a in ALL if a.model_type not in HARD]
QUICK = _hard + _rest[:: len(_rest) // (60 - len(_hard)) + 1]
QUICK += [a for a in _rest if a not in QUICK][: 60 - len(QUICK)]


def _documented() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def test_sixty_classes_of_all_mappings_are_what_the_page_says() -> None:
    assert len(QUICK) == len(set(QUICK)) == 60
    assert {a.mapping for a in QUICK} == {"causal", "masked", "seq2seq"}
    documented = _documented()
    for row in map(examine, QUICK):
        if row.status == UNBUILT:
            continue
        assert row.status in (EXACT, REFUSED), f"{row.model_class}: {row.status}, {row.why}"
        assert table_line(row) in documented, row


@pytest.mark.slow
def test_every_class_is_what_the_page_says() -> None:
    documented, rows = _documented(), list(swept(ALL))
    assert [row for row in rows if row.status not in (EXACT, REFUSED, UNBUILT)] == []
    assert [row.model_class for row in rows if table_line(row) not in documented] == []
    exact = [row for row in rows if row.status == EXACT]
    assert len(exact) >= 273
    assert sum(row.readout == "direct" for row in exact) >= 240


def test_a_refusal_names_the_step_that_is_missing() -> None:
    refused = [a for a in ALL if a.model_type in ("musicgen", "perceiver", "gemma4_assistant")]
    assert len(refused) == 3
    for architecture in refused:
        with pytest.raises(LensError, match="Missing step: "):
            _point(architecture)


@pytest.mark.parametrize("fault", ["norm", "bias", "cap"])
def test_a_wrong_readout_is_seen(fault: str) -> None:
    name = {"norm": "llama", "bias": "gptj", "cap": "gemma2"}[fault]
    point = _point(next(a for a in ALL if a.model_type == name))
    assert trouble_of(point) == ""
    assert isinstance(point.readout, DirectReadout)
    unembedding = point.readout.unembedding
    if fault == "norm":
        point.readout = dataclasses.replace(point.readout, preparation=())
    elif fault == "bias":
        plain = dataclasses.replace(unembedding, bias=None)
        point.readout = dataclasses.replace(point.readout, unembedding=plain)
    else:
        plain = dataclasses.replace(unembedding, steps=())
        point.readout = dataclasses.replace(point.readout, unembedding=plain)
    assert trouble_of(point).startswith("direct differs at the ")


def test_a_class_that_cannot_be_built_is_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    bad = Architecture("causal", "llama", "no such class")
    good = next(a for a in ALL if a.model_type == "gpt2")
    kept = tmp_path / "rows.jsonl"
    rows = list(swept([bad, good], kept=kept))
    assert [row.status for row in rows] == [UNBUILT, EXACT]
    assert rows == list(swept([bad, good], kept=kept))


class _Ending(Architecture):
    """A class whose construction ends the whole process."""

    def build(self) -> NoReturn:
        os._exit(7)


def test_a_class_that_ends_its_process_is_recorded_and_the_sweep_goes_on() -> None:
    bad = _Ending("causal", "llama", "LlamaForCausalLM")
    good = next(a for a in ALL if a.model_type == "gpt2")
    first, second = swept([bad, good])
    assert (first.status, second.status) == (CRASHED, EXACT)
    assert first.why == "ended its process with exit code 7"


@pytest.mark.parametrize("name", ["llama", "bert", "bart", "mamba"])
def test_no_gain_of_a_tiny_model_is_trivial(name: str) -> None:
    model = next(a for a in ALL if a.model_type == name).build()
    vectors = [p for p in model.parameters() if p.ndim == 1]
    assert vectors
    assert not [p for p in vectors if torch.all(p == 0) or torch.all(p == 1)]


def _point(architecture: Architecture) -> Checkpoint:
    return Checkpoint.from_model(
        architecture.build(), tokenizer=None, origin=Origin(model_id="tiny", format="memory")
    )
