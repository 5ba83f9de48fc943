"""What each block does to the residual state, split into its attention and its MLP where proved.

The modules are found by what they return: those whose outputs, each times one number, add up to
what the block added, those whose outputs are added to the stream inside of others (T5), or those
between which the stream itself is normed (BART). Heads and neurons are the columns of the last
linear map inside them, through a norm that follows it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.additions import Passage, passages
from lens.checkpoint.trunk import Trunk
from lens.measuring.frozen_norm import FrozenNorm, frozen_norm
from lens.measuring.normed_stream import Output, normed_steps

_MISFIT = 1e-5
_MOST_PARTS = 3
_KINDS = {
    "mixer": "mixer",
    "ssm": "mixer",
    "cross": "cross-attention",
    "encdec": "cross-attention",
    "encoder_att": "cross-attention",
    "att": "attention",
}


@dataclass(frozen=True, eq=False)
class Write:
    """What one module of a block adds at one position.

    `kind` is "attention", "cross-attention", "mixer", "mlp" or "block". `activation` [width] is the
    input of the last linear map inside and `columns` [d_model, width] that map, with the scale at
    this position of a norm that follows; biases stand apart. None where the module ends in
    something else.
    """

    kind: str
    layer: int
    name: str
    value: Float[Tensor, " d_model"]
    activation: Float[Tensor, " width"] | None = None
    columns: Float[Tensor, "d_model width"] | None = None


Step = Write | FrozenNorm
"""What happens to the stream at one position: something is added, or it passes a norm."""


@dataclass(eq=False)
class _Call:
    """One call of a block: what went in and came out, and what its modules returned."""

    block: nn.Module
    before: Tensor | None = None
    after: Tensor | None = None
    outputs: list[Output] = field(default_factory=list)


def block_steps(
    trunk: Trunk, run: Callable[[], Any], position: int, *, length: int
) -> tuple[Float[Tensor, " d_model"], list[Step]]:
    """The embedding's state at a position, and every step of the stream after, in order."""
    with _recorded(trunk, length) as calls:
        heard = passages(trunk, run, length=length)
    state = calls[0].before
    assert state is not None
    steps: list[Step] = []
    for layer, call in enumerate(calls):
        assert call.before is not None
        assert call.after is not None
        steps += _steps(call, heard[layer], state, layer, position)
        state = call.after
    start = calls[0].before
    assert start is not None
    return start[0, position].double(), steps


