"""Read what each layer of a language model predicts, and prove the reading.

import lens

model = lens.load("demo")
model.logit_lens("The Eiffel Tower is located in the city of")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint
    from lens.checkpoint.load import load
    from lens.checkpoint.states import load_states, save_states
    from lens.checkpoint.surgery import interpolate, reset_bias, save_checkpoint, tie, untie
    from lens.checkpoint.tie_cost import TieCost, plan_tie
    from lens.checkpoint.tie_scale import scale_table
    from lens.checkpoint.tying import TieReport
    from lens.corpus import Corpus, Document, read_corpus
    from lens.errors import (
        CaptureError,
        CheckpointNotFoundError,
        ContextLengthError,
        CorpusError,
        CorruptCheckpointError,
        ExportError,
        IncompleteCheckpointError,
        LensError,
        MissingPackageError,
        PromptError,
        ProvenanceError,
        ResultFileError,
        SelectionError,
        ShapeError,
        TokenizerError,
        TrainingDivergedError,
        UnprovedReadoutError,
        UnsupportedArchitectureError,
        UnsupportedModelStateError,
    )
    from lens.lenses.affine import AffineLens, load_affine
    from lens.lenses.predictions import LayerPredictions, Provenance
    from lens.measuring.adam_paths import AdamSettings
    from lens.measuring.attribution import Attribution, attribution
    from lens.measuring.causal_fidelity import CausalFidelity, causal_fidelity
    from lens.measuring.compare import compare
    from lens.measuring.comparison import Comparison
    from lens.measuring.decompose import decompose
    from lens.measuring.decomposition import Decomposition, read_decomposition
    from lens.measuring.frequency import Frequency, frequency
    from lens.measuring.geometry import Geometry, geometry
    from lens.measuring.gradients import GradientPaths, gradients
    from lens.measuring.jacobian import fit_jacobian, load_jacobian
    from lens.measuring.known_profile import KnownProfile, known_profile
    from lens.measuring.meaning import MeaningSimilarity, similarity_of_meaning
    from lens.measuring.measure import measure
    from lens.measuring.neighbourhood_copy import NeighbourhoodCopy, neighbourhood_copy
    from lens.measuring.profile import LensProfile
    from lens.measuring.profile_file import read_profile
    from lens.measuring.readout_arms import ReadoutArms, readout_arms
    from lens.measuring.ridge import fit_ridge
    from lens.measuring.surgery_sweep import SurgerySweep, surgery_sweep
    from lens.measuring.token_energy import TokenEnergy, token_energy
    from lens.measuring.tuning import tune
    from lens.show.export import export
    from lens.show.heatmap import heatmap
    from lens.show.tables import read_predictions
    from lens.study.continuation import Continuation
    from lens.study.continued import continue_twins
    from lens.study.domain import reproduce_domain
    from lens.study.recipe import Recipe
    from lens.study.sweep import reproduce_sweep
    from lens.study.twins import reproduce_study, train_twin
    from lens.trust.report import Report, report

__version__ = "0.1.0"

__all__ = [
    "AdamSettings",
    "AffineLens",
    "Attribution",
    "CaptureError",
    "CausalFidelity",
    "Checkpoint",
    "CheckpointNotFoundError",
    "Comparison",
    "ContextLengthError",
    "Continuation",
    "Corpus",
    "CorpusError",
    "CorruptCheckpointError",
    "Decomposition",
    "Document",
    "ExportError",
    "Frequency",
    "Geometry",
    "GradientPaths",
    "IncompleteCheckpointError",
    "KnownProfile",
    "LayerPredictions",
    "LensError",
    "LensProfile",
    "MeaningSimilarity",
    "MissingPackageError",
    "NeighbourhoodCopy",
    "PromptError",
    "Provenance",
    "ProvenanceError",
    "ReadoutArms",
    "Recipe",
    "Report",
    "ResultFileError",
    "SelectionError",
    "ShapeError",
    "SurgerySweep",
    "TieCost",
    "TieReport",
    "TokenEnergy",
    "TokenizerError",
    "TrainingDivergedError",
    "UnprovedReadoutError",
    "UnsupportedArchitectureError",
    "UnsupportedModelStateError",
    "attribution",
    "causal_fidelity",
    "compare",
    "continue_twins",
    "decompose",
    "export",
    "fit_jacobian",
    "fit_ridge",
    "frequency",
    "geometry",
    "gradients",
    "heatmap",
    "interpolate",
    "known_profile",
    "load",
    "load_affine",
    "load_jacobian",
    "load_states",
    "measure",
    "neighbourhood_copy",
    "plan_tie",
    "read_corpus",
    "read_decomposition",
    "read_predictions",
    "read_profile",
    "readout_arms",
    "report",
    "reproduce_domain",
    "reproduce_study",
    "reproduce_sweep",
    "reset_bias",
    "save_checkpoint",
    "save_states",
    "scale_table",
    "similarity_of_meaning",
    "surgery_sweep",
    "tie",
    "token_energy",
    "train_twin",
    "tune",
    "untie",
]

_HOMES = {
    "AdamSettings": "lens.measuring.adam_paths",
    "AffineLens": "lens.lenses.affine",
    "Attribution": "lens.measuring.attribution",
    "CausalFidelity": "lens.measuring.causal_fidelity",
    "Checkpoint": "lens.checkpoint.checkpoint",
    "Comparison": "lens.measuring.comparison",
    "Continuation": "lens.study.continuation",
    "Corpus": "lens.corpus",
    "Decomposition": "lens.measuring.decomposition",
    "Document": "lens.corpus",
    "Frequency": "lens.measuring.frequency",
    "Geometry": "lens.measuring.geometry",
    "GradientPaths": "lens.measuring.gradients",
    "KnownProfile": "lens.measuring.known_profile",
    "LayerPredictions": "lens.lenses.predictions",
    "LensProfile": "lens.measuring.profile",
    "MeaningSimilarity": "lens.measuring.meaning",
    "NeighbourhoodCopy": "lens.measuring.neighbourhood_copy",
    "Provenance": "lens.lenses.predictions",
    "Report": "lens.trust.report",
    "Recipe": "lens.study.recipe",
    "ReadoutArms": "lens.measuring.readout_arms",
    "SurgerySweep": "lens.measuring.surgery_sweep",
    "TieCost": "lens.checkpoint.tie_cost",
    "TieReport": "lens.checkpoint.tying",
    "TokenEnergy": "lens.measuring.token_energy",
    "attribution": "lens.measuring.attribution",
    "causal_fidelity": "lens.measuring.causal_fidelity",
    "compare": "lens.measuring.compare",
    "continue_twins": "lens.study.continued",
    "decompose": "lens.measuring.decompose",
    "export": "lens.show.export",
    "fit_jacobian": "lens.measuring.jacobian",
    "fit_ridge": "lens.measuring.ridge",
    "frequency": "lens.measuring.frequency",
    "geometry": "lens.measuring.geometry",
    "gradients": "lens.measuring.gradients",
    "heatmap": "lens.show.heatmap",
    "interpolate": "lens.checkpoint.surgery",
    "known_profile": "lens.measuring.known_profile",
    "load": "lens.checkpoint.load",
    "load_affine": "lens.lenses.affine",
    "load_jacobian": "lens.measuring.jacobian",
    "load_states": "lens.checkpoint.states",
    "measure": "lens.measuring.measure",
    "neighbourhood_copy": "lens.measuring.neighbourhood_copy",
    "plan_tie": "lens.checkpoint.tie_cost",
    "read_corpus": "lens.corpus",
    "read_decomposition": "lens.measuring.decomposition",
    "read_predictions": "lens.show.tables",
    "read_profile": "lens.measuring.profile_file",
    "report": "lens.trust.report",
    "reproduce_domain": "lens.study.domain",
    "reproduce_study": "lens.study.twins",
    "reproduce_sweep": "lens.study.sweep",
    "readout_arms": "lens.measuring.readout_arms",
    "reset_bias": "lens.checkpoint.surgery",
    "save_checkpoint": "lens.checkpoint.surgery",
    "save_states": "lens.checkpoint.states",
    "scale_table": "lens.checkpoint.tie_scale",
    "similarity_of_meaning": "lens.measuring.meaning",
    "surgery_sweep": "lens.measuring.surgery_sweep",
    "tie": "lens.checkpoint.surgery",
    "train_twin": "lens.study.twins",
    "token_energy": "lens.measuring.token_energy",
    "tune": "lens.measuring.tuning",
    "untie": "lens.checkpoint.surgery",
}
"""Where a public name lives; every other one is an error class, in `lens.errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lens' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "lens.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__"])
