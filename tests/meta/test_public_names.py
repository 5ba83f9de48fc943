import pkgutil

import pytest

import lens

PUBLIC = {
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
}
"""What users may rely on. A change here is a change of the interface: say so in the changelog."""


def modules() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(lens.__path__)}


def test_the_public_names_are_these() -> None:
    assert set(lens.__all__) == PUBLIC
    assert len(lens.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(lens, name).__doc__
    assert name in dir(lens)


def test_every_error_class_is_public_and_a_lens_error() -> None:
    import lens.errors

    classes = {n for n, c in vars(lens.errors).items() if isinstance(c, type)}
    assert classes <= PUBLIC
    assert all(issubclass(getattr(lens, name), lens.LensError) for name in classes)


def test_no_public_name_is_the_name_of_a_module() -> None:
    assert modules() & PUBLIC == set()


def test_the_check_of_names_sees_the_modules() -> None:
    assert {"errors", "checkpoint", "lenses", "show", "cli"} <= modules()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lens' has no attribute 'lode'"):
        lens.lode  # noqa: B018


def test_the_version_is_the_one_of_the_distribution() -> None:
    from importlib.metadata import version

    assert version("tied-lens") == lens.__version__
