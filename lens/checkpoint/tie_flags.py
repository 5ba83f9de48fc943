"""What a model's config, class and files say of its tie; reported beside the verdict."""

from collections.abc import Iterable
from typing import Any

from lens.checkpoint.adapters import added_by_adapters, wrapped_by_peft
from lens.checkpoint.matrices import EQUAL_VALUES, ONE_TENSOR, UNREAD, NamedMatrix, TiePair

_FLAG = "tie_word_embeddings"
_PARTS = ("text_config", "encoder", "decoder")


def config_flags(model: Any) -> dict[str, bool]:
    """`tie_word_embeddings` of the config and of the configs inside it, by path."""
    config = getattr(model, "config", None)
    holders = {"": config, **{f"{part}.": getattr(config, part, None) for part in _PARTS}}
    flags = {f"{path}{_FLAG}": getattr(holder, _FLAG, None) for path, holder in holders.items()}
    # T5 moved the flag's second meaning, a scale of the decoder's output, to a name of its own.
    flags["scale_decoder_outputs"] = getattr(config, "scale_decoder_outputs", None)
    return {name: flag for name, flag in flags.items() if isinstance(flag, bool)}


def config_says(model: Any) -> bool | None:
    """The flag that transformers acts on: that of the model's own config."""
    return config_flags(model).get(_FLAG)


def class_mapping(model: Any) -> tuple[tuple[str, str], ...]:
    """(tied name, its source) for each parameter that the class ties where the flag says so."""
    mapping = getattr(model, "_tied_weights_keys", None) or {}
    if not isinstance(mapping, dict):
        # Classes older than transformers 5 list the names alone.
        return tuple((str(name), "") for name in mapping)
    return tuple((str(name), str(source)) for name, source in mapping.items())


def files_held(
    model: Any, matrices: tuple[NamedMatrix, ...], keys: frozenset[str] | None
) -> dict[str, bool | None] | None:
    """For each matrix, by name, whether the checkpoint's files held it; None where unknown.

    A name is unknown where the files hold names that the model does not have: transformers
    renames some on loading (embed_out.weight of GPT-NeoX is lm_head.weight in memory).
    """
    if keys is None:
        return None
    bare = _bare(model, keys)
    absent = None if _renames(model, bare) else False
    return {m.name: _bare_name(model, m.name) in bare or absent for m in matrices if m.name}


def _bare(model: Any, names: Iterable[str]) -> set[str]:
    return {_bare_name(model, name) for name in names}


def _bare_name(model: Any, name: str) -> str:
    return name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")


def _renames(model: Any, bare: set[str]) -> bool:
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return not bare <= _bare(model, [*parameters, *(name for name, _ in model.named_buffers())])


def contradictions(
    model: Any,
    matrices: tuple[NamedMatrix, ...],
    pairs: tuple[TiePair, ...],
    keys: frozenset[str] | None,
) -> tuple[str, ...]:
    """Sentences on what the config, the class or the files say and the tensors do not."""
    found = [*_against_flag(model, pairs), *_between_flags(model)]
    found += _against_files(model, matrices, keys)
    found += _waiting(model, matrices, pairs)
    return (*dict.fromkeys(found), *_wrappers(model, pairs))


def _against_files(
    model: Any, matrices: tuple[NamedMatrix, ...], keys: frozenset[str] | None
) -> list[str]:
    if keys is None:
        return []
    bare = _bare(model, keys)
    held = {m.name: {n for n in m.aliases if _bare_name(model, n) in bare} for m in matrices}
    found = []
    if not _renames(model, bare):
        found = [
            f"the files hold no {name}, yet it is in memory" for name in held if not held[name]
        ]
    several = [sorted(names) for names in held.values() if len(names) > 1]
    return found + [f"the files hold {' and '.join(n)}; in memory they are one" for n in several]


def _waiting(
    model: Any, matrices: tuple[NamedMatrix, ...], pairs: tuple[TiePair, ...]
) -> list[str]:
    """What a later tie_weights() would change."""
    found = []
    owner = {alias: m.name for m in matrices for alias in m.aliases}
    for target, source in _would_tie(model).items():
        names = {owner.get(target), owner.get(source)}
        for pair in pairs:
            if {pair.first_name, pair.second_name} != names or pair.verdict in (
                *ONE_TENSOR,
                UNREAD,
            ):
                continue
            if pair.verdict == EQUAL_VALUES:
                found.append(f"a later tie_weights() would make {target} and {source} one tensor")
            else:
                found.append(f"a later tie_weights() would overwrite {target} with {source}")
    return found


def _against_flag(model: Any, pairs: tuple[TiePair, ...]) -> list[str]:
    says = config_says(model)
    if not pairs or says is None or says == pairs[-1].is_tied:
        return []
    if says and not class_mapping(model):
        # T5Gemma and its like tie inside a submodel.
        return [f"{_FLAG} is true, but {type(model).__name__} maps no tied weights"]
    told, are = ("tied", "two tensors") if says else ("untied", "one tensor")
    if pairs[-1].verdict == EQUAL_VALUES:
        are += " of equal values"
    return [f"the config says {told}, but the matrices are {are}"]


def _between_flags(model: Any) -> list[str]:
    flags = config_flags(model)
    top = flags.get(_FLAG)
    return [
        f"{name} is {str(flag).lower()} where {_FLAG} is {str(top).lower()}"
        for name, flag in flags.items()
        if name.endswith(f".{_FLAG}") and top is not None and flag != top
    ]


def _would_tie(model: Any) -> dict[str, str]:
    """What tie_weights() would do now: {overwritten name: source}."""
    expand = getattr(model, "get_expanded_tied_weights_keys", None)
    return {} if expand is None else dict(expand(all_submodels=True))


def _wrappers(model: Any, pairs: tuple[TiePair, ...]) -> tuple[str, ...]:
    """Adapters that stand around a matrix, so that it is not the whole of the step."""
    found = [
        f"PEFT's {name} stands around the {what} embeddings"
        for what in ("input", "output")
        if (name := wrapped_by_peft(model, what))
    ]
    difference = adapted_difference(model)
    if difference is not None and pairs and pairs[-1].is_tied:
        found.append(
            "one parameter, but not one matrix in use: adapters act on its two uses differently, "
            f"max |difference| {difference:.3g}"
        )
    return tuple(found)


def adapted_difference(model: Any) -> float | None:
    """The largest difference of what adapters add to lookup and unembedding; None without any."""
    added = [added_by_adapters(model, what) for what in ("input", "output")]
    acting = [one for one in added if one is not None]
    if not acting:
        return None
    if len(acting) == 1 or acting[0].shape != acting[1].shape:
        return max(float(one.abs().max()) for one in acting)
    return float((acting[0] - acting[1]).abs().max())
