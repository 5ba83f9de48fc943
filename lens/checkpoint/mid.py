"""Where each block passes from attention to MLP, proved on this very model or refused.

A block's additions to the stream are heard, and their parts told apart by what they react to: an
attention's part at one position changes with another position or with an encoder's source, an MLP's
with its own position alone. The state between the two is resid_mid where the MLP's part reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.additions import ADDS, Addition, Passage, passages
from lens.checkpoint.inputs import Inputs
from lens.checkpoint.trunk import Trunk
from lens.errors import CaptureError, UnsupportedArchitectureError

_SEED = 20260102
Run = Callable[[Inputs], Any]
"""Runs one forward of the model on these inputs."""


@dataclass(frozen=True)
class MidPoint:
    """resid_mid by block call: the state after `before[block]` of its `total[block]` additions.

    More than two additions stand for a self-attention and a cross-attention before it, or for a
    second part without attention after it.
    """

    before: tuple[int, ...]
    total: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlockParts:
    """What passes through one block call, [batch, pos, d_model] each.

    resid_pre + attn_out = resid_mid and resid_mid + mlp_out = resid_post, up to rounding.
    """

    resid_pre: Float[Tensor, "batch pos d_model"]
    attn_out: Float[Tensor, "batch pos d_model"]
    resid_mid: Float[Tensor, "batch pos d_model"]
    mlp_out: Float[Tensor, "batch pos d_model"]
    resid_post: Float[Tensor, "batch pos d_model"]


def find_mid(name: str, trunk: Trunk, run: Run, inputs: Inputs, *, seq2seq: bool) -> MidPoint:
    """The mid of every block call of a model, `name` its class; `inputs` hold two or more prompts.

    Raises UnsupportedArchitectureError where a block has none; the message names the block and
    says whether its parts are parallel, a norm stands on the stream, or what else is in the way.
    """
    if trunk.layout.n_streams > 1:
        raise _no_mid(
            name, f"its residual state is {trunk.layout}; no one state lies within a block"
        )
    if not trunk.linked:
        raise _no_mid(name, "the state is changed again between its blocks")
    length = inputs.ids.shape[1]
    plain = passages(trunk, lambda: run(inputs), length=length)
    for block in range(trunk.n_layers):
        if not plain[block].added:
            raise _no_mid(name, f"block {block} {_broken(plain[block].last_step)}")
    total = tuple(len(plain[block].added) for block in range(trunk.n_layers))
    found = _reactions(trunk, run, inputs, max(total), seq2seq=seq2seq)
    before = []
    for block, reaction in enumerate(found):
        reason = reaction.obstacle()
        if reason:
            raise _no_mid(name, f"block {block} {reason}")
        before += reaction.splits
    mid = MidPoint(tuple(before), total)
    for block, passage in plain.items():
        try:
            parts_of(passage, mid, block)
        except CaptureError as error:
            raise _no_mid(name, str(error).rstrip(".")) from error
    return mid


def _broken(last_step: str) -> str:
    if last_step in ADDS:
        return "does not add to its input: something else acts on the stream (a norm, a factor)"
    return (
        "does not return its input plus what its parts add: the last step on the stream itself is "
        f"{last_step} (a norm after the addition, as in post-LN models, or a factor)"
    )


def parts_of(passage: Passage, mid: MidPoint, block: int) -> BlockParts:
    """A block's states and parts. Raises CaptureError where they do not add up."""
    before = mid.before[block]
    if len(passage.added) != mid.total[block]:
        raise CaptureError(
            f"Block {block} made {len(passage.added)} additions to the stream, and "
            f"{mid.total[block]} when its resid_mid was found. Load the model again."
        )
    parts = BlockParts(
        resid_pre=passage.states[0],
        attn_out=_summed(passage.added[:before]),
        resid_mid=passage.states[before],
        mlp_out=_summed(passage.added[before:]),
        resid_post=passage.states[-1],
    )
    _require_sum(f"resid_mid of block {block}", passage, 0, before)
    _require_sum(f"resid_post of block {block}", passage, before, len(passage.added))
    return parts


def _require_sum(what: str, passage: Passage, first: int, last: int) -> None:
    """states[last] must be states[first] plus what was added between, up to its roundings."""
    start, end, added = passage.states[first], passage.states[last], passage.added[first:last]
    sizes = torch.stack([t.double().abs() for t in (start, *added)]).sum(0)
    off = (torch.stack([t.double() for t in (start, *added)]).sum(0) - end.double()).abs()
    eps = max(torch.finfo(t.dtype).eps for t in (start, end, *added))
    # Each addition rounds once; a cast on the way rounds once more.
    if not bool((off <= 2 * len(added) * eps * sizes).all()):
        raise CaptureError(
            f"{what} is off by up to {float(off.max()):.3g} from the state before plus what was "
            "added to it: something else acts on the stream within the block."
        )


def _summed(added: tuple[Tensor, ...]) -> Tensor:
    total = added[0]
    for one in added[1:]:
        total = total + one
    return total


