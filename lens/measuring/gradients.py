"""The paths by which a tied matrix is trained: through the lookup, and through the unembedding.

For one backward pass the lookup and the unembedding are given two leaves of the same values, so
that autograd itself tells the paths apart, whatever scales, caps and norms stand between. On a
tied model the parts must add up to the gradient of the one matrix; on an untied model they are
the gradients of its two. Source: Press and Wolf, arXiv:1608.05859, section 3.
What Adam makes of the paths stands beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lens.checkpoint.inputs import Inputs, forward_arguments
from lens.checkpoint.matrices import NamedMatrix, named_matrices
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.replay import logits_of
from lens.checkpoint.untouched import untouched
from lens.errors import SelectionError, UnsupportedArchitectureError, UnsupportedModelStateError
from lens.measuring.adam_paths import AdamPaths, AdamSettings, Matrices
from lens.measuring.path_shares import PathShares, path_shares, share_and_cosine
from lens.measuring.training_batches import IGNORED, TrainingBatch, training_batches

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

N_GROUPS = 10
LAW_ERROR = 1e-6
"""Largest |g_in + g_out - g| / |g| in float32: each sum is rounded once more than autograd's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientPaths:
    """Norms, shares and angles of the paths into the embedding matrices, over a corpus.

    The loss is the mean cross-entropy in nats, as in training; `loss_bits` tells it in bits.
    `paths` are "embedding" and "unembedding", or the three of an encoder-decoder, the output path
    last. `output_share` is |g_out| / sum of |g|, `additive_share` <g_out, g> / |g|^2 with g the
    sum (NaN where shapes differ), `cosine` that of the input paths' sum and the output path.
    `group_*` give the same for rows by frequency: ten groups of the rows that occur, most frequent
    first, and one of those that do not. `batch_*` hold one number for each batch. `law_error` is
    the largest relative distance between the sum of the paths and autograd's gradient of the one
    matrix, NaN where the model is untied.

    `adam` are the paths' parts of the step that Adam takes after these batches, each batch one
    gradient, at fixed weights: of a tied matrix with the one size that it has, of two matrices
    with each its own. `adam_otherwise` is the other of the two, None where shapes differ.
    """

    model_id: str
    tie: str
    paths: tuple[str, ...]
    norms: Float[np.ndarray, " path"]
    output_share: float
    additive_share: float
    cosine: float
    group_rows: Int[np.ndarray, " group"]
    group_norms: Float[np.ndarray, "group path"]
    group_output_share: Float[np.ndarray, " group"]
    group_cosine: Float[np.ndarray, " group"]
    batch_output_share: Float[np.ndarray, " batch"]
    batch_cosine: Float[np.ndarray, " batch"]
    loss_bits: float
    n_targets: int
    law_error: float
    adam: PathShares
    adam_otherwise: PathShares | None

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a reader."""
        norms = ", ".join(f"{p} {n:.4g}" for p, n in zip(self.paths, self.norms, strict=True))
        low, high = np.quantile(self.batch_output_share, [0.05, 0.95])
        rows = [
            ("tie", self.tie),
            ("loss", f"{self.loss_bits:.3f} bits over {self.n_targets:,} targets"),
            ("gradient norms", f"{norms} (of the loss in nats)"),
            ("output share", f"{self.output_share:.3f} (batches: {low:.3f} to {high:.3f})"),
            ("additive share", f"{self.additive_share:.3f}"),
            ("cosine of paths", f"{self.cosine:+.3f}"),
        ]
        if np.isfinite(self.law_error):
            rows.append(("parts against whole", f"off by {self.law_error:.1e} of its norm"))
        rows.append(("Adam's output share", f"{_in_words(self.adam)} (of its step)"))
        if self.adam_otherwise is not None:
            other = "a size for each path" if np.isfinite(self.law_error) else "one size for both"
            rows.append((f"Adam, {other}", _in_words(self.adam_otherwise)))
        return rows

    def group_rows_text(self) -> list[tuple[str, str]]:
        """(label, text) pairs: the groups of rows by frequency."""
        names = [f"rows by use {i}/{N_GROUPS}" for i in range(1, N_GROUPS + 1)]
        return [
            (
                name,
                f"{rows:,} rows: output share {share:.3f}, cosine {cosine:+.3f}, "
                f"norms {', '.join(f'{n:.3g}' for n in norms)}; of Adam's step {step:.3f}",
            )
            for name, rows, share, cosine, norms, step in zip(
                [*names, "rows not used"],
                self.group_rows,
                self.group_output_share,
                self.group_cosine,
                self.group_norms,
                self.adam.group_output_share,
                strict=True,
            )
            if rows
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchGradients:
    """The gradients of one batch's summed loss, in nats, by path; `whole` that of one matrix."""

    by_path: dict[str, Float[Tensor, "_ _"]]
    whole: Float[Tensor, "_ _"] | None
    loss_nats: float
    n_targets: int


