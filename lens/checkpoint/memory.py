"""A model that is in memory already: taken out of its wrappers, and refused where hooks would
not fire."""

from typing import Any

from torch import nn

from lens.errors import UnsupportedArchitectureError, UnsupportedModelStateError


def unwrap(source: Any) -> tuple[Any, Any, tuple[str, ...], str]:
    """The Hugging Face model inside, a tokenizer that came with it, notes, and the format.

    Raises UnsupportedModelStateError, UnsupportedArchitectureError.
    """
    notes: list[str] = []
    model, tokenizer, format_ = source, None, "memory"
    if is_compiled(model):
        model = model._orig_mod
        notes.append("torch.compile's wrapper was set aside: the same weights, run uncompiled")
    if _is_from(model, "transformer_lens"):
        model, tokenizer = _of_bridge(model)
        format_ = "transformer_lens"
        notes.append("read from the raw model inside a TransformerBridge")
    if _is_from(model, "peft"):
        model = _of_peft(model)
        notes.append("read with its PEFT adapter in place")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModelStateError(
            f"{type(model).__name__} runs copies of the model, where hooks would see a part of the "
            "batch. Pass the model inside: its .module."
        )
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedArchitectureError(
            f"{type(source).__name__} is no Hugging Face model. Pass a hub id, a folder, a .gguf "
            "file, a transformers model or a TransformerBridge."
        )
    _refuse_compiled_inside(model)
    return model, tokenizer, tuple(notes), format_


def is_compiled(module: Any) -> bool:
    """Whether torch.compile wrapped this module."""
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


def _is_from(source: Any, package: str) -> bool:
    """Told by name, so that the package is not imported."""
    return any(base.__module__.split(".")[0] == package for base in type(source).__mro__)


def _of_bridge(bridge: Any) -> tuple[Any, Any]:
    # A bridge that cannot say whether its weights were processed is not trusted to be raw.
    if getattr(bridge, "_weights_processed", True):
        raise UnsupportedModelStateError(
            f"The weights of this {type(bridge).__name__} were processed (norms folded, matrices "
            "centred), which unties them and is another model than the checkpoint. Pass a bridge "
            "before enable_compatibility_mode(), or one with no_processing=True."
        )
    model = getattr(bridge, "original_model", None)
    if model is None:
        raise UnsupportedModelStateError(
            f"This {type(bridge).__name__} runs its model elsewhere and holds no module here. Load "
            "the checkpoint itself."
        )
    return model, getattr(bridge, "tokenizer", None)


def _of_peft(model: Any) -> Any:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelStateError(
            "This PEFT adapter puts learned tokens before the prompt, so positions would not match "
            "the text. Read the base model: model.get_base_model()."
        )
    return model.get_base_model()


def _refuse_compiled_inside(model: nn.Module) -> None:
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if (
            is_compiled(module)
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(forward, "_torchdynamo_orig_callable")
        ):
            raise UnsupportedModelStateError(
                f"{name or 'The model itself'} ({type(module).__name__}) was compiled in place: "
                "hooks added now would not fire. Pass the model before compile(), or wrap it as a "
                "whole, torch.compile(model), which is taken off here."
            )
