"""The encoder of an encoder-decoder, read through the matrix that it shares with the head."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from lens.checkpoint.matrices import ONE_TENSOR, NamedMatrix, compare, named_matrices
from lens.errors import UnsupportedArchitectureError


class SharedMatrixEncoder(nn.Module):
    """An encoder as a masked language model: its output times the embedding that it shares.

    The modules and the matrix are the model's own. No bias, scale or norm of the decoder acts:
    those were made for the decoder's states.
    """

    def __init__(self, model: Any, matrix: nn.Parameter) -> None:
        super().__init__()
        self.config = model.config
        self.encoder = model.get_encoder()
        self.weight = matrix
        self.train(model.training)

    def get_input_embeddings(self) -> nn.Module:
        """The encoder's lookup."""
        return self.encoder.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """This module: its `weight` is the shared matrix."""
        return self

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> dict[str, Float[Tensor, "batch pos d_vocab"]]:
        """The encoder's output, as the cross-attention gets it, times the shared matrix."""
        out = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        return {"logits": nn.functional.linear(out.last_hidden_state, self.weight)}


def shared_matrix_encoder(model: Any, readout: Any) -> SharedMatrixEncoder:
    """The encoder of `model` over the shared matrix.

    Raises UnsupportedArchitectureError where there is no text encoder or it shares none.
    """
    found = {m.role: m for m in named_matrices(model, readout, seq2seq=True)}
    lookup, head = found.get("encoder embedding"), found.get("unembedding")
    name = type(model).__name__
    if lookup is None or head is None:
        raise UnsupportedArchitectureError(
            f"{name} has no encoder with an embedding of tokens, or no head. Expected a text "
            "encoder-decoder; read its decoder."
        )
    _refuse_unshared(name, lookup, head)
    assert isinstance(lookup.tensor, nn.Parameter)
    return SharedMatrixEncoder(model, lookup.tensor)


def _refuse_unshared(name: str, lookup: NamedMatrix, head: NamedMatrix) -> None:
    pair = compare(lookup, head)
    if pair.verdict not in ONE_TENSOR:
        raise UnsupportedArchitectureError(
            f"The encoder embedding of {name} ({lookup.name}) and its unembedding ({head.name}) "
            f"are two matrices ({pair.verdict}): an encoder state read through either would be in "
            "the wrong basis. Read the decoder, or a model that shares them."
        )
