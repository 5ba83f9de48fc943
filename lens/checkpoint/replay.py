"""The reference readout: the model's own tail, run on any state put in place of its last block."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.trunk import Trunk
from lens.checkpoint.untouched import untouched
from lens.errors import CaptureError, ShapeError

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def replaced_blocks(
    trunk: Trunk,
    state: Float[Tensor, "batch pos d_model"],
    *,
    then: Callable[[Tensor], None] | None,
) -> Iterator[None]:
    """Within: every block returns `state` without computing. After: forwards and hooks as before.

    Hooks that the user put on blocks rest meanwhile: they have acted on the state already, and
    must neither see a replayed state nor act twice. `then` gets the state, in the model's
    own layout, when the last block returns it.
    """
    calls = [0]
    native: list[Tensor] = []

    def _stub(*args: Any, **kwargs: Any) -> Any:
        index = min(calls[0], trunk.n_layers - 1)
        calls[0] += 1
        if not native:
            adds = trunk.layout.adds_rows
            canvas = trunk.input_slot.get(args, kwargs) if adds else None
            native.append(trunk.layout.native(state, canvas))
        if calls[0] == trunk.n_layers and then is not None:
            then(native[0])
        return trunk.output_slot.put(trunk.output_forms[index], native[0])

    saved: list[tuple[nn.Module, str, bool, Any]] = []
    try:
        for block in trunk.distinct_blocks:
            own = vars(block)
            for name in (*_HOOK_TABLES, "forward"):
                saved.append((block, name, name in own, own.get(name)))
            for name in _HOOK_TABLES:
                own[name] = OrderedDict()
            own["forward"] = _stub
        yield
        if calls[0] != trunk.n_layers:
            raise CaptureError(
                f"The model ran {calls[0]} of the {trunk.n_layers} block calls of "
                f"{trunk.container} that were seen when it was loaded. Load it again."
            )
    finally:
        for block, name, was_own, value in saved:
            if was_own:
                vars(block)[name] = value
            else:
                vars(block).pop(name, None)


def logits_of(output: Any) -> Tensor:
    """The logits in what a language model's forward returned."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if found is None and isinstance(output, tuple):
        found = output[0]
    if not isinstance(found, Tensor):
        raise CaptureError(
            f"The model returned {type(output).__name__} without logits. Load a class with a "
            "language-model head (…ForCausalLM, …ForMaskedLM, …ForConditionalGeneration)."
        )
    return found


@dataclass(frozen=True, eq=False)
class ReplayReadout:
    """State -> logits by the model's own code: norm, projection, head, scale, cap, bias, casts.

    Exact bit for bit for a batch of the same shape. `ids_matter` is True where the tail looks at
    the input ids too (then a state can be read only beside its own inputs), `rows_mix` where the
    logits of a position depend on the states of others (then only beside theirs).
    """

    model: nn.Module
    trunk: Trunk
    seq2seq: bool
    d_vocab: int
    filler: Inputs
    ids_matter: bool = False
    rows_mix: bool = False
    kind: str = "replay"

    @property
    def whole_prompts(self) -> bool:
        """Whether states can be read only all together, as a prompt that is given beside them."""
        return self.ids_matter or self.rows_mix

    def logits(
        self, states: Float[Tensor, "batch pos d_model"], inputs: Inputs | None = None
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits of states [batch, pos, d_model]; `inputs` are those that they arose from.

        Without `inputs` filler ids of the same shape are used: positions, masks and lookups are
        computed for them but cannot reach the tail. Raises ShapeError where shapes disagree.
        """
        if states.shape[-1] != self.trunk.d_model:
            raise ShapeError(
                f"States are {states.shape[-1]} wide; this model's residual stream is "
                f"{self.trunk.d_model} wide."
            )
        if inputs is None:
            if self.whole_prompts:
                why = "reads its input ids again" if self.ids_matter else "mixes positions"
                raise ShapeError(
                    f"{type(self.model).__name__} {why} after the last block: its states can be "
                    "read only together with the prompt that they came from."
                )
            inputs = self._filled(states.shape[0], states.shape[1], states.device)
        if inputs.ids.shape != states.shape[:2]:
            raise ShapeError(
                f"States of {tuple(states.shape[:2])} (batch, pos) came with ids of "
                f"{tuple(inputs.ids.shape)}."
            )
        return self.run(states, inputs)

    def run(
        self, states: Tensor, inputs: Inputs, *, then: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """One forward with every block returning `states`; `then` is called after the last."""
        arguments = forward_arguments(self.model, inputs, seq2seq=self.seq2seq)
        with untouched(self.model), replaced_blocks(self.trunk, states, then=then):
            return logits_of(self.model(**arguments))

    def _filled(self, batch: int, pos: int, device: torch.device) -> Inputs:
        one: Int[Tensor, "batch pos"] = self.filler.ids[:1, :1].to(device)
        source = self.filler.source_ids
        return Inputs(
            ids=one.expand(batch, pos),
            source_ids=None if source is None else source[:1].expand(batch, -1).to(device),
        )
