"""A pretrained model, taken apart into a trunk and a proved readout."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lens.checkpoint import capturing, changes, prompts, residual, tokenizing
from lens.checkpoint.block_states import BlockStates
from lens.checkpoint.encoder import shared_matrix_encoder
from lens.checkpoint.fingerprint import ModelHashes
from lens.checkpoint.inputs import Inputs, forward_arguments, pad_right
from lens.checkpoint.layer_numbers import Layer, is_mid, resolve_layers
from lens.checkpoint.layout import MoreRowsError
from lens.checkpoint.lookup import context_length, lookup_scale, source_length
from lens.checkpoint.mid import MidPoint, find_mid
from lens.checkpoint.origin import Origin
from lens.checkpoint.plain_torch import in_plain_torch
from lens.checkpoint.proof import Proved, proved_with_rows_behind, take_apart
from lens.checkpoint.readout import DirectReadout, Readout
from lens.checkpoint.states import ResidualStates
from lens.checkpoint.summary import CheckpointSummary
from lens.checkpoint.tying import TieReport, input_matrix, output_matrix, report_tie
from lens.checkpoint.untouched import untouched
from lens.errors import (
    SelectionError,
    UnsupportedArchitectureError,
    UnsupportedModelStateError,
)

if TYPE_CHECKING:
    from lens.lenses.predictions import LayerPredictions
    from lens.lenses.readings import VectorReadings

LAYER_CONVENTION = "layer l is the state after l blocks; 0 is the embedding"


class Checkpoint:
    """A model, its tokenizer, its trunk and the readout that was proved on it.

    Made by `lens.load`. The model is the user's own object: it is never changed, and every hook
    is removed before a method returns.
    """

    def __init__(
        self, *, model: nn.Module, tokenizer: Any, origin: Origin, proved: Proved, seq2seq: bool
    ) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.origin = origin
        self.trunk = proved.trunk
        self.readout: Readout = proved.readout
        self.replay = proved.replay
        self.causal = proved.causal or seq2seq
        self.seq2seq = seq2seq
        self._proved = proved
        self._marks = changes.marks(model, proved.trunk)
        self._hashes = ModelHashes(model, proved.trunk.distinct_blocks)

    @classmethod
    def from_model(
        cls, model: nn.Module, *, tokenizer: Any, origin: Origin, readout: Readout | None = None
    ) -> "Checkpoint":
        """Take a Hugging Face language model apart and prove a readout of it.

        Raises UnsupportedArchitectureError naming the step that is missing.
        """
        seq2seq = bool(getattr(model.config, "is_encoder_decoder", False)) and hasattr(
            model, "get_decoder"
        )
        proved = take_apart(model, seq2seq=seq2seq, readout=readout)
        return cls(model=model, tokenizer=tokenizer, origin=origin, proved=proved, seq2seq=seq2seq)

    @property
    def n_layers(self) -> int:
        """Number of block calls; layers run from 0 (embedding) to n_layers (output)."""
        return self.trunk.n_layers

    @property
    def d_model(self) -> int:
        """Width of the residual state."""
        return self.trunk.d_model

    @property
    def d_vocab(self) -> int:
        """Number of logits, padding rows included."""
        return self.replay.d_vocab

    @property
    def W_E(self) -> Tensor:
        """The embedding [rows, d], unscaled: the model's own parameter.

        Its rows may be more or fewer than d_vocab where a vocabulary is padded. Raises
        SelectionError where the model has none in memory.
        """
        return self._matrix(input_matrix(self.model, seq2seq=self.seq2seq), "embedding")

    @property
    def W_U(self) -> Tensor:
        """The unembedding [d_vocab, d]: the model's own parameter.

        Raises SelectionError where the model has none in memory.
        """
        return self._matrix(output_matrix(self.model, self.readout), "unembedding")

    @property
    def b_U(self) -> Tensor | None:
        """The bias [d_vocab] of the product with W_U, None where there is none."""
        if isinstance(self.readout, DirectReadout):
            return self.readout.unembedding.bias
        head = self.model.get_output_embeddings()
        return getattr(head, "bias", None)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self._proved.witness.inputs.ids.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual states."""
        return self._proved.witness.last_state.dtype

    @property
    def target(self) -> Literal["next", "same"]:
        """Which token a position is scored against: the next (causal) or the same (masked)."""
        return "next" if self.causal else "same"

    @cached_property
    def n_ids(self) -> int:
        """Number of token ids that the lookup takes."""
        w_e = input_matrix(self.model, seq2seq=self.seq2seq)
        return self.d_vocab if w_e is None else int(w_e.shape[0])

    @cached_property
    @in_plain_torch
    def n_ctx(self) -> int | None:
        """Longest prompt in tokens, None where the architecture sets no limit."""
        return context_length(self.model, self._probed)

    @cached_property
    @in_plain_torch
    def source_n_ctx(self) -> int | None:
        """Longest source in tokens that the encoder takes, None without a limit or an encoder."""
        return source_length(self.model, self._probed)

    def _probed(self) -> None:
        """A forward on the inputs of the proof."""
        arguments = forward_arguments(self.model, self._proved.witness.inputs, seq2seq=self.seq2seq)
        with untouched(self.model), residual.probing():
            self.model(**arguments)

    @property
    def tie(self) -> TieReport:
        """Whether W_U is W_E: read from the tensors, with what the config says beside it.

        Raises UnsupportedModelStateError where the model was changed since it was loaded.
        """
        self.require_as_loaded()
        return self._tie

    @cached_property
    @in_plain_torch
    def _tie(self) -> TieReport:
        return report_tie(
            self.model,
            self.readout,
            seq2seq=self.seq2seq,
            checkpoint_keys=self.origin.checkpoint_keys,
        )

    @cached_property
    @in_plain_torch
    def lookup_scale(self) -> float | None:
        """The measured factor between a row of W_E and what enters block 0; None if not linear."""
        return lookup_scale(self._proved, input_matrix(self.model, seq2seq=self.seq2seq))

    @cached_property
    @in_plain_torch
    def mid(self) -> MidPoint:
        """Where each block passes from attention to MLP, found and proved on first use.

        Raises UnsupportedArchitectureError where a block has no such state (parallel blocks,
        norms on the stream), with the reason.
        """
        with untouched(self.model), residual.probing():
            return find_mid(
                type(self.model).__name__,
                self.trunk,
                lambda inputs: self.model(
                    **forward_arguments(self.model, inputs, seq2seq=self.seq2seq)
                ),
                self._proved.witness.inputs,
                seq2seq=self.seq2seq,
            )

    @cached_property
    def encoder(self) -> "Checkpoint":
        """The encoder of an encoder-decoder, read through the matrix that it shares with the head.

        A masked model of its own, with its own layers; each position is scored against its own
        token. Raises UnsupportedArchitectureError where no matrix is shared.
        """
        if not self.seq2seq:
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__} has no encoder beside a decoder: read it as it is."
            )
        model = shared_matrix_encoder(self.model, self.readout)
        note = "the encoder, through the matrix that it shares with the head; no bias, no scale"
        origin = dataclasses.replace(self.origin, notes=(*self.origin.notes, note))
        return Checkpoint.from_model(model, tokenizer=self.tokenizer, origin=origin)

    @cached_property
    def padding_rows(self) -> tuple[int, ...]:
        """Vocabulary rows that no token of the tokenizer stands for; () without a tokenizer.

        `targets={"padding": model.padding_rows}` reports the probability that they get.
        """
        return tokenizing.ids_without_token(self.tokenizer, d_vocab=self.d_vocab)

    def without_padding_rows(self) -> "Checkpoint":
        """The same model with no probability on `padding_rows`; itself where there are none.

        Raises UnsupportedArchitectureError where the readout is not direct.
        """
        if not (rows := self.padding_rows):
            return self
        if not isinstance(self.readout, DirectReadout):
            raise UnsupportedArchitectureError(
                f"Rows can be masked in a direct readout, and this one is {self.readout.kind}: "
                f"{self._proved.why_not_direct}. Read it with its padding rows."
            )
        note = f"{len(rows)} vocabulary rows of no token were masked: they get no probability"
        return Checkpoint(
            model=self.model,
            tokenizer=self.tokenizer,
            origin=dataclasses.replace(self.origin, notes=(*self.origin.notes, note)),
            proved=dataclasses.replace(self._proved, readout=self.readout.without(rows)),
            seq2seq=self.seq2seq,
        )

    def to_transformer_lens(self) -> Any:
        """A TransformerBridge on a deep copy, weights unprocessed; errors as in `to_bridge`."""
        from lens.checkpoint.transformer_lens import to_bridge

        return to_bridge(self)

    def require_as_loaded(self) -> None:
        """Raise UnsupportedModelStateError where the readout is no longer the model's own.

        Numbers may change in place (training). A head, norm, hook, adapter or constant that was
        exchanged since loading is noticed, and the readout proved again at one state.
        """
        found = changes.marks(self.model, self.trunk)
        if found == self._marks:
            return
        if not changes.is_still_read(self.replay, self.readout, self._proved.witness):
            raise UnsupportedModelStateError(
                f"{type(self.model).__name__} was changed since it was loaded (its head, norm, "
                "hooks, adapters or config), and the readout that was proved then is no longer "
                "its own. Load it again."
            )
        for name in ("_tie", "n_ids", "lookup_scale", "padding_rows"):
            self.__dict__.pop(name, None)
        self._marks = found

    @property
    def model_hash(self) -> str:
        """A digest of all weights and persistent buffers, taken anew where they have changed.

        What stands outside the blocks is hashed byte by byte, the blocks by a sum of every 4 KiB.
        A write through `.data` is not noticed.
        """
        return self._hashes.of_model()

    @property
    def unembedding_hash(self) -> str:
        """A digest of W_U: what a translator and a known profile are bound to."""
        return self._hashes.of_matrix(self.W_U)

    @in_plain_torch
    def summary(self) -> CheckpointSummary:
        """Everything that `lens inspect` prints, as one record."""
        direct = isinstance(self.readout, DirectReadout)
        return CheckpointSummary(
            model_id=self.origin.model_id,
            revision=self.origin.revision,
            model_class=type(self.model).__name__,
            n_parameters=sum(p.numel() for p in self.model.parameters()),
            n_layers=self.n_layers,
            d_model=self.d_model,
            d_vocab=self.d_vocab,
            n_ctx=self.n_ctx,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            blocks=f"{self.trunk.container} x {self.n_layers}",
            residual_layout=f"state {self.trunk.describe()}",
            target=self.target,
            tie=self.tie.verdict,
            tie_detail=str(self.tie),
            tie_rows=tuple(self.tie.rows()),
            lookup_scale=self.lookup_scale,
            readout=self.readout.kind,
            readout_steps=self.readout.describe()  # type: ignore[attr-defined]
            if direct
            else "the model's own tail",
            proof=self._proved.statement,
            why_not_direct=self._proved.why_not_direct,
            tokenizer=None if self.tokenizer is None else type(self.tokenizer).__name__,
            notes=self.origin.notes,
        )

    def __repr__(self) -> str:
        return (
            f"Checkpoint({self.origin.model_id}: {type(self.model).__name__}, {self.n_layers} "
            f"layers, d_model {self.d_model}, d_vocab {self.d_vocab:,}\n"
            f"  tie: {self.tie}\n"
            f"  readout: {self.readout.kind}, {self._proved.statement})"
        )

    @overload
    def logit_lens(
        self, prompt: str | Sequence[int] | None = None, **options: Any
    ) -> "LayerPredictions": ...
    @overload
    def logit_lens(
        self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Any
    ) -> "list[LayerPredictions]": ...
    @in_plain_torch
    def logit_lens(  # pyright: ignore[reportInconsistentOverload]
        self,
        prompt: Any = None,
        *,
        layers: Sequence[Layer | str] | None = None,
        points: Literal["post", "mid", "all"] = "post",
        positions: Sequence[int] | None = None,
        top_k: int = 5,
        lens: str = "output",
        targets: Mapping[str, Sequence[str | int]] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        source: str | Sequence[int] | None = None,
        truncate: bool = False,
        mask_padding_rows: bool = False,
    ) -> Any:
        """What each layer predicts at each position of a prompt, or of each prompt in a list.

        `prompt` is text, token ids, a list of either or a tokenizer's output (then a list comes
        back); `messages` instead go through the chat template. `layers` (0 the embedding ..
        n_layers the output) and `positions` may count from the end. `points` "mid" reads the
        states between attention and MLP instead, layers 0.5, 1.5, ..., "all" both. `lens` is
        "output" (through W_U) or "input" (through W_E). `targets` names sets of tokens,
        {"right": [" Paris"]}, whose probability each layer reports. `source` feeds the encoder of
        an encoder-decoder; without a prompt the decoder writes its own target, greedily.
        `top_k` candidates are kept for each cell. A prompt above the context is refused, and with
        `truncate` cut at its end. `mask_padding_rows` takes the probability from vocabulary rows of
        no token. All information is in bits.

        Raises PromptError, ContextLengthError, SelectionError, TokenizerError;
        UnsupportedArchitectureError where a mid is asked for and the model has none, and where the
        input lens or the mask needs a direct readout; UnsupportedModelStateError for an adapter on
        the lookup.
        """
        from lens.lenses.logit import logit_lens

        return logit_lens(
            self.without_padding_rows() if mask_padding_rows else self,
            prompt,
            layers=layers,
            points=points,
            positions=positions,
            top_k=top_k,
            lens=lens,
            targets=targets,
            messages=messages,
            source=source,
            truncate=truncate,
        )

    @in_plain_torch
    def residual_states(
        self,
        prompt: str | Sequence[int],
        *,
        layers: Sequence[Layer | str] | None = None,
        points: Literal["post", "mid", "all"] = "post",
        positions: Sequence[int] | None = None,
        source: str | Sequence[int] | None = None,
        truncate: bool = False,
    ) -> ResidualStates:
        """The residual states [layer, pos, d_model] of one prompt, on the device of the last one.

        `layers`, `points` and errors as in `logit_lens`.
        """
        return capturing.residual_states(
            self,
            prompt,
            layers=layers,
            points=points,
            positions=positions,
            source=source,
            truncate=truncate,
        )

    @in_plain_torch
    def block_states(
        self,
        prompt: str | Sequence[int],
        *,
        blocks: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        source: str | Sequence[int] | None = None,
        truncate: bool = False,
    ) -> BlockStates:
        """What passes through blocks (0 .. n_layers - 1): resid_pre, attn_out, resid_mid, mlp_out,
        resid_post.

        Raises UnsupportedArchitectureError where the model has no mid; else as `logit_lens`.

        >>> model.block_states("The").at("blocks.3.hook_attn_out")  # doctest: +SKIP
        """
        return capturing.block_states(
            self, prompt, blocks=blocks, positions=positions, source=source, truncate=truncate
        )

    @in_plain_torch
    def read(
        self,
        vectors: Tensor | ResidualStates,
        *,
        layer: Layer | None = None,
        top_k: int = 10,
        lens: str = "output",
    ) -> "VectorReadings":
        """Put any vectors [..., d_model] through the proved readout, as if each were a last state.

        For SAE decoder rows, MLP output weights, steering vectors, saved states. The final norm
        acts on them, so their length matters only through its epsilon. `layer` picks one layer
        of ResidualStates. Raises ShapeError, SelectionError, ProvenanceError.
        """
        from lens.lenses.readings import read_vectors

        self.require_as_loaded()
        return read_vectors(self, vectors, layer=layer, top_k=top_k, lens=lens)

    def edit(
        self, layer: Layer | str, positions: Sequence[int] | None, fn: residual.Edit
    ) -> AbstractContextManager[None]:
        """Within: `fn(states)` stands in place of layer `layer`'s states in every forward.

        `fn` gets [batch, len(positions), d_model], all positions where None; -1 is each prompt's
        last token, padding apart. Patches, ablates or steers; the lens then reads what follows, and
        layer n_layers is the edited model's output. Your own forwards of the model are edited too;
        with a cache, positions count from the prompt's start and those that it holds already are
        not edited again. Raises SelectionError for a layer that is not
        there or lies within a block; in the forward SelectionError for a position that a prompt has
        not, ShapeError where `fn` returns another shape.

        >>> with model.edit(3, [-1], lambda states: 0 * states):  # doctest: +SKIP
        ...     model.logit_lens("The Eiffel Tower is in")
        """
        (chosen,) = resolve_layers([layer], self.n_layers)
        if is_mid(chosen):
            raise SelectionError(
                f"Layer {chosen} lies within a block; edits act on what a block takes or returns. "
                f"Edit layer {int(chosen)} or {int(chosen) + 1}."
            )
        return residual.edited(
            self.trunk,
            self.model,
            layer=int(chosen),
            positions=positions,
            fn=fn,
            seq2seq=self.seq2seq,
        )

    def ids_of(self, prompt: str | Sequence[int], *, truncate: bool = False) -> list[int]:
        """The checked ids of a prompt; in an encoder-decoder, after the decoder's start token."""
        if self.seq2seq:
            return prompts.decoder_ids(
                self.tokenizer,
                prompt,
                config=self.model.config,
                n_ids=self.n_ids,
                n_ctx=self.n_ctx,
                truncate=truncate,
            )
        return prompts.to_ids(
            self.tokenizer, prompt, d_vocab=self.n_ids, n_ctx=self.n_ctx, truncate=truncate
        )

    def inputs_of(
        self, batch: list[list[int]], *, source: str | Sequence[int] | None = None
    ) -> Inputs:
        """A right-padded batch on the model's device; an encoder-decoder needs one `source`.

        Raises PromptError, SelectionError, ContextLengthError, TokenizerError.
        """
        pad = getattr(self.model.config, "pad_token_id", None)
        usable = isinstance(pad, int) and 0 <= pad < self.n_ids
        inputs = pad_right(batch, pad_id=pad if usable else 0, device=self.device)  # type: ignore[arg-type]
        if not self.seq2seq:
            if source is not None:
                raise prompts.no_encoder(self.model)
            return inputs
        ids = prompts.source_ids(self.tokenizer, source, n_ids=self.n_ids, n_ctx=self.source_n_ctx)
        tensor = torch.tensor([ids], device=self.device).expand(len(batch), -1)
        return dataclasses.replace(inputs, source_ids=tensor)

    @in_plain_torch
    def capture(
        self,
        inputs: Inputs,
        *,
        layers: Sequence[Layer],
        positions: Sequence[int] | None = None,
    ) -> dict[Layer, Float[Tensor, "batch pos d_model"]]:
        """Residual states by layer, of one forward that stops after the last layer asked for.

        Mids (3.5) take a forward of their own. Raises UnsupportedModelStateError where the model
        was changed since it was loaded, and CaptureError.
        """
        self.require_as_loaded()
        try:
            return capturing.capture_layers(self, inputs, layers=layers, positions=positions)
        except MoreRowsError:
            self._read_rows_behind(inputs)
            return capturing.capture_layers(self, inputs, layers=layers, positions=positions)

    def _read_rows_behind(self, inputs: Inputs) -> None:
        """Learn which rows are the prompt's where the model adds some at this length."""
        length = inputs.ids.shape[1]
        full = 0 if inputs.mask is None else int(inputs.mask.all(-1).int().argmax())
        self._proved = proved_with_rows_behind(self._proved, inputs.row(full, length))
        self.trunk, self.replay = self._proved.trunk, self._proved.replay
        if not isinstance(self.readout, DirectReadout):
            self.readout = self._proved.readout

    def _matrix(self, found: Tensor | None, what: str) -> Tensor:
        if found is None:
            raise SelectionError(f"{type(self.model).__name__} holds no {what} matrix.")
        return found
