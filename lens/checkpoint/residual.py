"""Capture and change the residual stream, layer by layer, by hooks that are always removed.

Layer l is the state after l blocks: 0 is what enters block 0, n_layers what the last block
returns. `blocks.3.hook_resid_post` of TransformerLens is layer 4, `blocks.3.hook_resid_pre` 3.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens.checkpoint.listening import listening
from lens.checkpoint.prompts import resolve
from lens.checkpoint.trunk import Trunk
from lens.errors import CaptureError, SelectionError, ShapeError

Edit = Callable[[Float[Tensor, "batch pos d_model"]], Float[Tensor, "batch pos d_model"]]
"""Takes the states of the chosen positions, gives what stands in their place."""


class EnoughError(Exception):
    """Ends a forward once the last wanted state has passed; caught where the forward began."""


@contextmanager
def block_calls(
    trunk: Trunk,
    before: Callable[[int, Any, Any], Any] | None,
    after: Callable[[int, Any], Any] | None,
    root: nn.Module | None = None,
    at_start: Callable[[Any, Any], None] | None = None,
    *,
    first: bool = False,
) -> Iterator[list[int]]:
    """Hooks on every block that count calls: `before(index, args, kwargs)`, `after(index, output)`.

    Calls are counted from the start of a forward of `root`, so that one block called many times
    is told apart. With `first` an output is seen before hooks that stand already change it. The
    yielded list holds the number of calls begun.
    """
    begun = [0]

    def _reset(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun[0] = 0
        if at_start is not None:
            at_start(args, kwargs)

    def _pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        index = begun[0]
        if index >= trunk.n_layers or module is not trunk.blocks[index]:
            raise CaptureError(
                f"Block call {index} of {trunk.container} is not the one seen when the model was "
                f"loaded ({trunk.n_layers} calls). The model runs its blocks in another order now "
                "(layer drop, early exit, a changed stack). Load it again."
            )
        begun[0] += 1
        return before(index, args, kwargs) if before else None

    def _post(module: nn.Module, args: Any, output: Any) -> Any:
        return after(begun[0] - 1, output) if after else None

    with ExitStack() as stack:
        if root is not None:
            handle = root.register_forward_pre_hook(_reset, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(
            listening(trunk.distinct_blocks, _pre, _post, past_hooks=trunk.past_hooks, first=first)
        )
        yield begun


def capture(
    trunk: Trunk,
    run: Callable[[], Any],
    *,
    layers: Sequence[int],
    length: int | None,
    positions: Tensor | None = None,
    stop_early: bool = False,
) -> dict[int, Float[Tensor, "batch pos d_model"]]:
    """Run one forward and keep the residual states of these layers (and positions, in order).

    `length` is the number of positions of the prompts; None takes all rows that there are. States
    are copies on the device where they arose: a later block that works in place cannot change
    them. `stop_early` ends the forward after the last wanted block; the head never runs.
    Raises CaptureError for a state that did not pass by.
    """
    wanted = set(layers)
    states: dict[int, Tensor] = {}

    def _keep(layer: int, state: Any) -> None:
        if not isinstance(state, Tensor):
            raise CaptureError(
                f"The residual state of layer {layer} is a {type(state).__name__}, not a tensor."
            )
        whole = trunk.layout.canonical(state, length=length)
        kept = whole.clone() if positions is None else whole[:, positions.to(whole.device)]
        states[layer] = kept

    def _before(index: int, args: Any, kwargs: Any) -> None:
        if index == 0 and 0 in wanted:
            _keep(0, trunk.input_slot.get(args, kwargs))
            if stop_early and wanted == {0}:
                raise EnoughError

    def _after(index: int, output: Any) -> None:
        if index + 1 in wanted:
            _keep(index + 1, trunk.output_slot.get(output))
        if stop_early and index + 1 >= max(wanted):
            raise EnoughError

    with block_calls(trunk, _before, _after), suppress(EnoughError):
        run()
    missing = sorted(wanted - set(states))
    if missing:
        raise CaptureError(
            f"The residual states of layers {missing} did not pass by; the hooks on "
            f"{trunk.container} did not fire. A model compiled after loading skips hooks: load "
            "the model that is not compiled."
        )
    return states


_PROBING: ContextVar[bool] = ContextVar("probing", default=False)


@contextmanager
def probing() -> Iterator[None]:
    """Within: forwards are lens' own questions to the model, and no edit acts on them."""
    token = _PROBING.set(True)
    try:
        yield
    finally:
        _PROBING.reset(token)


