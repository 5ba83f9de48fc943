"""Who writes a logit: embedding, each attention and head, each MLP and its top neurons, constant.

Under the final norm's scale at the position, frozen, a logit is linear in the state, and the state
is a sum of what was written to it; where blocks norm the stream itself, each part passes the norms
that come after it, their scales frozen too. Source: Elhage et al. 2021; nostalgebraist 2020.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint import prompts
from lens.checkpoint.inputs import forward_arguments
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.readout import DirectReadout
from lens.checkpoint.tokenizing import token_text
from lens.checkpoint.untouched import untouched
from lens.errors import SelectionError, UnsupportedArchitectureError
from lens.measuring.block_parts import Step, Write, block_steps
from lens.measuring.frozen_norm import LinearLogit, linear_logit

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

_ERROR = 1e-4
_ROUNDINGS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """One logit (natural units) as a sum of parts and a constant.

    `kinds` are "embedding", "attention", "cross-attention" (to an encoder), "mixer" (state space),
    "mlp", or "block" where a block could not be split; `layers` their blocks (-1 for the
    embedding), `parts` what each adds, through the norms that the stream passes after it.
    `constant` is what no module writes: biases, and the norms' biases through W_U. `heads`
    [block, head] and `neurons` are NaN and empty where a module does not end in one linear map or
    a norm of it. `quantity` says which number it is; a difference of two tokens where `against`
    is not None.
    """

    model_id: str
    tie: str
    token_id: int
    against_id: int | None
    position: int
    text: str
    quantity: str
    logit: float
    constant: float
    kinds: tuple[str, ...]
    layers: Int[np.ndarray, " part"]
    parts: Float[np.ndarray, " part"]
    heads: Float[np.ndarray, "block head"]
    neuron_layers: Int[np.ndarray, " neuron"]
    neuron_ids: Int[np.ndarray, " neuron"]
    neurons: Float[np.ndarray, " neuron"]

    @property
    def error(self) -> float:
        """|parts + constant - logit|."""
        return abs(float(self.parts.sum()) + self.constant - self.logit)

    @property
    def last_mlp_share(self) -> float:
        """What the last MLP writes over what all parts write; NaN where blocks are not split."""
        places = [i for i, kind in enumerate(self.kinds) if kind == "mlp"]
        if not places:
            return float("nan")
        return float(self.parts[places[-1]] / self.parts.sum())

    def of_kind(self, kind: str) -> float:
        """The sum of all parts of one kind."""
        return float(sum(p for k, p in zip(self.kinds, self.parts, strict=True) if k == kind))

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs: kinds, the largest parts, the last MLP, heads and neurons."""
        rows = [(self.quantity, f"{self.logit:.3f} of {self.text} after position {self.position}")]
        for kind in dict.fromkeys(self.kinds):
            rows.append((f"all of {kind}", f"{self.of_kind(kind):+.3f}"))
        rows.append(("constant", f"{self.constant:+.3f}"))
        for i in np.argsort(-np.abs(self.parts))[:8]:
            where = "" if self.layers[i] < 0 else f" of block {self.layers[i]}"
            rows.append((f"{self.kinds[i]}{where}", f"{self.parts[i]:+.3f}"))
        rows.append(("last MLP's share", f"{self.last_mlp_share:.3f} of what the parts write"))
        known = np.argwhere(np.isfinite(self.heads))
        for block, head in known[np.argsort(-np.abs(self.heads[tuple(known.T)]))[:5]]:
            rows.append((f"head {block}.{head}", f"{self.heads[block, head]:+.3f}"))
        for layer, neuron, part in zip(
            self.neuron_layers, self.neuron_ids, self.neurons, strict=True
        ):
            rows.append((f"neuron {layer}.{neuron}", f"{part:+.3f}"))
        return rows


