"""What can go wrong, one class for each thing that a caller can act on.

Every message states what was found, what was expected and the next step.
"""


class LensError(Exception):
    """The root of every error that `lens` raises on purpose."""


class CheckpointNotFoundError(LensError, FileNotFoundError):
    """No checkpoint is at that path or under that name. Act: correct the name."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class CorruptCheckpointError(LensError):
    """Files are there but cannot be read whole, or hold NaN or inf. Act: get them again."""


class IncompleteCheckpointError(LensError):
    """The files lack, or hold beyond what the class reads, a part of the readout.

    The embedding or the unembedding would be random, or a bias would be dropped in silence.
    """


class UnsupportedArchitectureError(LensError):
    """No readout of this model could be proved; the message names the step that is missing."""


class UnprovedReadoutError(UnsupportedArchitectureError):
    """A readout passed by hand does not reproduce the model. Act: correct the readout."""


class UnsupportedModelStateError(LensError):
    """The model is on the meta device, or wrapped so that hooks would not fire. Act: unwrap it."""


class CaptureError(LensError):
    """A residual state that was asked for did not pass by. Never answered with zeros."""


class TokenizerError(LensError):
    """Text was given but no usable tokenizer is there. Act: pass token ids, or a tokenizer."""


class PromptError(LensError, ValueError):
    """The prompt cannot be read: empty, ids out of range, left-padded without position ids."""


class ContextLengthError(PromptError):
    """The text is longer than the model's context. Act: cut it, or ask for truncation."""


class SelectionError(LensError, ValueError):
    """A layer, position, target or option that does not exist was asked for."""


class ShapeError(LensError, ValueError):
    """An array has another shape or dtype than the model needs."""


class CorpusError(LensError, ValueError):
    """There is no corpus there, or it holds no text that can be read. Act: name another."""


class ExportError(LensError):
    """A result cannot be written: unknown extension, unwritable place, no image backend."""


class ResultFileError(LensError):
    """A file does not hold a result of `lens`, or holds one of a newer format."""


class MissingPackageError(LensError, ImportError):
    """An optional package is absent; the message holds the install line."""


class ProvenanceError(LensError):
    """Two things that must come from the same model, lens or corpus do not."""


class TrainingDivergedError(LensError, ArithmeticError):
    """The loss of a run is no number any more. Act: train it with lower rates."""