@contextmanager
def edited(
    trunk: Trunk,
    root: nn.Module,
    *,
    layer: int,
    positions: Sequence[int] | None,
    fn: Edit,
    seq2seq: bool = False,
) -> Iterator[None]:
    """Within: every forward of `root` puts `fn(states)` in place of layer `layer`'s states.

    `fn` gets [batch, len(positions), d_model] (all positions where None); positions count the
    tokens of each prompt, padding apart, also those that a cache holds: `fn` is not called for
    them again. Raises ShapeError where it gives back another shape, SelectionError for a position
    that a prompt has not or that a mask of more dimensions hides; the hooks are removed on exit,
    even then.
    """

    given: dict[str, Any] = {}

    def _measure(args: Any, kwargs: Any) -> None:
        given.clear()
        given.update(_named(root, args, kwargs))
        given[_LENGTH] = _prompt_length(given) if trunk.layout.adds_rows else None
        # Before the forward: blocks add their own tokens to the cache.
        given[_CACHED] = _cached_tokens(given)

    def _changed(state: Tensor) -> Tensor | None:
        if _PROBING.get():
            return None
        whole = trunk.layout.canonical(state, length=given.get(_LENGTH)).clone()
        if positions is None:
            chosen: Any = (slice(None), slice(None))
        else:
            mask = given.get("decoder_attention_mask" if seq2seq else "attention_mask")
            columns = _columns(positions, mask, *whole.shape[:2], past=given.get(_CACHED, 0))
            columns = columns.to(whole.device)
            if not columns.shape[1]:
                return None
            chosen = (torch.arange(len(whole), device=whole.device)[:, None], columns)
        old = whole[chosen]
        new = fn(old.clone())
        if not isinstance(new, Tensor) or new.shape != old.shape:
            shape = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ShapeError(
                f"The edit of layer {layer} gave back {shape}; expected a tensor of shape "
                f"{tuple(old.shape)} (batch, positions, d_model)."
            )
        whole[chosen] = new.to(whole.dtype)
        return trunk.layout.native(whole, state)

    def _before(index: int, args: Any, kwargs: Any) -> Any:
        if layer == 0 and index == 0:
            new = _changed(trunk.input_slot.get(args, kwargs))
            return None if new is None else trunk.input_slot.put(args, kwargs, new)
        return None

    def _after(index: int, output: Any) -> Any:
        if index + 1 == layer:
            new = _changed(trunk.output_slot.get(output))
            return None if new is None else trunk.output_slot.put(output, new)
        return None

    with block_calls(trunk, _before, _after, root=root, at_start=_measure):
        yield


_LENGTH, _CACHED = "length of the prompt", "tokens in the cache"


def _named(root: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a forward by name, also those that were given by place."""
    try:
        by_name = inspect.signature(root.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        by_name = {}
    # What a wrapper takes as *args or **kwargs stands below one name there.
    return {**({"input_ids": args[0]} if args else {}), **by_name, **kwargs}


def _columns(
    positions: Sequence[int], mask: Any, n_rows: int, length: int, *, past: int | None = 0
) -> Int[Tensor, "batch _"]:
    """Where these positions of each prompt stand in a padded batch, of which `past` are cached.

    None is a cache that does not say how many tokens it holds.
    """
    if not past and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > length:
        # A mask covers what was read before, too.
        past = mask.shape[1] - length
    if past is None and any(position != -1 for position in positions):
        raise SelectionError(
            f"Positions {list(positions)} cannot be counted: the cache of this model does not say "
            "how many tokens it holds. Edit the last position ([-1]) or all (positions=None), or "
            "run with use_cache=False."
        )
    past = past or 0
    real = torch.ones(n_rows, past + length, dtype=torch.bool)
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SelectionError(
            f"The forward was given a mask of {shape}, from which the padding of each prompt "
            "cannot be told (a static cache makes such masks). Edit all positions "
            "(positions=None), or pass a mask of (batch, positions)."
        )
    if mask is not None and mask.shape[1] >= past + length:
        real = mask[:, : past + length].bool().cpu().expand(n_rows, past + length)
    places = [row.nonzero().flatten() for row in real]
    found = torch.stack([at[resolve(positions, len(at), "position")] for at in places]) - past
    here = found >= 0
    if not torch.equal(here.all(0), here.any(0)):
        raise SelectionError(
            f"Of positions {list(positions)} some prompts' are in the cache and others' are not. "
            "Edit where the whole prompts pass, or all positions (positions=None)."
        )
    return found[:, here.all(0)]


def _cached_tokens(given: dict[str, Any]) -> int | None:
    """How many tokens before these a cache holds; None where it does not say."""
    names = ("past_key_values", "cache_params", "cache")
    cache = next((given[name] for name in names if given.get(name) is not None), None)
    if isinstance(cache, tuple):
        return int(cache[0][0].shape[-2]) if cache and isinstance(cache[0], tuple) else 0
    counted = getattr(cache, "get_seq_length", None)
    if counted is None:
        return 0 if cache is None else None
    try:
        return int(counted())
    except (ValueError, AttributeError, TypeError):
        # A recurrent state counts none.
        return None if getattr(cache, "has_previous_state", lambda: True)() else 0


def _prompt_length(given: dict[str, Any]) -> int:
    """Positions of the prompt in a call of the whole model, the decoder's in an encoder-decoder."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    found = next((given[name] for name in names if isinstance(given.get(name), Tensor)), None)
    if found is None:
        raise CaptureError(
            "The model was called without input_ids or inputs_embeds, and carries rows that are "
            "not the prompt's: the prompt's cannot be told. Pass input_ids."
        )
    return int(found.shape[1])