@in_plain_torch
def gradients(
    checkpoint: "Checkpoint",
    corpus: Any = "sample",
    *,
    batch_size: int = 8,
    window_tokens: int | None = None,
    max_targets: int = 8192,
    masked_share: float = 0.15,
    mask_id: int | None = None,
    adam: AdamSettings | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> GradientPaths:
    """The gradient of the training loss on a corpus, taken apart by path into the matrices.

    `corpus` is what `read_corpus` takes; for an encoder-decoder a list of (source, target) pairs of
    texts or ids. A causal model is scored on next tokens, a masked one on `masked_share` of the
    positions, which `mask_id` (the tokenizer's mask token) replaces. Batches of `batch_size`
    windows of `window_tokens` (256, or the context where that is less) are drawn in a seeded order
    until `max_targets` is reached. `adam` holds that optimiser's constants, torch's by default.
    Weights and gradients of the model stay as they are.

    Raises UnsupportedArchitectureError where the paths do not add up to autograd's own gradient,
    UnsupportedModelStateError, PromptError, SelectionError, TokenizerError.

    >>> paths = lens.gradients(model, "sample")  # doctest: +SKIP
    >>> paths.output_share  # doctest: +SKIP
    """
    batches = training_batches(
        checkpoint,
        corpus,
        batch_size=batch_size,
        window_tokens=window_tokens,
        max_targets=max_targets,
        masked_share=masked_share,
        mask_id=mask_id,
        seed=seed,
    )
    total: dict[str, Tensor] = {}
    as_it_is, otherwise = _ways(checkpoint)
    optimiser = AdamPaths(adam or AdamSettings(), [as_it_is, otherwise or as_it_is])
    shares, cosines, errors, loss, count = [], [], [], 0.0, 0
    for done, batch in enumerate(batches):
        parts = batch_gradients(checkpoint, batch.inputs, batch.targets, whole=done == 0)
        errors += _law_errors(checkpoint, parts)
        by_path = _together(parts.by_path)
        optimiser.add({path: g.float() / parts.n_targets for path, g in by_path.items()})
        share, cosine = share_and_cosine(list(by_path.values()))
        shares.append(share)
        cosines.append(cosine)
        for path, gradient in by_path.items():
            total[path] = gradient.float() + total[path] if path in total else gradient.float()
        loss, count = loss + parts.loss_nats, count + parts.n_targets
        if progress is not None:
            progress(done + 1, len(batches))
    for gradient in total.values():
        gradient /= count
    groups = _groups(batches, max(g.shape[0] for g in total.values()))
    paths, found = tuple(total), path_shares(list(total.values()), groups)
    total.clear()  # of the size of the matrices: freed before Adam's are made
    return GradientPaths(
        model_id=checkpoint.origin.model_id,
        tie=checkpoint.tie.verdict,
        paths=paths,
        norms=found.norms,
        output_share=found.output_share,
        additive_share=found.additive_share,
        cosine=found.cosine,
        group_rows=np.array([len(rows) for rows in groups]),
        group_norms=found.group_norms,
        group_output_share=found.group_output_share,
        group_cosine=found.group_cosine,
        adam=path_shares(list(optimiser.steps(as_it_is).values()), groups),
        adam_otherwise=None
        if otherwise is None
        else path_shares(list(optimiser.steps(otherwise).values()), groups),
        batch_output_share=np.array(shares),
        batch_cosine=np.array(cosines),
        loss_bits=loss / count / float(np.log(2)),
        n_targets=count,
        law_error=max(errors, default=float("nan")),
    )


def _together(by_path: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All on the device of the first: two matrices may lie on two."""
    device = next(iter(by_path.values())).device
    return {path: gradient.to(device) for path, gradient in by_path.items()}


def batch_gradients(
    checkpoint: "Checkpoint",
    inputs: Inputs,
    targets: Int[Tensor, "batch pos"],
    *,
    whole: bool = False,
) -> BatchGradients:
    """The gradients of one batch's summed cross-entropy; `targets` are -1 where nothing is scored.

    `whole` asks for autograd's gradient of the one matrix too, where the model is tied. Raises
    UnsupportedArchitectureError, UnsupportedModelStateError.
    """
    model = checkpoint.model
    matrices = named_matrices(model, checkpoint.readout, seq2seq=checkpoint.seq2seq)
    _require_two_doors(model, matrices)
    leaves = {m.role: m.tensor.detach().requires_grad_() for m in matrices}
    by_name = {str(m.name): leaves[m.role] for m in matrices}
    loss, n_targets = _loss(checkpoint, by_name, inputs, targets)
    found = torch.autograd.grad(loss, list(leaves.values()))
    one = None
    if whole and checkpoint.tie.is_tied and all(pair.is_tied for pair in checkpoint.tie.pairs):
        leaf = matrices[-1].tensor.detach().requires_grad_()
        everywhere = dict.fromkeys(name for m in matrices for name in m.aliases)
        again, _ = _loss(checkpoint, dict.fromkeys(everywhere, leaf), inputs, targets)
        (one,) = torch.autograd.grad(again, [leaf])
    return BatchGradients(
        by_path=dict(zip(leaves, found, strict=True)),
        whole=one,
        loss_nats=float(loss.detach()),
        n_targets=n_targets,
    )


def _loss(
    checkpoint: "Checkpoint", by_name: dict[str, Tensor], inputs: Inputs, targets: Tensor
) -> tuple[Tensor, int]:
    """The summed cross-entropy with these tensors in place of the matrices of these names."""
    model = checkpoint.model
    arguments = forward_arguments(model, inputs, seq2seq=checkpoint.seq2seq)
    with untouched(model), torch.enable_grad():
        # tie_weights=False: each name gets its own tensor, though both stand for one parameter.
        output = torch.func.functional_call(model, by_name, (), arguments, tie_weights=False)
        logits = logits_of(output)
        targets = targets.to(logits.device)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
    n_targets = int((targets != IGNORED).sum())
    if n_targets == 0:
        raise SelectionError("No position of this batch has a target: nothing would be trained.")
    return loss, n_targets


def _require_two_doors(model: Any, matrices: tuple[NamedMatrix, ...]) -> None:
    """Raise where two roles are one module, so that one tensor cannot stand for one of them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for matrix in matrices:
        if matrix.tensor.is_meta or not matrix.tensor.is_floating_point():
            raise UnsupportedModelStateError(
                f"{matrix.name} is {matrix.tensor.dtype} on {matrix.tensor.device}; a gradient "
                "needs plain weights in memory."
            )
    owners = [id(modules.get(str(m.name).rpartition(".")[0])) for m in matrices]
    if len(matrices) < 2 or matrices[-1].role != "unembedding" or len(set(owners)) < len(owners):
        raise UnsupportedArchitectureError(
            f"{type(model).__name__} has no separate modules for "
            f"{' and '.join(m.role for m in matrices)}: their paths cannot be told apart."
        )


def _law_errors(checkpoint: "Checkpoint", parts: BatchGradients) -> list[float]:
    """How far the parts are from the whole; raises where that is more than rounding."""
    if parts.whole is None:
        return []
    summed = torch.stack([g.double() for g in parts.by_path.values()]).sum(0)
    error = float((summed - parts.whole.double()).norm() / parts.whole.double().norm())
    eps = torch.finfo(parts.whole.dtype).eps
    allowed = LAW_ERROR * max(1.0, eps / torch.finfo(torch.float32).eps)
    if not error <= allowed:
        raise UnsupportedArchitectureError(
            f"The paths into the matrix of {type(checkpoint.model).__name__} do not add up to its "
            f"gradient: off by {error:.2g} of its norm, allowed {allowed:.2g}. Missing step: a "
            "third use of the matrix."
        )
    return [error]


def _groups(batches: Sequence[TrainingBatch], n_rows: int) -> list[Int[np.ndarray, "_"]]:
    """Rows by frequency: ten groups of those that occur, most frequent first; those that do not."""
    counts = np.zeros(n_rows, dtype=np.int64)
    for batch in batches:
        counts += np.bincount(batch.own_ids, minlength=n_rows)[:n_rows]
    order = np.argsort(-counts, kind="stable")
    occurring = int((counts > 0).sum())
    return [*np.array_split(order[:occurring], N_GROUPS), order[occurring:]]


def _ways(checkpoint: "Checkpoint") -> tuple[Matrices, Matrices | None]:
    """Which paths lead into one matrix here; and otherwise: all into one, or each into its own.

    None for the other where matrices of different shapes cannot be one.
    """
    matrices = named_matrices(checkpoint.model, checkpoint.readout, seq2seq=checkpoint.seq2seq)
    roles = [matrix.role for matrix in matrices]
    ties = {(pair.first_role, pair.second_role) for pair in checkpoint.tie.pairs if pair.is_tied}
    here: list[tuple[str, ...]] = []
    for role in roles:
        place = next((i for i, one in enumerate(here) if (one[0], role) in ties), None)
        if place is None:
            here.append((role,))
        else:
            here[place] = (*here[place], role)
    if len(here) == 1:
        return tuple(here), tuple((role,) for role in roles)
    alike = len({tuple(matrix.tensor.shape) for matrix in matrices}) == 1
    return tuple(here), (tuple(roles),) if alike else None


def _in_words(shares: PathShares) -> str:
    return f"{shares.output_share:.3f}, additive {shares.additive_share:.3f}"
