"""The back of a report: the numbers by layer, what words mean, where it comes from."""

from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from lens.measuring.calibration import N_EQUAL_BINS
from lens.measuring.profile import LensProfile
from lens.measuring.statistics import MARGIN, N_RESAMPLES
from lens.trust import markup
from lens.trust.reasons import MOST
from lens.trust.subject import Plan, Subject

_COLUMNS = {
    "layer": ("layer", "{:.0f}"),
    "mean_kl_bits": ("KL", "{:.3f}"),
    "kl_bits_low_95": ("95 % from", "{:.3f}"),
    "kl_bits_high_95": ("to", "{:.3f}"),
    "median_kl_bits": ("median", "{:.3f}"),
    "trimmed_kl_bits": ("trimmed", "{:.3f}"),
    "r": ("R", "{:.3f}"),
    "g": ("G", "{:+.3f}"),
    "skill": ("skill", "{:+.3f}"),
    "usefulness_bits": ("X", "{:+.3f}"),
    "mean_agreement": ("top-1", "{:.3f}"),
    "mean_top_k_overlap": ("top-5", "{:.3f}"),
    "mean_copies": ("copies", "{:.3f}"),
    "mean_entropy_bits": ("entropy", "{:.2f}"),
    "gap_to_final": ("gap", "{:.3f}"),
    "ece": ("ECE", "{:.3f}"),
    "mean_js_bits": ("JS", "{:.3f}"),
    "best_temperature": ("tau*", "{:.2f}"),
    "marginal_bias_bits": ("marginal", "{:.3f}"),
}


def layer_table(subject: Subject) -> str:
    """A row for each layer, bits where nothing else is said."""
    frame = subject.output.to_frame()
    if subject.translated is not None:
        left = subject.translated.mean("kl_bits")
        frame = frame.assign(r=left, g=subject.output.mean("kl_bits") - left)
    kept = {name: how for name, how in _COLUMNS.items() if name in frame.columns}
    rows = [
        [_number(form, float(row[name])) for name, (_, form) in kept.items()]
        for row in frame.to_dict("records")
    ]
    return markup.table([heading for heading, _ in kept.values()], rows, kind="number")


def definitions(convention: str, *, two: bool) -> str:
    """Each word of the page in one line."""
    rows = [
        ("layer", f"{convention}; the last layer's reading is the model's own prediction"),
        ("logit lens", "the model's own final norm and unembedding, applied to a layer's state"),
        ("trusted from layer l on", "the condition holds at l and at every later layer, with 95 % "
         "confidence for all layers at once; layers between refuted and shown are undecided"),
        ("KL(final ‖ lens)", "bits lost by using the lens' distribution in place of the model's; "
         "0 at the output by law"),
        ("skill", "1 - KL(final ‖ lens) / KL(final ‖ guess); the guess is the model's mean "
         "prediction on documents kept back (64 at most), the best that sees no context"),
        ("skill area", "the mean height of the skill over relative depth from layer 1 to the "
         "output, none counted below -1: by trapezoids, so that both ends count half"),
        ("X, usefulness lost", "cross-entropy of the lens with the text less the model's own, bits "
         "a token"),
        ("R, not there yet", "KL left after an affine translator of the layer's states, fitted on "
         "documents kept back"),
        ("G, reading loss", "KL less R: what the logit lens itself loses, as against the layer"),
        ("gap in confidence", f"mean |q(top) - p(top)|, top being the lens' top token, over "
         f"{N_EQUAL_BINS} bins of equal mass"),
        ("ECE", "the same against how often the lens' top token is the one that comes next"),
        ("copy term", "the part of KL that is only about how likely the token that stands there "
         "is; with the rest it adds up to KL exactly"),
        ("marginal bias", "KL(mean p ‖ mean q): at least so much would go with one bias over the "
         "vocabulary"),
        ("temperature share", "what the best of 16 fixed temperatures takes from the layer's KL"),
        ("a reason is given", f"where its share is above {MOST:.0%} with 95 % confidence for all "
         "layers at once"),
        ("prediction depth", "the first layer from which the reading stays as it is at the output"),
        ("interval", f"whole documents drawn again {N_RESAMPLES:,} times; folds of documents for "
         "what is no sum. It is about this checkpoint on such texts"),
    ]  # fmt: skip
    if two:
        rows += [
            ("difference", "the second less the first, on the same documents and the same draws"),
            ("equivalent", f"the 90 % interval of the difference in skill area lies inside "
             f"±{MARGIN} (two one-sided tests); undecided is neither that nor a shown difference"),
        ]  # fmt: skip
    return markup.facts(rows)


def provenance(subject: Subject, plan: Plan) -> str:
    """Everything that the numbers of one checkpoint come from."""
    source = subject.output.provenance
    reading = asdict(source.reading)
    versions = ", ".join(f"{name} {number}" for name, number in reading.pop("versions").items())
    notes = reading.pop("notes")
    rows = [(name.replace("_", " "), str(v)) for name, v in reading.items() if v is not None]
    rows += [
        ("documents", _documents(subject.output)),
        ("corpus hash", f"{source.corpus_hash}, fitted on {plan.fit_on.hash}"),
        ("window", f"{source.window_tokens} tokens, none crosses a document"),
        ("tokenizer hash", source.tokenizer_hash or "no tokenizer"),
        ("context-free guess", f"{source.baseline_name} ({source.baseline_hash})"),
        ("read a second time", f"{source.sample_positions:,} positions, seed {source.seed}"),
        ("translator", subject.translator),
        ("versions", versions),
        ("made", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
    rows += [(f"note {number}", text) for number, text in enumerate(notes, 1)]
    return markup.facts([*subject.summary_rows[:3], *rows])


def _documents(profile: LensProfile) -> str:
    source = profile.provenance
    return (
        f"{len(profile.documents)} of {source.corpus_name}, {len(set(profile.sources))} sources, "
        f"{profile.n_positions:,} positions"
    )


def _number(form: str, value: float) -> str:
    return form.format(value) if np.isfinite(value) else "–"
