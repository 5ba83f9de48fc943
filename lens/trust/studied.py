"""Measure one checkpoint for a report; what comes out needs no torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens.checkpoint.readout import DirectReadout
from lens.corpus import Corpus, Document
from lens.errors import ResultFileError
from lens.lenses.affine import CONFIG, AffineLens, load_affine
from lens.lenses.predictions import LayerPredictions
from lens.measuring.decompose import decompose, require_asked
from lens.measuring.decomposition import Decomposition, read_decomposition
from lens.measuring.known_profile import known_profile
from lens.measuring.measure import Progress, measure
from lens.measuring.profile import LensProfile
from lens.measuring.ridge import fit_ridge
from lens.measuring.tuning import tune
from lens.trust.subject import Plan, Subject

if TYPE_CHECKING:
    from lens.checkpoint.checkpoint import Checkpoint

Report = Callable[[str, "Progress | None"], None]

N_PROMPTS = 3
GAP = "gap.json"
"""The distance taken apart, in a model's folder."""


def studied(name: str, model: "Checkpoint", plan: Plan, report: Report) -> Subject:
    """Measure one checkpoint through every lens that it has. Raises as `lens.measure`."""
    folder = None if plan.folder is None else plan.folder / name
    for prompt in plan.prompts:
        # Asked before anything is measured.
        _ids(model, prompt, plan.prompt_tokens)
    _require_same_gap(model, plan, folder)

    def profile(lens: Any, kind: str, *, sampled: int = 0) -> LensProfile:
        return measure(
            model,
            plan.held_out,
            lens=lens,
            fit_on=plan.fit_on,
            window_tokens=plan.window_tokens,
            sample_positions=sampled,
            seed=plan.seed,
            folder=None if folder is None else folder / kind.replace(" ", "-"),
            progress=lambda done: report(f"{name}, {kind}", done),
        )

    # A readout that looks at the whole prompt cannot read a sample of positions again.
    again = 0 if getattr(model.readout, "whole_prompts", False) else plan.sample_positions
    output = profile("output", "output lens", sampled=again)
    fitted = _translator(name, model, plan, folder, report)
    gap, why_no_gap = _decomposition(name, model, plan, folder, report)
    summary = model.summary()
    return Subject(
        name=name,
        output=output,
        through_input=profile("input", "input lens") if _has_two_lenses(model) else None,
        translated=None if fitted is None else profile(fitted, f"{fitted.name} lens"),
        translator=_described(fitted),
        tie_rows=summary.tie_rows,
        summary_rows=tuple(row for row in summary.rows() if row not in summary.tie_rows),
        predictions=tuple(_read(model, p, plan.prompt_tokens) for p in plan.prompts),
        decomposition=gap,
        why_not_decomposed=why_no_gap,
        known=known_profile(model),
    )


def first_prompts(corpus: Corpus) -> tuple[str | tuple[int, ...], ...]:
    """The documents whose beginnings are shown where no prompts are given, spread evenly."""
    chosen = corpus.take(min(N_PROMPTS, len(corpus))).documents
    return tuple(_content(document) for document in chosen)


def _content(document: Document) -> str | tuple[int, ...]:
    return document.text if document.text is not None else (document.ids or ())


def _read(model: "Checkpoint", prompt: str | Sequence[int], most: int | None) -> LayerPredictions:
    found = model.logit_lens(_ids(model, prompt, most))
    if not isinstance(found, LayerPredictions):
        raise TypeError(f"one prompt gave {type(found).__name__}")
    return found


def _ids(model: "Checkpoint", prompt: str | Sequence[int], most: int | None) -> list[int]:
    """The ids of a prompt; beginnings of documents are cut, a prompt that was given is not."""
    given = prompt if isinstance(prompt, str) else list(prompt)
    return model.ids_of(given, truncate=most is not None)[:most]