@in_plain_torch
def attribution(
    checkpoint: "Checkpoint",
    prompt: Any,
    *,
    token: str | int | None = None,
    against: str | int | None = None,
    position: int = -1,
    top_neurons: int = 5,
    source: Any = None,
) -> Attribution:
    """Take the logit of a token at a position apart by who wrote it.

    `token` is the model's own first choice where left out; with `against` the difference of the
    two logits is taken apart, in which what moves all tokens alike is gone. With a soft-cap the
    number is the logit before it. `position` is the one whose next token is predicted,
    `top_neurons` how many of the neurons that write most are named, `source` an
    encoder-decoder's source text.

    Raises UnsupportedArchitectureError where the readout is not linear after its norm or a state
    holds several streams, and where parts and constant miss the logit by more than 1e-4 and what
    the readout rounds; SelectionError, PromptError, TokenizerError.

    >>> found = lens.attribution(model, "The Eiffel Tower is in", token=" Paris")  # doctest: +SKIP
    >>> found.last_mlp_share  # doctest: +SKIP
    """
    readout = _linear_readout(checkpoint)
    ids = checkpoint.ids_of(prompt)
    (at,) = prompts.resolve([position], len(ids), "position")
    inputs = checkpoint.inputs_of([ids], source=source)
    arguments = forward_arguments(checkpoint.model, inputs, seq2seq=checkpoint.seq2seq)
    with untouched(checkpoint.model):
        start, steps = block_steps(
            checkpoint.trunk, lambda: checkpoint.model(**arguments), at, length=len(ids)
        )
    state = checkpoint.capture(inputs, layers=[checkpoint.n_layers])[checkpoint.n_layers][0, at]
    logits = readout.logits(state[None])[0]
    chosen = int(logits.argmax()) if token is None else _id(checkpoint, token)
    other = None if against is None else _id(checkpoint, against)
    weights = {chosen: 1.0} if other is None else {chosen: 1.0, other: -1.0}
    if chosen == other:
        raise SelectionError("token and against are the same: their difference is 0.")
    linear = linear_logit(readout, state, weights)
    at_start, constant, writes = _pulled_back(linear, steps)
    parts = [float(at_start.to(start.device) @ start)]
    parts += [float(direction @ write.value) for write, direction in writes]
    neurons = _neurons(writes, top_neurons)
    names = token_text(checkpoint.tokenizer, [*weights])
    result = Attribution(
        model_id=checkpoint.origin.model_id,
        tie=checkpoint.tie.verdict,
        token_id=chosen,
        against_id=other,
        position=at,
        text=" against ".join(repr(names.get(i, f"#{i}")) for i in weights),
        quantity=linear.quantity,
        logit=_truth(readout, state, weights, linear),
        constant=constant,
        kinds=("embedding", *(write.kind for write, _ in writes)),
        layers=np.array([-1, *(write.layer for write, _ in writes)]),
        parts=np.array(parts),
        heads=_heads(checkpoint, writes),
        neuron_layers=neurons[0],
        neuron_ids=neurons[1],
        neurons=neurons[2],
    )
    _require_whole(result, _allowed(readout, state, weights, linear, logits))
    return result


_Directed = list[tuple[Write, Float[Tensor, " d_model"]]]
"""Writes, each with the direction of the logit in the state that it was added to."""


def _pulled_back(
    linear: LinearLogit, steps: list[Step]
) -> tuple[Float[Tensor, " d_model"], float, _Directed]:
    """The direction at the embedding, the constant, and that of each write, through the norms."""
    direction, constant = linear.direction, linear.constant
    writes = []
    for step in reversed(steps):
        if isinstance(step, Write):
            # Blocks may lie on several devices.
            direction = direction.to(step.value.device)
            writes.append((step, direction))
        else:
            direction = direction.to(step.bias.device)
            constant += float(direction @ step.bias)
            direction = step.transposed(direction)
    return direction, constant, writes[::-1]