@contextmanager
def _recorded(trunk: Trunk, length: int) -> Iterator[list[_Call]]:
    calls: list[_Call] = []
    handles = []

    def _enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        state = trunk.layout.canonical(trunk.input_slot.get(args, kwargs), length=length)
        calls.append(_Call(block, before=state.detach().clone()))

    def _leave(block: nn.Module, args: Any, output: Any) -> None:
        calls[-1].after = (
            trunk.layout.canonical(trunk.output_slot.get(output), length=length).detach().clone()
        )

    def _keep(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def _hook(module: nn.Module, args: Any, output: Any) -> None:
            made = output[0] if isinstance(output, tuple) else output
            given = next((a for a in args if isinstance(a, Tensor)), None)
            if isinstance(made, Tensor) and calls:
                kept = None if given is None else given.detach().clone()
                calls[-1].outputs.append(Output(path, module, made.detach().clone(), kept))

        return _hook

    try:
        for block in trunk.distinct_blocks:
            handles.append(block.register_forward_pre_hook(_enter, with_kwargs=True))
            handles.append(block.register_forward_hook(_leave))
            for path, module in block.named_modules():
                if path and any(True for _ in module.parameters()):
                    handles.append(module.register_forward_hook(_keep(path)))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _steps(call: _Call, passage: Passage, before: Tensor, layer: int, position: int) -> list[Step]:
    assert call.after is not None
    before = before.to(call.after.device)
    added = call.after.double() - before.double()
    found = _adding_up(call, added) or _added_inside(call, passage)
    if found is not None:
        return [*_writes(call, found, added, layer, position)]
    normed = normed_steps(before, call.after, call.outputs, position)
    if normed is None:
        return [Write("block", layer, "block", added[0, position])]
    steps: list[Step] = []
    for step in normed:
        if isinstance(step, FrozenNorm):
            steps.append(step)
        else:
            one = (step.output.path, step.output.module, step.value, 1.0)
            steps += _writes(call, [one], step.value + step.rounding, layer, position)
    return steps


def _writes(
    call: _Call,
    found: list[tuple[str, nn.Module, Tensor, float]],
    added: Tensor,
    layer: int,
    position: int,
) -> list[Write]:
    """The writes of modules whose outputs, each times a number, add up to `added`."""
    writes = []
    for name, module, value, factor in found:
        kind = next((kind for word, kind in _KINDS.items() if word in name.lower()), "mlp")
        pieces = _pieces(call, name, module, value, factor, position)
        writes.append(Write(kind, layer, name, factor * value[0, position], *pieces))
    # What the outputs were rounded to, so that parts add up to the state itself.
    rest = added[0, position] - torch.stack([w.value for w in writes]).sum(0)
    first = writes[0]
    writes[0] = Write(
        first.kind, layer, first.name, first.value + rest, first.activation, first.columns
    )
    return writes


def _adding_up(call: _Call, added: Tensor) -> list[tuple[str, nn.Module, Tensor, float]] | None:
    """The fewest modules, outermost first, whose outputs add up to what the block added."""
    for depth in (0, 1):
        near = [
            (one.path, one.module, one.made.double().reshape(added.shape))
            for one in call.outputs
            # OPT's MLP works on rows of all positions together.
            if one.path.count(".") <= depth and one.made.shape[-1] == added.shape[-1]
            if one.made.numel() == added.numel()
        ]
        for count in range(1, _MOST_PARTS + 1):
            for chosen in combinations(near, count):
                if _nested([path for path, _, _ in chosen]):
                    continue
                stacked = torch.stack([made.flatten() for _, _, made in chosen], 1)
                factors = torch.linalg.lstsq(stacked, added.flatten()[:, None]).solution[:, 0]
                rest = float((stacked @ factors - added.flatten()).norm() / added.norm())
                if rest < _MISFIT:
                    pairs = zip(chosen, factors.tolist(), strict=True)
                    return [(path, module, made, factor) for (path, module, made), factor in pairs]
    return None


def _added_inside(
    call: _Call, passage: Passage
) -> list[tuple[str, nn.Module, Tensor, float]] | None:
    """The outermost module that returned each of several additions to the stream, if one did."""
    found = []
    for added in passage.added:
        made = [
            (one.path, one.module)
            for one in call.outputs
            if one.made.numel() == added.numel()
            if torch.equal(one.made.reshape(added.shape), added)
        ]
        if not made:
            return None
        path, module = min(made, key=lambda one: one[0].count("."))
        found.append((path, module, added.double(), 1.0))
    return found if len(found) > 1 else None


def _nested(paths: list[str]) -> bool:
    return any(a != b and b.startswith(f"{a}.") for a in paths for b in paths)


def _pieces(
    call: _Call, name: str, module: nn.Module, value: Tensor, factor: float, position: int
) -> tuple[Tensor | None, Tensor | None]:
    """Input and columns of the last linear map inside, where the module returns just its result."""
    for one in reversed(call.outputs):
        if one.path != name and not one.path.startswith(f"{name}."):
            continue
        matrix = _matrix(one.module)
        if matrix is None or one.given is None or one.made.numel() != value.numel():
            continue
        if torch.equal(one.made.double().reshape(value.shape), value):
            rows = one.given.double().reshape(*value.shape[:2], -1)
            return rows[0, position], factor * matrix.detach().double()
    return _pieces_before_norm(call, name, module, value, factor, position)


def _pieces_before_norm(
    call: _Call, name: str, norm: nn.Module, value: Tensor, factor: float, position: int
) -> tuple[Tensor | None, Tensor | None]:
    """The same where the module is a norm of what a linear map gave (Gemma 2, OLMo 2)."""
    normed = next((one.given for one in call.outputs if one.path == name), None)
    if normed is None or normed.shape != value.shape:
        return None, None
    for one in call.outputs:
        matrix = _matrix(one.module)
        if matrix is None or one.given is None or one.made.numel() != normed.numel():
            continue
        if torch.equal(one.made.reshape(normed.shape), normed):
            frozen = frozen_norm([norm], normed[0, position])
            if frozen is None:
                return None, None
            rows = one.given.double().reshape(*value.shape[:2], -1)
            columns = torch.func.vmap(frozen.linear, 1, 1)(matrix.detach().double())
            return rows[0, position], factor * columns
    return None, None


def _matrix(module: nn.Module) -> Tensor | None:
    """[d_out, d_in] of a linear map, None for another module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return weight
    # GPT-2's Conv1D keeps its matrix the other way round.
    return weight.T if type(module).__name__ == "Conv1D" else None
