"""The Jacobian lens: a state is moved to the output by the mean derivative of the trunk.

J_l = E[d h_L / d h_l], by vector-Jacobian products. As in the published lenses, a derivative is
summed over the position itself and all later ones, and averaged over the positions where it begins.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import repeat
from jaxtyping import Float
from torch import Tensor

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.untouched import untouched
from lens.corpus import read_corpus
from lens.errors import PromptError, ProvenanceError, ResultFileError, SelectionError
from lens.lenses.affine import AffineLens, fitted_lens
from lens.lenses.differentiable import pulled_back
from lens.measuring.windows import Window, default_window, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

WINDOW_TOKENS = 128
FIRST_POSITION = 16
"""States before this position are unlike others: attention rests on them."""

NAME = "jacobian"
_KEYS = {"J", "n_prompts", "source_layers", "d_model"}


@dataclass(frozen=True, kw_only=True)
class WindowDone:
    """How far fitting is: windows done and in all."""

    done: int
    total: int


@in_plain_torch
def fit_jacobian(
    model: "Checkpoint",
    corpus: Any = "sample",
    *,
    max_windows: int = 100,
    window_tokens: int | None = None,
    first_position: int = FIRST_POSITION,
    rows_at_once: int = 8,
    progress: Callable[[WindowDone], None] | None = None,
) -> AffineLens:
    """Fit E[d h_L / d h_l] for every layer over the first windows of at most `max_windows` texts.

    A window holds `window_tokens` (128, or the context where that is less).

    One forward for each window, then d_model backward passes, `rows_at_once` of them together: a
    window costs about as much as d_model trainings on it. The lens has no bias: a trunk that adds a
    constant is missed by that constant. Positions before `first_position` are left out, and the
    last one. Take it as `lens=` in `lens.measure`.

    Raises PromptError where no window is long enough, SelectionError, and as `lens.measure` does.

    >>> lens.fit_jacobian(model, fit, max_windows=20)  # doctest: +SKIP
    """
    if max_windows < 1 or rows_at_once < 1 or first_position < 0:
        raise SelectionError(
            f"max_windows {max_windows}, rows_at_once {rows_at_once}, first_position "
            f"{first_position}: expected 1 or more, 1 or more, 0 or more."
        )
    texts = read_corpus(corpus)
    size = default_window(model, most=WINDOW_TOKENS)
    windows = windows_of(model, texts, window_tokens=window_tokens or size)
    firsts = [held[0] for held in windows.by_document if held]
    usable = [window for window in firsts if window.n_read - 1 > first_position]
    if not usable:
        raise PromptError(
            f"No document of {texts.name!r} is longer than {first_position + 1} tokens; pass "
            "longer ones, or a lower first_position."
        )
    count = min(max_windows, len(usable))
    chosen = [usable[i * len(usable) // count] for i in range(count)]
    total = torch.zeros(model.n_layers, model.d_model, model.d_model, dtype=torch.float64)
    for done, window in enumerate(chosen, 1):
        total += jacobians(model, window, first_position=first_position, rows_at_once=rows_at_once)
        if progress is not None:
            progress(WindowDone(done=done, total=len(chosen)))
    mean = (total / len(chosen)).float()
    options = {
        "n_prompts": len(chosen),
        "window_tokens": windows.window_tokens,
        "first_position": first_position,
    }
    return _lens(model, mean, f"{texts.name} {texts.hash}", options)


def jacobians(
    model: "Checkpoint", window: Window, *, first_position: int, rows_at_once: int
) -> Float[Tensor, "translator d_model d_model"]:
    """The mean over source positions of sum over later ones of d h_L / d h_l, in one window."""
    d_model, n_layers = model.d_model, model.n_layers
    positions = torch.arange(first_position, window.n_read - 1)
    found = torch.zeros(n_layers, d_model, d_model, dtype=torch.float64)
    inputs = model.inputs_of([window.ids.tolist()] * min(rows_at_once, d_model))
    with untouched(model.model), torch.enable_grad():
        leaves, last = _traced(model, inputs)
        n_rows = last.shape[0]
        for first in range(0, d_model, n_rows):
            count = min(n_rows, d_model - first)
            one_hot = torch.zeros(n_rows, d_model, dtype=torch.float32)
            one_hot[torch.arange(count), torch.arange(first, first + count)] = 1.0
            force = torch.zeros_like(last)
            force[:, positions] = repeat(one_hot.to(last), "row d -> row pos d", pos=len(positions))
            grads = pulled_back(last, leaves, force, again=first + n_rows < d_model)
            for layer, grad in enumerate(grads):
                rows = grad[:count, positions.to(grad.device)].double().mean(1)
                found[layer, first : first + count] = rows.cpu()
    return found


def _traced(model: "Checkpoint", inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """A zero that is added to each layer's states, and the last states, in one graph."""
    leaves: dict[int, Tensor] = {}
    last: list[Tensor] = []

    def with_leaf(layer: int) -> Callable[[Tensor], Tensor]:
        def add(states: Tensor) -> Tensor:
            leaves[layer] = torch.zeros_like(states, requires_grad=True)
            return states + leaves[layer]

        return add

    def keep(states: Tensor) -> Tensor:
        last.append(states)
        return states

    arguments = forward_arguments(model.model, inputs, seq2seq=model.seq2seq)
    with ExitStack() as stack:
        for layer in range(model.n_layers):
            stack.enter_context(model.edit(layer, None, with_leaf(layer)))
        stack.enter_context(model.edit(model.n_layers, None, keep))
        model.model(**arguments)
    return [leaves[layer] for layer in range(model.n_layers)], last[0]


