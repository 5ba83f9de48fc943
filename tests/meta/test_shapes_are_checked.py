"""In the test run a wrong shape is an error in every module that takes arrays."""

import ast
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "lens"
ARRAY = re.compile(r"^(Float|Int|Bool|Shaped)\[")

NOBODY = None
READOUT = "checkpoint.readout.DirectReadout"
AFFINE = "lenses.affine.AffineLens"
ROWS = "lenses.tiles.DirectRows"
READING = "measuring.reading.Reading"
RESULT = "lenses.predictions.LayerPredictions"
"""Stand for an empty object of the class: enough for the check, which comes before the body."""

ROW = np.zeros(3)
CELLS = np.zeros((2, 3))
IDS = ROW.astype(int)
FLAT = torch.zeros(3)
CUBE = torch.zeros(2, 3, 4)

TABLE: dict[str, tuple[str, str, tuple[Any, ...], tuple[Any, ...]]] = {
    "checkpoint.proof": ("_random_like", "state", (FLAT,), (CUBE,)),
    "checkpoint.readout": (
        "DirectReadout.prepare",
        "states",
        (NOBODY, torch.zeros(())),
        (NOBODY, FLAT),
    ),
    "checkpoint.replay": ("ReplayReadout.logits", "states", (NOBODY, FLAT), (NOBODY, CUBE)),
    "checkpoint.layout": ("Layout.native", "state", (NOBODY, FLAT), (NOBODY, CUBE)),
    "checkpoint.encoder": (
        "SharedMatrixEncoder.forward",
        "input_ids",
        (NOBODY, FLAT.long()),
        (NOBODY, CUBE[0].long()),
    ),
    "checkpoint.mid": ("_differences", "rows", (FLAT,), (CUBE,)),
    "checkpoint.matrices": ("max_abs_difference", "b", (CUBE[0], CUBE[:, 0]), (CUBE[0], CUBE[0])),
    "lenses.affine": (
        "AffineLens.translate",
        "states",
        (AFFINE, 0, torch.zeros(())),
        (AFFINE, 0, FLAT),
    ),
    "lenses.best": ("Best.update", "logits", (NOBODY, 0, FLAT, FLAT), (NOBODY, 0, CUBE[0], FLAT)),
    "lenses.chunks": ("Chunk.chosen", "ids", (NOBODY, FLAT.long()), (NOBODY, CUBE[0].long())),
    "lenses.differentiable": (
        "prepared",
        "states",
        (NOBODY, torch.zeros(())),
        (NOBODY, FLAT),
    ),
    "lenses.divergence": (
        "mean_lens",
        "rows",
        ("checkpoint.readout.Unembedding", CUBE),
        ("checkpoint.readout.Unembedding", CUBE[0]),
    ),
    "lenses.eager": ("_dot", "a", (FLAT, FLAT), (CUBE, CUBE)),
    "lenses.guess": ("_scored_again", "tokens", (ROWS, FLAT.long()), (ROWS, CUBE[0].long())),
    "lenses.projection": ("project", "states", (READOUT, FLAT), (READOUT, CUBE)),
    "lenses.reduction": ("TorchReduction.update", "lens", (NOBODY, 0, FLAT), (NOBODY, 0, CUBE)),
    "lenses.state_divergence": (
        "StateDivergence.kl_bits",
        "moved",
        (NOBODY, FLAT, "lenses.state_divergence.StateRows"),
        (NOBODY, CUBE, "lenses.state_divergence.StateRows"),
    ),
    "lenses.sums": ("Sums.in_bits", "is_final", (NOBODY, ROW > 0), (NOBODY, CELLS > 0)),
    "lenses.tiles": ("DirectRows.chosen", "ids", (NOBODY, FLAT.long()), (NOBODY, CUBE[0].long())),
    "measuring.calibration": ("_equal_mass", "count", (ROW.astype(int),), (CELLS.astype(int),)),
    "measuring.attribution": (
        "_allowed",
        "logits",
        (READOUT, FLAT, {}, "measuring.frozen_norm.LinearLogit", CUBE[0]),
        (READOUT, FLAT, {}, "measuring.frozen_norm.LinearLogit", FLAT),
    ),
    "measuring.causal_basis": (
        "ablated",
        "direction",
        (CUBE, CUBE, torch.zeros(4)),
        (CUBE, torch.zeros(4), torch.zeros(4)),
    ),
    "measuring.causal_fidelity": (
        "weighted_cosine",
        "b",
        (CUBE[0], FLAT, CUBE[0]),
        (CUBE[0], CUBE[0], CUBE[0]),
    ),
    "measuring.collect": ("_reciprocal", "rank", (ROW.astype(int),), (CELLS.astype(int),)),
    "measuring.correction": ("Correction.moved", "states", (NOBODY, FLAT), (NOBODY, CUBE[0])),
    "measuring.decomposition": ("_drops", "kl", (np.zeros(()),), (ROW,)),
    "measuring.depth": ("settled", "reached", (ROW > 0,), (CELLS > 0,)),
    "measuring.histograms": ("kl_bins", "kl_bits", (ROW,), (CELLS,)),
    "linear": ("mean_row", "a", (FLAT,), (CUBE[0],)),
    "measuring.frequency": (
        "_correlations",
        "counts",
        (NOBODY, READOUT, NOBODY, CELLS.astype(int)),
        (NOBODY, READOUT, NOBODY, ROW.astype(int)),
    ),
    "measuring.free_parameters": (
        "FreeParameters.moved",
        "states",
        (NOBODY, FLAT),
        (NOBODY, CUBE[0]),
    ),
    "measuring.gap_fit": ("GapProblem._penalty_bits", "bias", (NOBODY, CUBE), (NOBODY, FLAT)),
    "measuring.frozen_norm": ("_signs", "like", (CUBE,), (FLAT,)),
    "measuring.geometry": ("_cosines", "y", (CUBE[0], FLAT), (CUBE[0], CUBE[0])),
    "measuring.gradients": (
        "batch_gradients",
        "targets",
        (NOBODY, "checkpoint.inputs.Inputs", FLAT.long()),
        (NOBODY, "checkpoint.inputs.Inputs", CUBE[0].long()),
    ),
    "measuring.jacobian": (
        "_lens",
        "jacobian",
        (NOBODY, FLAT),
        (NOBODY, torch.zeros(2, 3, 3)),
    ),
    "measuring.moments": ("moments_of", "b", (CUBE[0], FLAT), (CUBE[0], CUBE[0])),
    "measuring.neighbourhood_copy": (
        "_others",
        "near",
        (FLAT.long(), FLAT.long(), 0),
        (FLAT.long(), torch.zeros(3, 4).long(), 0),
    ),
    "measuring.neighbours": ("overlap", "b", (CUBE[0].long(), FLAT), (CUBE[0].long(),) * 2),
    "measuring.normed_stream": ("normed_steps", "after", (CUBE, FLAT), (CUBE, CUBE)),
    "measuring.ranks": ("ranks", "values", (CELLS,), (ROW,)),
    "measuring.metrics": (
        "kl_bits",
        "lens",
        (CELLS, CELLS[:, :2]),
        (CELLS, CELLS),
    ),
    "measuring.reading": ("Reading.states", "states", (READING, FLAT), (READING, CUBE)),
    "measuring.reduced_vocabulary": (
        "ReducedVocabulary.of",
        "likely",
        (CUBE,),
        (FLAT,),
    ),
    "measuring.sampled_states": (
        "SampledStates.select",
        "rows",
        (NOBODY, CELLS.astype(int)),
        (NOBODY, ROW.astype(int)),
    ),
    "measuring.readout_arms": ("_difference", "ours", (ROW, CELLS, ROW), (CELLS, CELLS, ROW)),
    "measuring.second_pass": ("_in_units", "log_q", (FLAT,), (CUBE[0],)),
    "measuring.skill": (
        "marginal_bias_bits",
        "marginals",
        (ROW.astype(int),),
        (CELLS.astype(int),),
    ),
    "measuring.statistics": ("sign_flip", "differences", (CELLS,), (ROW,)),
    "measuring.ridge": ("_Moments.add", "states", (NOBODY, FLAT), (NOBODY, CUBE)),
    "measuring.token_energy": (
        "energy",
        "states",
        (FLAT, torch.zeros(4, 4), "measuring.frozen_norm.FrozenNorm"),
        (CUBE[0], torch.zeros(4, 4), "measuring.frozen_norm.FrozenNorm"),
    ),
    "show.cells": ("dark_cells", "shade", (ROW,), (CELLS,)),
    "show.finding": ("_of_all", "rows", (RESULT, CELLS.astype(int)), (RESULT, ROW.astype(int))),
    "show.strip": ("_mean", "values", (ROW,), (CELLS,)),
    "trust.evidence": ("of_folds", "without", (ROW, ROW), (ROW, CELLS)),
    "study.held_out": ("_Counts.orders", "ids", (NOBODY, CELLS.astype(int)), (NOBODY, IDS)),
    "study.optimising": ("relative_updates", "before", (FLAT,), (CUBE[0],)),
}
"""Module: a function of it, the parameter, arguments with a wrong shape and with a right one."""