def _has_two_lenses(model: "Checkpoint") -> bool:
    if not isinstance(model.readout, DirectReadout) or model.tie.is_tied:
        return False
    return model.W_E.shape == model.W_U.shape


def _decomposition(
    name: str, model: "Checkpoint", plan: Plan, folder: Path | None, report: Report
) -> tuple[Decomposition | None, str]:
    """The distance taken apart, or why it is not."""
    if not plan.gap_positions:
        return None, "it was not asked for (gap_positions=, --decompose), because it takes long"
    if not isinstance(model.readout, DirectReadout):
        return None, f"that needs a direct readout, and this one is {model.readout.kind}"
    place = None if folder is None else folder / GAP
    if place is not None and place.is_file():
        return read_decomposition(place), ""
    found = decompose(
        model,
        plan.held_out,
        fit_on=plan.fit_on,
        **_asked(plan),
        progress=lambda rung: report(f"{name}, layer {rung.layer} taken apart: {rung.freed}", None),
    )
    if place is not None:
        found.save(place)
    return found, ""


def _asked(plan: Plan) -> dict[str, Any]:
    """What a decomposition of this plan depends on, beside model and documents."""
    return {
        "positions": plan.gap_positions,
        "fit_positions": plan.gap_positions,
        "window_tokens": plan.window_tokens,
        "seed": plan.seed,
    }


def _require_same_gap(model: "Checkpoint", plan: Plan, folder: Path | None) -> None:
    """Before anything is measured: a distance that is kept there is the one asked for."""
    if folder is not None and plan.gap_positions and (folder / GAP).is_file():
        kept = read_decomposition(folder / GAP)
        require_asked(kept, model, plan.held_out, plan.fit_on, **_asked(plan))


def _translator(
    name: str, model: "Checkpoint", plan: Plan, folder: Path | None, report: Report
) -> AffineLens | None:
    """Fitted on the documents kept back, or as an earlier run in the same folder fitted it."""
    if plan.translator == "none":
        return None
    place = None if folder is None else folder / f"{plan.translator}-translators"
    return _FITS[plan.translator](name, model, plan, place, report)


def _tuned(
    name: str, model: "Checkpoint", plan: Plan, place: Path | None, report: Report
) -> AffineLens:
    """By KL; a fit that was stopped continues in its folder."""
    what = f"{name}, fitting the tuned translators"
    if place is None or not (place / CONFIG).is_file():
        report(what, None)
    return tune(
        model,
        plan.fit_on,
        steps=plan.tune_steps,
        window_tokens=plan.window_tokens,
        seed=plan.seed,
        folder=place,
        progress=lambda now: report(f"{what}: step {now.step:,} of {now.steps:,}", None),
    )


def _ridge(
    name: str, model: "Checkpoint", plan: Plan, place: Path | None, report: Report
) -> AffineLens:
    """By least squares."""
    fitted_on = f"{plan.fit_on.name} {plan.fit_on.hash}"
    if place is not None and (place / CONFIG).is_file():
        found = load_affine(place)
        found.check(model)
        if found.source.fitted_on != fitted_on:
            raise ResultFileError(
                f"{place} holds translators fitted on {found.source.fitted_on}; this report fits "
                f"on {fitted_on}. Name another folder."
            )
        return found
    report(f"{name}, fitting the ridge translators", None)
    fitted = fit_ridge(model, plan.fit_on, window_tokens=plan.window_tokens)
    if place is not None:
        fitted.save(place)
    return fitted


_FITS = {"tuned": _tuned, "ridge": _ridge}


def _described(lens: AffineLens | None) -> str:
    if lens is None:
        return "none was fitted"
    # Without the numbers of each layer, which are the fit's own and not what is measured here.
    told = [(k, v) for k, v in lens.source.options.items() if not isinstance(v, list | None)]
    options = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in told)
    how = "by KL(final ‖ lens)" if lens.name == "tuned" else "by least squares on the last states"
    return f"{lens.name}, affine, fitted {how} on {lens.source.fitted_on} ({options})"