def load_jacobian(path: str | Path, model: "Checkpoint") -> AffineLens:
    """Read a published Jacobian lens (.pt with J, n_prompts, source_layers, d_model) for `model`.

    There, layer i is the output of block i: here layer i + 1. Layers without a Jacobian, the
    embedding among them, are read as they are; `source.options["layers_without"]` names them. The
    file does not say of which model it is: only width and depth are checked. Raises
    ResultFileError, ProvenanceError.
    """
    source = Path(path)
    try:
        held = torch.load(source, map_location="cpu", weights_only=True)
        missing = _KEYS - set(held)
        if missing:
            raise KeyError(f"no {', '.join(sorted(missing))}")
        found = {int(layer) + 1: matrix.float() for layer, matrix in held["J"].items()}
        if sorted(found) != sorted(int(layer) + 1 for layer in held["source_layers"]):
            raise ValueError("source_layers names other layers than J has")
    except Exception as error:  # whatever the unpickler makes of another file
        raise ResultFileError(
            f"{source} cannot be read as a Jacobian lens ({type(error).__name__}: {error})."
        ) from error
    shape = (model.d_model, model.d_model)
    wrong = [layer for layer, matrix in found.items() if tuple(matrix.shape) != shape]
    if wrong or max(found) >= model.n_layers or min(found) < 1:
        raise ProvenanceError(
            f"{source.name} has Jacobians of width {held['d_model']} for the outputs of blocks "
            f"{[layer - 1 for layer in sorted(found)]}; {model.origin.model_id} has width "
            f"{model.d_model} and blocks 0 to {model.n_layers - 1}, the last of them the target."
        )
    whole = torch.eye(model.d_model, dtype=torch.float32).repeat(model.n_layers, 1, 1)
    for layer, matrix in found.items():
        whole[layer] = matrix
    without = [layer for layer in range(model.n_layers) if layer not in found]
    options = {"n_prompts": int(held["n_prompts"]), "layers_without": without}
    return _lens(model, whole, f"published: {source.name}", options)


def _lens(
    model: "Checkpoint",
    jacobian: Float[Tensor, "translator d_model d_model"],
    fitted_on: str,
    options: dict[str, Any],
) -> AffineLens:
    weight = jacobian - torch.eye(model.d_model, dtype=torch.float32)
    bias = torch.zeros(model.n_layers, model.d_model, dtype=torch.float32)
    return fitted_lens(model, NAME, weight, bias, fitted_on, options)
