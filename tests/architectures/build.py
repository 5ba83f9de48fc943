"""A tiny random model of every class in transformers' language-model mappings."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from tests.architectures.overrides import OVERRIDES
from tests.architectures.shrink import shrunk
from tests.checkpoint.tiny import perturb

MAX_PARAMETERS = 20_000_000
MAPPINGS: dict[str, dict[str, Any]] = {
    "causal": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}


@dataclass(frozen=True)
class Architecture:
    """One class of one mapping."""

    mapping: str
    model_type: str
    model_class: str

    def config(self) -> Any:
        """The class's config at toy size: the generic rule, then the table's changes."""
        override = OVERRIDES.get((self.model_type, self.mapping), OVERRIDES.get(self.model_type))
        config = tiny_config(self.model_type, override or {})
        wanted = getattr(transformers, self.model_class).config_class
        if isinstance(config, wanted):
            return config
        # A text-only class under a multimodal model type: it takes one of the nested configs.
        nested = (getattr(config, name) for name in config.sub_configs)
        return next((part for part in nested if isinstance(part, wanted)), config)

    def build(self) -> Any:
        """A random model in eval mode, perturbed. Raises ValueError where it would be large."""
        model_class = getattr(transformers, self.model_class)
        config = self.config()
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(self.config()).parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"{size:,} parameters; expected at most {MAX_PARAMETERS:,}")
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        perturb(model)
        ready = getattr(model, "set_default_language", None)
        if ready is not None:
            ready(model.config.languages[0])
        return model


def architectures() -> list[Architecture]:
    """Every class of the three mappings, in their order."""
    found = []
    for mapping, classes in MAPPINGS.items():
        for model_type, name in classes.items():
            names = (name,) if isinstance(name, str) else name
            found += [Architecture(mapping, model_type, n) for n in names]
    return found


def tiny_config(model_type: str, override: dict[str, Any]) -> Any:
    """The config of `model_type` at toy size; nested overrides reach into nested configs."""
    start = override.get("_from", {})
    default = transformers.AutoConfig.for_model(model_type, **start).to_dict()
    changes = {k: v for k, v in override.items() if k != "_from"}
    fields = _merged({**start, **shrunk(default)}, changes)
    return transformers.AutoConfig.for_model(model_type, **fields)


def _merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in changes.items():
        old = merged.get(name)
        nested = isinstance(value, dict) and isinstance(old, dict)
        merged[name] = _merged(old, value) if nested else value
    return merged
