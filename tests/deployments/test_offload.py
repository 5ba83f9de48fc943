"""Models larger than a device: accelerate keeps weights elsewhere and brings them in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lens
from lens.errors import UnsupportedModelStateError
from tests.checkpoint.tiny import BY_NAME
from tests.deployments.reading import exact

CPU = torch.device("cpu")


def _to_cpu(model: Any, folder: Path) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=CPU)


def _to_disk(model: Any, folder: Path) -> Any:
    from accelerate import disk_offload

    return disk_offload(model, str(folder), execution_device=CPU)


@pytest.mark.parametrize("offload", [_to_cpu, _to_disk])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_offloaded_model_is_read_exactly(
    offload: Callable[[Any, Path], Any], name: str, tied: bool, tmp_path: Path
) -> None:
    model = offload(BY_NAME[name].build(tied=tied), tmp_path)
    away = [p.is_meta for p in model.parameters()]
    assert any(away)
    point = exact(model)
    assert point.readout.kind == "replay"
    assert "offloaded" in str(point.summary().why_not_direct)
    assert [p.is_meta for p in model.parameters()] == away


def test_a_device_map_that_splits_the_model_is_read_exactly(tmp_path: Path) -> None:
    from accelerate import dispatch_model

    places = {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}
    places |= {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.norm": "cpu", "lm_head": "disk"}
    model = dispatch_model(
        BY_NAME["llama"].build(tied=False), places, main_device="cpu", offload_dir=str(tmp_path)
    )
    point = exact(model)
    assert point.tie.verdict == "untied"


def test_a_folder_loads_with_a_device_map(tmp_path: Path) -> None:
    model = BY_NAME["llama"].build(tied=False)
    model.save_pretrained(tmp_path)
    point = lens.load(tmp_path, device_map={"": "cpu"})
    plain = lens.load(tmp_path)
    a, b = point.logit_lens([5, 6, 7]), plain.logit_lens([5, 6, 7])
    assert (a.top_logprob_bits == b.top_logprob_bits).all()


def test_a_model_without_its_weights_is_refused() -> None:
    built = BY_NAME["llama"].build()
    with torch.device("meta"):
        model = type(built)(built.config)
    with pytest.raises(UnsupportedModelStateError, match="on the meta device"):
        lens.load(model)
