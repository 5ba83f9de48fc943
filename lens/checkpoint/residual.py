"""Capture and change the residual stream, layer by layer, by hooks that are always removed.

Layer l is the state after l blocks: 0 is what enters block 0, n_layers what the last block
returns. `blocks.3.hook_resid_post` of TransformerLens is layer 4, `blocks.3.hook_resid_pre` 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens.checkpoint.listening import listening
from lens.checkpoint.prompts import resolve
from lens.checkpoint.trunk import Trunk
from lens.errors import CaptureError, ShapeError

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


@contextmanager
def edited(
    trunk: Trunk, root: nn.Module, *, layer: int, positions: Sequence[int] | None, fn: Edit
) -> Iterator[None]:
    """Within: every forward of `root` puts `fn(states)` in place of layer `layer`'s states.

    `fn` gets [batch, len(positions), d_model] (all positions where None); positions count the
    tokens of each prompt, padding apart. Raises ShapeError where it gives back another shape,
    SelectionError for a position that a prompt has not; the hooks are removed on exit, even then.
    """

    length: list[int | None] = [None]
    mask: list[Tensor | None] = [None]

    def _measure(args: Any, kwargs: Any) -> None:
        length[0] = _prompt_length(args, kwargs) if trunk.layout.adds_rows else None
        decoded = any(name.startswith("decoder_input") for name in kwargs)
        mask[0] = kwargs.get("decoder_attention_mask" if decoded else "attention_mask")

    def _changed(state: Tensor) -> Tensor:
        whole = trunk.layout.canonical(state, length=length[0]).clone()
        if positions is None:
            chosen: Any = (slice(None), slice(None))
        else:
            columns = _columns(positions, mask[0], *whole.shape[:2]).to(whole.device)
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
            state = trunk.input_slot.get(args, kwargs)
            return trunk.input_slot.put(args, kwargs, _changed(state))
        return None

    def _after(index: int, output: Any) -> Any:
        if index + 1 == layer:
            return trunk.output_slot.put(output, _changed(trunk.output_slot.get(output)))
        return None

    with block_calls(trunk, _before, _after, root=root, at_start=_measure):
        yield


def _columns(
    positions: Sequence[int], mask: Tensor | None, n_rows: int, length: int
) -> Int[Tensor, "batch _"]:
    """Where these positions of each prompt stand in a padded batch."""
    real = torch.ones(n_rows, length, dtype=torch.bool)
    if mask is not None and mask.ndim == 2 and mask.shape[1] >= length:
        # With a cache the mask covers what was read before, too.
        real = mask[:, mask.shape[1] - length :].bool().cpu().expand(n_rows, length)
    places = [row.nonzero().flatten() for row in real]
    return torch.stack([at[resolve(positions, len(at), "position")] for at in places])


def _prompt_length(args: Any, kwargs: Any) -> int:
    """Positions of the prompt in a call of the whole model, the decoder's in an encoder-decoder."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    given = [kwargs.get(name) for name in names] + list(args[:1])
    found = next((value for value in given if isinstance(value, Tensor)), None)
    if found is None:
        raise CaptureError(
            "The model was called without input_ids or inputs_embeds, and carries rows that are "
            "not the prompt's: the prompt's cannot be told. Pass input_ids."
        )
    return int(found.shape[1])