def _linear_readout(checkpoint: "Checkpoint") -> DirectReadout:
    readout = checkpoint.readout
    streams = checkpoint.trunk.layout.n_streams
    if isinstance(readout, DirectReadout) and streams == 1:
        return readout
    reason = f"a state holds {streams} streams" if streams > 1 else f"it is {readout.kind}"
    raise UnsupportedArchitectureError(
        f"Attribution needs a direct readout of one stream, and of this one {reason}. Missing "
        "step: a linear map from the state to the logit. Use model.logit_lens by layer."
    )


def _id(checkpoint: "Checkpoint", token: str | int) -> int:
    _, ((found, *more),) = prompts.resolve_sets(
        checkpoint.tokenizer, {"token": [token]}, d_vocab=checkpoint.d_vocab
    )
    if more:
        raise SelectionError(f"{token!r} is {1 + len(more)} tokens; pass one.")
    return int(found)


def _truth(
    readout: DirectReadout, state: Tensor, weights: dict[int, float], linear: LinearLogit
) -> float:
    """The model's own number: the logit, or the product with its bias where a cap follows."""
    if linear.quantity == "logit":
        values = readout.logits(state[None])[0]
    else:
        with torch.no_grad():
            prepared = readout.prepare(state[None])
            unembedding = readout.unembedding
            values = torch.nn.functional.linear(prepared, unembedding.weight, unembedding.bias)[0]
    return float(sum(factor * float(values[i]) for i, factor in weights.items()))


def _heads(checkpoint: "Checkpoint", writes: _Directed) -> Float[np.ndarray, "block head"]:
    config = checkpoint.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = int(getattr(config, "num_attention_heads", None) or 1)
    found = np.full((checkpoint.n_layers, count), np.nan)
    for write, direction in writes:
        if write.kind == "attention" and write.activation is not None and write.columns is not None:
            each = (direction @ write.columns) * write.activation
            if len(each) % count == 0:
                found[write.layer] = each.cpu().numpy().reshape(count, -1).sum(1)
    return found


def _neurons(
    writes: _Directed, top: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """The neurons of the MLPs that write most, by size."""
    layers, ids, parts = [], [], []
    for write, direction in writes:
        if write.kind == "mlp" and write.activation is not None and write.columns is not None:
            each = ((direction @ write.columns) * write.activation).cpu()
            best = each.abs().topk(min(top, len(each))).indices
            layers += [write.layer] * len(best)
            ids += best.tolist()
            parts += each[best].tolist()
    order = np.argsort(-np.abs(np.array(parts, dtype=np.float64)), kind="stable")[:top]
    chosen = (np.array(layers, dtype=np.int64), np.array(ids, dtype=np.int64), np.array(parts))
    return chosen[0][order], chosen[1][order], chosen[2].astype(np.float64)[order]


def _allowed(
    readout: DirectReadout,
    state: Float[Tensor, " d_model"],
    weights: dict[int, float],
    linear: LinearLogit,
    logits: Float[Tensor, " d_vocab"],
) -> float:
    """How far the sum may be off: 1e-4, relative above 1, and what the readout itself rounds.

    The parts add up to the state in float64; the model rounds each number of the normed state, and
    each logit, to its own precision.
    """
    sizes = [abs(float(logits[i])) for i in weights]
    rounded = sum(sizes) + float((linear.direction * state.double()).norm())
    eps = max(torch.finfo(t.dtype).eps for t in (state, readout.unembedding.weight))
    return _ERROR * max(1.0, *sizes) + _ROUNDINGS * eps * rounded


def _require_whole(result: Attribution, allowed: float) -> None:
    if not result.error <= allowed:
        raise UnsupportedArchitectureError(
            f"Parts and constant miss the {result.quantity} by {result.error:.3g}, allowed "
            f"{allowed:.3g}: something acts on the state that is neither a block nor the readout. "
            "Use model.logit_lens by layer."
        )