def takers() -> set[str]:
    """The modules that hold a function with an array parameter."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or unchecked(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            notes = [ast.unparse(a.annotation) for a in arguments if a.annotation]
            if any(map(ARRAY.match, notes)):
                found.add(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    return found


def unchecked(node: ast.FunctionDef) -> bool:
    return any("no_type_check" in ast.unparse(mark) for mark in node.decorator_list)


def function_of(module: str) -> Callable[..., Any]:
    value: Any = import_module(f"lens.{module}")
    for name in TABLE[module][0].split("."):
        value = getattr(value, name)
    return value


def filled(argument: Any) -> Any:
    if not isinstance(argument, str):
        return argument
    module, _, name = argument.rpartition(".")
    return object.__new__(getattr(import_module(f"lens.{module}"), name))


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call with these arguments, and None for the required ones that are not among them."""
    parameters = inspect.signature(function).parameters.values()
    given = dict(zip((p.name for p in parameters), map(filled, arguments), strict=False))
    missing = {p.name: None for p in parameters if p.default is p.empty and p.name not in given}
    function(**given, **missing)


def blamed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The parameter that the type check complains of, empty where it finds no fault."""
    try:
        call(function, arguments)
    except jaxtyping.TypeCheckError as error:
        found = re.search(r"parameter '(\w+)'", str(error))
        return found.group(1) if found else str(error)
    except Exception:  # past the check, in the body: these are no real objects
        return ""
    return ""


def test_every_module_that_takes_arrays_stands_in_the_table() -> None:
    assert takers() == set(TABLE)


@pytest.mark.parametrize("module", sorted(TABLE))
def test_a_wrong_shape_is_an_error_and_a_right_one_is_not(module: str) -> None:
    _, parameter, wrong, right = TABLE[module]
    assert blamed(function_of(module), wrong) == parameter
    assert blamed(function_of(module), right) != parameter


def test_without_the_hook_a_wrong_shape_passes() -> None:
    space: dict[str, Any] = {"Float": jaxtyping.Float, "np": np}
    exec('def f(a: Float[np.ndarray, "layer pos"]): return a', space)
    assert blamed(space["f"], (ROW,)) == ""
