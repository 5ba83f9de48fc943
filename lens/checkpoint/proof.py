"""Prove a readout against the model itself: at the model's own last state, and at a random one.

The last state alone is too weak a witness: a wrong norm can pass on it (an OPT without a final
norm did). A random state of several scales excites the norm, the scale and the cap.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.layout import layouts_of_rows
from lens.checkpoint.readout import DirectReadout, Readout
from lens.checkpoint.replay import ReplayReadout, logits_of
from lens.checkpoint.residual import capture, edited
from lens.checkpoint.tail import direct_behind_own_tail, direct_from_tail
from lens.checkpoint.tape import path_after_product, recording, tail_path
from lens.checkpoint.trunk import Trunk, find_trunks
from lens.checkpoint.untouched import untouched
from lens.errors import (
    CaptureError,
    LensError,
    ShapeError,
    UnprovedReadoutError,
    UnsupportedArchitectureError,
)

PROBE_BATCH, PROBE_POS, PROBE_SOURCE = 3, 7, 5
_SEED = 20260101


@dataclass(frozen=True, eq=False)
class Witness:
    """What the model itself says: its last state and logits, and the logits of a random state.

    `random_logits` come from a whole forward in which only the last block's output was replaced,
    so every path around the blocks is in them.
    """

    inputs: Inputs
    first_state: Float[Tensor, "batch pos d_model"]
    last_state: Float[Tensor, "batch pos d_model"]
    logits: Float[Tensor, "batch pos d_vocab"]
    random_state: Float[Tensor, "batch pos d_model"]
    random_logits: Float[Tensor, "batch pos d_vocab"]

    def mismatch(self, readout: Callable[[Tensor], Tensor]) -> str | None:
        """None where the readout gives both logits bit for bit; else what differs, and how much."""
        for state, logits, which in (
            (self.last_state, self.logits, "the model's own last state"),
            (self.random_state, self.random_logits, "a random state"),
        ):
            given = readout(state)
            if given.shape != logits.shape:
                return f"at {which} it gives shape {tuple(given.shape)}, not {tuple(logits.shape)}"
            if not same_numbers(given, logits):
                off = (given.cpu().float() - logits.cpu().float()).abs().max().item()
                return f"at {which} its logits differ by up to {off:.3g}"
        return None


@dataclass(frozen=True, eq=False)
class Proved:
    """A model taken apart: trunk, both readouts, and what was proved of them."""

    trunk: Trunk
    replay: ReplayReadout
    readout: Readout
    witness: Witness
    causal: bool
    statement: str
    why_not_direct: str | None


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN equal to NaN, -inf to -inf; on whichever devices."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def take_apart(model: nn.Module, *, seq2seq: bool, readout: Readout | None = None) -> Proved:
    """Find the trunk of `model` and prove its readouts; `readout` by hand must pass the same proof.

    Raises UnsupportedArchitectureError naming the missing step, UnprovedReadoutError for the
    readout by hand.
    """
    probe = _probe_inputs(model, seq2seq=seq2seq)
    with untouched(model):
        trunk, witness, changed = _proved_trunk(model, probe, seq2seq=seq2seq)
    causal = _is_causal(witness.logits, changed)
    replay = ReplayReadout(model, trunk, seq2seq, witness.logits.shape[-1], probe)
    replay = replace(replay, ids_matter=_ids_matter(replay, witness))
    direct, why_not = _direct(replay, witness)
    if direct is None:
        replay = replace(replay, rows_mix=_rows_mix(replay, witness))
    statement = "bit for bit the model's own logits at its last state and at a random state"
    chosen: Readout = direct or replay
    if readout is not None:
        trouble = witness.mismatch(readout.logits)
        if trouble:
            raise UnprovedReadoutError(
                f"The readout passed for {type(model).__name__} is not the model's: {trouble}. "
                f"Leave it out to use the {chosen.kind} readout, which is proved."
            )
        chosen = readout
    return Proved(trunk, replay, chosen, witness, causal, statement, why_not)


def proved_with_rows_behind(proved: Proved, prompt: Inputs) -> Proved:
    """The same model for prompts behind which it puts rows of its own, as it does behind this one.

    Reformer fills up to a multiple of its chunk, but only prompts longer than one. Which rows are
    the prompt's is read off a change of its last token, and the readouts are proved again at this
    length. Raises CaptureError where the rows cannot be told or a readout fails.
    """
    model, seq2seq = proved.replay.model, proved.replay.seq2seq
    length = prompt.ids.shape[1]
    with untouched(model):
        trunk = _with_rows_behind(proved, prompt)

        def _run() -> Tensor:
            return logits_of(model(**forward_arguments(model, prompt, seq2seq=seq2seq)))

        witness = _witness(model, trunk, _run, prompt)
    replay = replace(proved.replay, trunk=trunk)
    trouble = witness.mismatch(lambda state: replay.logits(state, prompt))
    if not trouble and isinstance(proved.readout, DirectReadout):
        trouble = witness.mismatch(proved.readout.logits)
    if trouble:
        raise CaptureError(
            f"{type(model).__name__} puts rows of its own behind a prompt of {length} tokens, and "
            f"its readout is not the model's there: {trouble}. Pass a shorter prompt."
        )
    direct = isinstance(proved.readout, DirectReadout)
    return replace(proved, trunk=trunk, replay=replay, readout=proved.readout if direct else replay)


def _with_rows_behind(proved: Proved, prompt: Inputs) -> Trunk:
    """The trunk with the layout that a prompt of this length shows."""
    model, trunk, seq2seq = proved.replay.model, proved.trunk, proved.replay.seq2seq
    length = prompt.ids.shape[1]
    other = prompt.ids.clone()
    known = proved.witness.inputs.ids.flatten()
    other[0, -1] = known[known != prompt.ids[0, -1]][0]
    first = []
    for ids in (prompt.ids, other):
        arguments = forward_arguments(model, replace(prompt, ids=ids), seq2seq=seq2seq)
        first.append(
            capture(
                trunk, lambda a=arguments: model(**a), layers=[0], length=None, stop_early=True
            )[0]
        )
    for layout in layouts_of_rows(*first, batch=1, pos=length):
        if layout.axes == trunk.layout.axes == "batch pos d" and layout.padded:
            return replace(trunk, layout=replace(trunk.layout, before=layout.before, padded=True))
    raise CaptureError(
        f"{type(model).__name__} carries {first[0].shape[1]} rows for a prompt of {length} tokens, "
        "and a change of its last token does not show which are the prompt's. Pass a prompt whose "
        "length is a multiple of the model's chunk."
    )


def _proved_trunk(
    model: nn.Module, probe: Inputs, *, seq2seq: bool
) -> tuple[Trunk, Witness, Tensor]:
    """The trunk, and the witness that running the model's own tail on given states reproduces.

    The trunk is traced with another last token than the witness has; the logits of that forward
    come third.
    """
    name = type(model).__name__
    arguments = forward_arguments(model, probe, seq2seq=seq2seq)
    other = forward_arguments(model, _last_token_changed(probe), seq2seq=seq2seq)

    changed: list[Tensor] = []

    def _run() -> Tensor:
        return logits_of(model(**arguments))

    try:
        trunks = find_trunks(
            model,
            lambda: changed.append(logits_of(model(**other))),
            batch=PROBE_BATCH,
            pos=PROBE_POS,
            changed=lambda: model(**arguments),
        )
        witnesses = [_witness(model, trunk, _run, probe) for trunk in trunks]
    except LensError:
        raise
    except Exception as error:
        raise UnsupportedArchitectureError(
            f"{name} did not run on token ids alone: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Missing step: the forward. Expected a model that needs "
            f"nothing but {', '.join(arguments)}: neither audio, nor images, nor another model's "
            "states. Check that it runs with these."
        ) from error
    trouble: str | None = None
    for trunk, witness in zip(trunks, witnesses, strict=True):
        replay = ReplayReadout(model, trunk, seq2seq, witness.logits.shape[-1], probe)
        trouble = witness.mismatch(lambda state, replay=replay: replay.logits(state, probe))
        if not trouble:
            return trunk, witness, changed[-1]
    raise UnsupportedArchitectureError(
        f"{name}: running the model's own tail on a given state does not give the model's "
        f"logits: {trouble}. Missing step: replay. The tail reads more than the last block's "
        "state, so no reading of a single state can be exact."
    )


def _direct(replay: ReplayReadout, witness: Witness) -> tuple[DirectReadout | None, str | None]:
    """The direct readout where it can be composed and matches; else the reason why not."""
    if replay.ids_matter:
        return None, "the tail reads the input ids again"
    with recording(replay.model) as tape:
        logits = replay.run(witness.random_state, witness.inputs, then=tape.begin)
    steps, why_not = _proved_direct(
        lambda: direct_from_tail(
            tail_path(tape, logits), replay.model, d_model=replay.trunk.d_model
        ),
        witness,
    )
    if steps is not None or replay.seq2seq or replay.trunk.layout.adds_rows:
        return steps, why_not
    whole, _ = _proved_direct(
        lambda: direct_behind_own_tail(
            path_after_product(tape, logits),
            replay.model,
            replay.logits,
            d_model=replay.trunk.d_model,
        ),
        witness,
    )
    return whole, None if whole is not None else why_not


def _proved_direct(
    compose: Callable[[], DirectReadout], witness: Witness
) -> tuple[DirectReadout | None, str | None]:
    try:
        direct = compose()
        trouble = witness.mismatch(direct.logits) or _mixes_rows(direct, witness)
    except (UnsupportedArchitectureError, ShapeError) as error:
        return None, str(error).rstrip(".")
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        return None, f"the composed tail does not run row by row: {error}"
    return (None, trouble) if trouble else (direct, None)


def _mixes_rows(direct: DirectReadout, witness: Witness) -> str | None:
    """A reason where a row's logits depend on other rows: change one row, look at the others."""
    rows = witness.random_state.flatten(0, 1)
    changed = rows.clone()
    changed[0] = -2 * changed[0] + 1
    if same_numbers(direct.prepare(rows)[1:], direct.prepare(changed)[1:]):
        return None
    return "the tail mixes positions"


