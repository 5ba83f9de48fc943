"""The states of a seeded sample of positions, spread evenly over the documents of a corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.readout import DirectReadout
from lens.corpus import Corpus, read_corpus
from lens.errors import PromptError, SelectionError
from lens.measuring.required_readout import required_readout
from lens.measuring.windows import Window, windows_of

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledStates:
    """States of some layers and the last, and the token and the document of each position.

    `documents` are places in the corpus, in ascending order; position 0 of a window is never
    among the positions.
    """

    states: dict[int, Float[Tensor, "pos d_model"]]
    final: Float[Tensor, "pos d_model"]
    input_ids: Int[Tensor, " pos"]
    documents: Int[np.ndarray, " pos"]
    window_tokens: int

    def __len__(self) -> int:
        return len(self.documents)

    def select(self, rows: Int[np.ndarray, " row"]) -> "SampledStates":
        """These positions alone."""
        at = torch.from_numpy(rows)
        return SampledStates(
            states={layer: held[at] for layer, held in self.states.items()},
            final=self.final[at],
            input_ids=self.input_ids[at],
            documents=self.documents[rows],
            window_tokens=self.window_tokens,
        )


def sampled_states(
    checkpoint: "Checkpoint",
    corpus: Corpus,
    *,
    layers: Sequence[int],
    positions: int,
    max_documents: int,
    window_tokens: int | None,
    seed: int,
) -> SampledStates:
    """About `positions` positions of at most `max_documents` documents, as many of each.

    Windows of a document, and positions within the last of them, are drawn. Raises SelectionError
    for fewer than one position or document, PromptError where nothing can be read, and as
    `windows_of` does.
    """
    if positions < 1 or max_documents < 1:
        raise SelectionError(
            f"positions is {positions}, max_documents {max_documents}; expected at least 1 of each."
        )
    windows = windows_of(checkpoint, corpus, window_tokens=window_tokens)
    read = [d for d, held in enumerate(windows.by_document) if held]
    count = min(len(read), max_documents, positions)
    chosen = [read[i * len(read) // count] for i in range(count)]
    generator = np.random.default_rng(seed)
    wanted = sorted({*layers, checkpoint.n_layers})
    states: dict[int, list[Tensor]] = {layer: [] for layer in wanted}
    documents: list[int] = []
    ids: list[np.ndarray] = []
    for number, document in enumerate(chosen):
        quota = positions * (number + 1) // count - positions * number // count
        for window, at in _drawn(windows.by_document[document], quota, generator):
            inputs = checkpoint.inputs_of([window.ids.tolist()])
            captured = checkpoint.capture(inputs, layers=wanted, positions=at.tolist())
            device = captured[checkpoint.n_layers].device
            for layer in wanted:
                states[layer].append(captured[layer][0].to(device))
            documents += [document] * len(at)
            ids.append(window.ids[at])
    if not documents:
        raise PromptError(f"{corpus.name!r} leaves no position to read.")
    joined = {layer: torch.cat(held) for layer, held in states.items()}
    return SampledStates(
        states={layer: joined[layer] for layer in layers},
        final=joined[checkpoint.n_layers],
        input_ids=torch.from_numpy(np.concatenate(ids)),
        documents=np.array(documents, dtype=np.int64),
        window_tokens=windows.window_tokens,
    )


def read_directly(
    model: "Checkpoint", corpus: Any, what: str, **sampling: Any
) -> tuple[DirectReadout, SampledStates]:
    """The readout that `what` needs, and states of all layers to read by it.

    `corpus` is what `read_corpus` takes, `sampling` as in `sampled_states`. Raises
    UnsupportedArchitectureError without a direct readout, before anything is read, and as
    `sampled_states` does.
    """
    readout = required_readout(model, what)
    layers = range(model.n_layers + 1)
    return readout, sampled_states(model, read_corpus(corpus), layers=layers, **sampling)


def _drawn(
    windows: Sequence[Window], quota: int, generator: np.random.Generator
) -> list[tuple[Window, np.ndarray]]:
    found = []
    for number in generator.permutation(len(windows)).tolist():
        at = np.arange(1, windows[number].n_read)
        if len(at) > quota:
            at = np.sort(generator.choice(at, quota, replace=False))
        if len(at):
            found.append((windows[number], at))
        quota -= len(at)
        if quota <= 0:
            break
    return found
