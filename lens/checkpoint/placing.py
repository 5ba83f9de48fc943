"""Where a model goes and in which precision, checked before anything is read."""

from collections.abc import Iterable

import torch

from lens.errors import SelectionError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A floating dtype by name; None and "auto" mean the one of the files.

    Raises SelectionError for any other name.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        name = _SHORT.get(name, name)
    else:
        name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise SelectionError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}, auto.")
    return getattr(torch, name)


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """A device that is there. Raises SelectionError for an unknown or absent one, and for one
    without float64.

    >>> parse_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return None
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise SelectionError(
            f"device {device!r} is no device of torch; here are: {', '.join(_present())}."
        ) from error
    refuse_without_float64([parsed])
    count = _present().get(parsed.type, 0)
    if (parsed.index or 0) >= count:
        raise SelectionError(
            f"device {str(parsed)!r} is not on this machine; here are: {', '.join(_present())}."
        )
    return parsed


def refuse_without_float64(devices: Iterable[torch.device]) -> None:
    """Raises SelectionError for MPS: sums over the vocabulary are taken in float64, which it lacks.

    Source: PyTorch's notes on the MPS backend.
    """
    if any(device.type == "mps" for device in devices):
        raise SelectionError(
            "lens adds up in float64, which the device mps does not have. Load the model on the "
            'CPU (device="cpu"), or move it there: model.to("cpu").'
        )


def _present() -> dict[str, int]:
    """How many devices of each type there are."""
    found = {"cpu": 1}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            found[kind.type] = torch.accelerator.device_count()
    return found