def _witness(model: nn.Module, trunk: Trunk, run: Callable[[], Tensor], probe: Inputs) -> Witness:
    logits: list[Tensor] = []
    states = capture(
        trunk,
        lambda: logits.append(run()),
        layers=[0, trunk.n_layers],
        length=probe.ids.shape[1],
    )
    last = states[trunk.n_layers]
    random = _random_like(last)
    with edited(trunk, model, layer=trunk.n_layers, positions=None, fn=lambda _: random):
        random_logits = run()
    return Witness(probe, states[0], last, logits[0], random, random_logits)


def _random_like(state: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
    """Normal numbers with the state's spread, half of it at the first position to four times."""
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float32)
    scales = torch.linspace(0.5, 4.0, state.shape[1], dtype=torch.float32)[None, :, None]
    spread = state.float().std().cpu()
    spread = (
        spread if bool(torch.isfinite(spread)) and float(spread) > 0 else torch.ones_like(spread)
    )
    return (noise * scales * spread).to(state.dtype).to(state.device)


def _ids_matter(replay: ReplayReadout, witness: Witness) -> bool:
    """True where other input ids change what the tail makes of the same state."""
    try:
        other = replay.logits(witness.random_state)
    except (RuntimeError, ValueError, IndexError):
        return True
    return not same_numbers(other, witness.random_logits)


