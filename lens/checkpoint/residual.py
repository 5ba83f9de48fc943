"""Capture and change the residual stream, layer by layer, by hooks that are always removed.

Layer l is the state after l blocks: 0 is what enters block 0, n_layers what the last block
returns. `blocks.3.hook_resid_post` of TransformerLens is layer 4, `blocks.3.hook_resid_pre` 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.trunk import Trunk
from lens.errors import CaptureError, ShapeError

Edit = Callable[[Float[Tensor, "batch pos d_model"]], Float[Tensor, "batch pos d_model"]]
"""Takes the states of the chosen positions, gives what stands in their place."""


class _EnoughError(Exception):
    """Ends a forward once the last wanted state has passed; caught where the forward began."""


@contextmanager
def _block_calls(
    trunk: Trunk,
    before: Callable[[int, Any, Any], Any] | None,
    after: Callable[[int, Any], Any] | None,
    root: nn.Module | None = None,
) -> Iterator[list[int]]:
    """Hooks on every block that count calls: `before(index, args, kwargs)`, `after(index, output)`.

    Calls are counted from the start of a forward of `root`, so that one block called many times
    is told apart. The yielded list holds the number of calls begun.
    """
    begun = [0]

    def _reset(*_: Any) -> None:
        begun[0] = 0

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

    handles = []
    try:
        if root is not None:
            handles.append(root.register_forward_pre_hook(_reset))
        for block in trunk.distinct_blocks:
            handles.append(block.register_forward_pre_hook(_pre, with_kwargs=True))
            handles.append(block.register_forward_hook(_post))
        yield begun
    finally:
        for handle in handles:
            handle.remove()


def capture(
    trunk: Trunk,
    run: Callable[[], Any],
    *,
    layers: Sequence[int],
    positions: Tensor | None = None,
    stop_early: bool = False,
) -> dict[int, Float[Tensor, "batch pos d_model"]]:
    """Run one forward and keep the residual states of these layers (and positions, in order).

    States are copies on the device where they arose: a later block that works in place cannot
    change them. `stop_early` ends the forward after the last wanted block; the head never runs.
    Raises CaptureError for a state that did not pass by.
    """
    wanted = set(layers)
    states: dict[int, Tensor] = {}

    def _keep(layer: int, state: Any) -> None:
        if not isinstance(state, Tensor):
            raise CaptureError(
                f"The residual state of layer {layer} is a {type(state).__name__}, not a tensor."
            )
        whole = trunk.layout.canonical(state)
        kept = whole.clone() if positions is None else whole[:, positions.to(whole.device)]
        states[layer] = kept

    def _before(index: int, args: Any, kwargs: Any) -> None:
        if index == 0 and 0 in wanted:
            _keep(0, trunk.input_slot.get(args, kwargs))
            if stop_early and wanted == {0}:
                raise _EnoughError

    def _after(index: int, output: Any) -> None:
        if index + 1 in wanted:
            _keep(index + 1, trunk.output_slot.get(output))
        if stop_early and index + 1 >= max(wanted):
            raise _EnoughError

    with _block_calls(trunk, _before, _after), suppress(_EnoughError):
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

    `fn` gets [batch, len(positions), d_model] (all positions where None). Raises ShapeError where
    it gives back another shape; the hooks are removed on exit, even then.
    """

    def _changed(state: Tensor) -> Tensor:
        whole = trunk.layout.canonical(state).clone()
        if positions is None:
            chosen: Any = slice(None)
        else:
            chosen = torch.as_tensor(list(positions), device=whole.device)
        old = whole[:, chosen]
        new = fn(old.clone())
        if not isinstance(new, Tensor) or new.shape != old.shape:
            shape = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ShapeError(
                f"The edit of layer {layer} gave back {shape}; expected a tensor of shape "
                f"{tuple(old.shape)} (batch, positions, d_model)."
            )
        whole[:, chosen] = new.to(whole.dtype)
        return trunk.layout.native(whole)

    def _before(index: int, args: Any, kwargs: Any) -> Any:
        if layer == 0 and index == 0:
            state = trunk.input_slot.get(args, kwargs)
            return trunk.input_slot.put(args, kwargs, _changed(state))
        return None

    def _after(index: int, output: Any) -> Any:
        if index + 1 == layer:
            return trunk.output_slot.put(output, _changed(trunk.output_slot.get(output)))
        return None

    with _block_calls(trunk, _before, _after, root=root):
        yield