@dataclass(eq=False)
class _Reaction:
    """How the additions of one block call react: addition k to the state just before it.

    `own` and `others`: to a disturbance of that state at a position, there and elsewhere;
    `source`: to another source; `silent`: all zero, so that nothing shows; `summands_mix`: what
    the first was summed from, by position.
    """

    total: int = 0
    own: list[bool] = field(default_factory=list)
    others: list[bool] = field(default_factory=list)
    source: list[bool] = field(default_factory=list)
    silent: list[bool] = field(default_factory=list)
    summands_mix: list[bool] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """By addition: "attention" (other positions or an encoder take part), "MLP", "nothing"."""
        told = zip(self.others, self.source, self.silent, strict=True)
        return ["nothing" if c else "attention" if a or b else "MLP" for a, b, c in told]

    @property
    def splits(self) -> list[int]:
        """Numbers of additions that may stand before mid: no MLP before it, no attention after."""
        return [
            k
            for k in range(1, self.total)
            if "MLP" not in self.kinds[:k] and "attention" not in self.kinds[k:]
        ]

    def obstacle(self) -> str:
        """Why there is no one mid, empty where there is."""
        if self.total == 1 and len(set(self.summands_mix)) == 2:
            return "runs attention and MLP in parallel and adds their sum in one step"
        if self.total == 1:
            return "adds to the stream once, so no state lies between two parts"
        if len(self.splits) != 1:
            order = ", ".join(self.kinds)
            return f"adds to the stream in the order {order}; expected attention, then MLP"
        (mid,) = self.splits
        if not (self.own[mid] or self.silent[mid]):
            return "runs attention and MLP in parallel: the MLP does not read what attention wrote"
        return ""


def _reactions(
    trunk: Trunk, run: Run, inputs: Inputs, most: int, *, seq2seq: bool
) -> list[_Reaction]:
    """Run one prompt twice side by side, disturb the second time, and see which parts move.

    Every addition ends the disturbance, so that each part of each block is seen by itself.
    """
    twins = replace(
        inputs,
        ids=inputs.ids[:1].expand(2, -1),
        source_ids=None if inputs.source_ids is None else inputs.source_ids[:1].expand(2, -1),
    )
    found = [_Reaction() for _ in range(trunk.n_layers)]
    for at in range(most):
        for block, moves in enumerate(_moves(trunk, run, twins, at)):
            found[block].total = len(moves)
            if at < len(moves):
                found[block].own.append(moves[at].own)
                found[block].others.append(moves[at].others)
                found[block].source.append(False)
                found[block].silent.append(moves[at].silent)
            if at == 0:
                found[block].summands_mix = moves[0].summands_mix
    if seq2seq and inputs.source_ids is not None:
        mixed = replace(twins, source_ids=inputs.source_ids[:2])
        for block, moves in enumerate(_moves(trunk, run, mixed, None)):
            found[block].source = [move.own or move.others for move in moves]
    return found


@dataclass(frozen=True)
class _Move:
    """Whether an addition differs between the twins, at the first position or others; is zero."""

    own: bool
    others: bool
    silent: bool
    summands_mix: list[bool]


def _moves(trunk: Trunk, run: Run, twins: Inputs, at: int | None) -> list[list[_Move]]:
    """For each block, how its additions differ where state `at` of the second twin is disturbed."""
    length = twins.ids.shape[1]
    generator = torch.Generator().manual_seed(_SEED)
    found: list[list[_Move]] = [[] for _ in range(trunk.n_layers)]
    shapes: dict[int, torch.Size] = {}

    def _rows(block: int, state: Tensor) -> Tensor:
        return trunk.layout.canonical(state.reshape(shapes[block]), length=length)

    def _reset(block: int, state: Tensor, *, disturb: bool) -> Tensor:
        rows = _rows(block, state).clone()
        rows[1] = rows[0]
        if disturb:
            noise = torch.randn(rows.shape[-1], generator=generator, dtype=torch.float32).to(rows)
            rows[1, 0] += noise * rows[0].float().std().to(rows)
        return trunk.layout.native(rows, state.reshape(shapes[block])).reshape(state.shape)

    def _enter(block: int, state: Tensor) -> Tensor:
        shapes[block] = state.shape
        return _reset(block, state, disturb=True) if at == 0 else state

    def _answer(block: int, number: int, addition: Addition, out: Tensor) -> None:
        own, others = _differences(_rows(block, addition.added))
        mixing = [
            _differences(_rows(block, one))[1]
            for one in addition.summands
            if one.numel() == addition.added.numel()
        ]
        found[block].append(_Move(own, others, not bool(addition.added.any()), mixing))
        out.copy_(_reset(block, out, disturb=number + 1 == at))

    passages(trunk, lambda: run(twins), length=length, enter=_enter, answer=_answer)
    return found


def _differences(rows: Float[Tensor, "batch pos d_model"]) -> tuple[bool, bool]:
    """Whether the twins differ at the first position, and at any other, by more than rounding."""
    loose = 1e-4 if rows.dtype in (torch.float32, torch.float64) else 2e-2
    moved = (rows[1] - rows[0]).float().abs().amax(-1) > loose * rows[0].float().abs().max()
    return bool(moved[0]), bool(moved[1:].any())


def _no_mid(name: str, reason: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"{name} has no resid_mid: {reason}. Missing step: a state between attention and MLP that "
        'is the one plus the other. Read the states between blocks, points="post".'
    )