def _rows_mix(replay: ReplayReadout, witness: Witness) -> bool:
    """True where a changed state at one position changes the logits of another."""
    changed = witness.random_state.clone()
    ends = ((0, 0), (-1, -1))  # the first position of a prompt, the last of another
    others = torch.ones(changed.shape[:2], dtype=torch.bool)
    for end in ends:
        changed[end] = -2 * changed[end] + 1
        others[end] = False
    found = replay.logits(changed, witness.inputs)
    mine, theirs = found[others].float(), witness.random_logits[others].float()
    finite = theirs[theirs.isfinite()]
    atol = 1e-3 * float(finite.std()) if finite.numel() > 1 else 0.0
    return not torch.allclose(mine, theirs.to(mine.device), rtol=1e-3, atol=atol, equal_nan=True)


def _is_causal(
    logits: Float[Tensor, "batch pos d_vocab"], changed: Float[Tensor, "batch pos d_vocab"]
) -> bool:
    """Measured: a change of the last token must leave the logits before it as they were.

    The threshold sits far above rounding (1e-6) and far below what attention to the right does.
    """
    before, after = logits[:, :-1], changed[:, :-1]
    # Some models put -inf, or the least number there is, where a token is never to come.
    least = torch.finfo(logits.dtype).min / 2
    open_before, open_after = ((x > least) & x.isfinite() for x in (before, after))
    if not torch.equal(open_before, open_after) or int(open_before.sum()) < 2:
        return False
    before, after = before[open_before].float(), after[open_before].float()
    spread = before.std().clamp_min(1e-12)
    loose = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2
    return bool((before - after).abs().max() <= loose * spread)


def _last_token_changed(inputs: Inputs) -> Inputs:
    ids = inputs.ids.clone()
    ids[:, -1] = inputs.ids[:, 0]
    return replace(inputs, ids=ids)


def _probe_inputs(model: Any, *, seq2seq: bool) -> Inputs:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embedding, "weight", None)
    if weight is None:
        raise _no_lookup(model, embedding)
    config = model.config
    n_ids = min(int(weight.shape[0]), int(getattr(config, "vocab_size", None) or weight.shape[0]))
    special = {
        getattr(config, f"{kind}_token_id", None)
        for kind in ("pad", "bos", "eos", "mask", "sep", "cls", "unk", "decoder_start")
    }
    usable = [i for i in range(min(n_ids, 4096)) if i not in special] or list(range(n_ids))
    generator = torch.Generator().manual_seed(_SEED)
    device = weight.device if weight.device.type != "meta" else torch.device("cpu")

    def _draw(length: int) -> Tensor:
        picks = torch.randint(len(usable), (PROBE_BATCH, length), generator=generator)
        return torch.tensor(usable)[picks].to(device)

    return Inputs(ids=_draw(PROBE_POS), source_ids=_draw(PROBE_SOURCE) if seq2seq else None)


def _no_lookup(model: Any, embedding: Any) -> UnsupportedArchitectureError:
    name = type(model).__name__
    if isinstance(embedding, nn.ModuleList):
        found = (
            f"looks up in {len(embedding)} tables at once: a position holds one code of each "
            "codebook, and its states have no single token to be scored against"
        )
    elif isinstance(embedding, Tensor):
        found = (
            f"feeds its blocks learned latents of shape {tuple(embedding.shape)} in place of a "
            "token's embedding: no row of its states belongs to one token"
        )
    else:
        found = "has no input embedding that takes token ids"
    return UnsupportedArchitectureError(
        f"{name} {found}. Missing step: the lookup. Load a model that reads one token per position."
    )
