"""The curves of a report: each states a finding, shows its intervals, and says what is drawn."""

from dataclasses import dataclass

import numpy as np

from lens.measuring.comparison import QUANTITIES, Comparison
from lens.measuring.depth import KINDS
from lens.measuring.profile import LensProfile
from lens.measuring.skill import FLOOR
from lens.measuring.statistics import mean_interval
from lens.show.chart import Line, chart, interval_line, legend
from lens.trust.evidence import copy_share
from lens.trust.intervals import at_least, entries
from lens.trust.subject import Subject
from lens.trust.verdict import UseVerdict

LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A finding, its drawing, the names of its curves, and what they are. All but `finding` and
    `caption` is HTML already."""

    finding: str
    drawing: str
    legend: str
    caption: str


def curves(subject: Subject, found: tuple[UseVerdict, ...]) -> list[Figure]:
    """Every curve of one checkpoint that its profiles hold."""
    profile = subject.output
    drawn = [
        _distance(profile, found),
        _parts(profile, subject.translated),
        _skill(profile, found),
        _agreement(profile, found),
        _usefulness(profile, found),
        _copying(profile),
        _depth(profile),
        _calibration(profile, found),
        _two_lenses(subject),
    ]
    return [figure for figure in drawn if figure is not None]


def differences(comparison: Comparison) -> list[Figure]:
    """Signed differences by relative depth, second less first, with both kinds of band."""
    return [_difference(comparison, name) for name in comparison.differences]


def _distance(profile: LensProfile, found: tuple[UseVerdict, ...]) -> Figure:
    layers, kl = _layers(profile), _decided(found, "distribution").found
    lines = [
        interval_line("mean", layers, kl),
        Line(name="median", x=layers, y=profile.median_kl_bits, hue=1),
        Line(name="95th percentile", x=layers, y=profile.kl_quantile(0.95), hue=3, dots=False),
    ]
    half = profile.n_layers // 2
    last = f", {kl.estimate[-2]:.2f} before the last block" if half < profile.n_layers - 1 else ""
    return Figure(
        finding=f"Distance from the model: {kl.estimate[half]:.2f} bits halfway{last}",
        drawing=_drawn(lines, "KL(final ‖ lens), bits", found, "distribution", spacing="decades"),
        legend=legend(lines),
        caption="KL of the lens from the model's own final prediction, spaced by log(1 + x).",
    )


def _parts(profile: LensProfile, translated: LensProfile | None) -> Figure | None:
    if translated is None:
        return None
    layers = _layers(profile)
    stacked = np.concatenate(
        [profile.sums["kl_bits"] - translated.sums["kl_bits"], translated.sums["kl_bits"]], axis=1
    )
    both = mean_interval(stacked, profile.counts["n"])
    cut = profile.n_layers + 1
    g, r = entries(both, slice(0, cut)), entries(both, slice(cut, None))
    lines = [
        interval_line("G, reading loss", layers, g, hue=0),
        interval_line("R, not there yet", layers, r, hue=1),
    ]
    half = profile.n_layers // 2
    share = 100 * g.estimate[half] / (g.estimate[half] + r.estimate[half])
    return Figure(
        finding=f"Halfway, an affine translator takes away {share:.0f} % of the distance",
        drawing=chart(lines, x_title=LAYER, y_title="bits", spacing="decades", alt="G and R"),
        legend=legend(lines),
        caption="KL = G + R. R is what is left after a translator fitted on other documents, an "
        "upper bound on what no affine map can read; negative G: the translator reads worse.",
    )


def _skill(profile: LensProfile, found: tuple[UseVerdict, ...]) -> Figure:
    skill = at_least(_decided(found, "context").found, FLOOR)
    lines = [interval_line("skill", _layers(profile), skill)]
    area = profile.skill_area_interval()
    return Figure(
        finding=f"Skill area {area.estimate[0]:.2f} [{area.low[0]:.2f}, {area.high[0]:.2f}]",
        drawing=_drawn(lines, "skill", found, "context", y_range=(FLOOR - 0.05, 1.05)),
        legend=legend(lines),
        caption="1: the model's own prediction. 0: the best guess that sees no context. Drawn, "
        "and counted in the area over layers 1 and up, as no less than -1.",
    )


def _agreement(profile: LensProfile, found: tuple[UseVerdict, ...]) -> Figure:
    layers = _layers(profile)
    top, five = _decided(found, "top-1").found, profile.interval("top_k_overlap")
    lines = [
        interval_line("top-1 agreement", layers, top),
        interval_line("share of the top 5", layers, five, hue=1),
    ]
    half = profile.n_layers // 2
    return Figure(
        finding=f"Halfway, {100 * top.estimate[half]:.0f} % of the top tokens are the model's own",
        drawing=_drawn(lines, "share of positions", found, "top-1", y_range=(0.0, 1.02)),
        legend=legend(lines),
        caption="How often the lens' top token is the model's final one, and the share of the "
        "model's top 5 that stand in the lens' top 5.",
    )


def _usefulness(profile: LensProfile, found: tuple[UseVerdict, ...]) -> Figure:
    lost = _decided(found, "text").found
    lines = [interval_line("X", _layers(profile), lost)]
    own = profile.final_sums["nll_bits"].sum() / profile.counts["n_targets"].sum()
    per_byte = profile.bits_per_byte[-1]
    byte = f", {per_byte:.2f} bits a byte" if np.isfinite(per_byte) else ""
    return Figure(
        finding=f"The model itself predicts the text at {own:.2f} bits a token{byte}",
        drawing=_drawn(lines, "X, bits a token", found, "text", spacing="decades"),
        legend=legend(lines),
        caption="Usefulness lost: cross-entropy of the lens with the text, less the model's own.",
    )


def _copying(profile: LensProfile) -> Figure:
    layers = _layers(profile)
    rate, mass = profile.interval("copies"), profile.interval("self_copy_mass")
    lines = [
        interval_line("top-1 is the input", layers, rate),
        interval_line("probability of the input", layers, mass, hue=1),
    ]
    sampled = profile.counts["n_sampled"].sum() > 0
    if sampled:
        lines.append(interval_line("copy term / KL", layers[:-1], copy_share(profile), hue=2))
    layer = int(np.argmax(rate.estimate[1:])) + 1
    return Figure(
        finding=f"After the embedding, copying peaks at layer {layer}: "
        f"{100 * rate.estimate[layer]:.0f} % of positions",
        drawing=chart(
            lines, x_title=LAYER, y_title="share", y_range=(0.0, 1.02), level=0.5, alt="copying"
        ),
        legend=legend(lines),
        caption="How much the lens says the token that stands there already; the exact split of "
        "KL into copying and the rest."
        + (f" The split: {profile.counts['n_sampled'].sum():,} positions." if sampled else ""),
    )


def _depth(profile: LensProfile) -> Figure:
    layers = _layers(profile)
    lines = []
    for hue, kind in enumerate(("top-1", "1 bit", "0.1 bit")):
        settled = profile.depths[:, KINDS.index(kind)].sum(axis=1)[:, :-1].cumsum(axis=1)
        name = "top-1 stays" if kind == "top-1" else f"KL stays ≤ {kind}"
        found = mean_interval(settled.astype(np.float64), profile.counts["n"])
        lines.append(interval_line(name, layers, found, hue=hue))
    half = int(np.argmax(lines[0].y >= 0.5))
    return Figure(
        finding=f"Half of the top tokens are final by layer {half} of {profile.n_layers}",
        drawing=chart(
            lines,
            x_title=LAYER,
            y_title="share settled by this layer",
            y_range=(0.0, 1.02),
            level=0.5,
            alt="prediction depth",
        ),
        legend=legend(lines),
        caption="Prediction depth: the share of positions whose reading has settled for good.",
    )


def _calibration(profile: LensProfile, found: tuple[UseVerdict, ...]) -> Figure:
    gap = _decided(found, "confidence").found
    layers = _layers(profile)
    lines = [
        interval_line("gap to the model's probability", layers, gap),
        Line(name="ECE against the text", x=layers, y=profile.calibration.ece, hue=1),
    ]
    half = profile.n_layers // 2
    return Figure(
        finding=f"Halfway, the lens' confidence is off by {gap.estimate[half]:.2f} on average",
        drawing=_drawn(lines, "probability", found, "confidence", y_range=(0.0, None)),
        legend=legend(lines),
        caption="Mean |probability of the lens' top token - what the model gives it| over 15 bins "
        "of equal mass; ECE: the same against how often it comes next.",
    )


def _two_lenses(subject: Subject) -> Figure | None:
    through = subject.through_input
    if through is None:
        return None
    layers = _layers(subject.output)
    lines = [
        interval_line("output lens, W_U", layers, subject.output.interval("kl_bits")),
        interval_line("input lens, W_E", layers, through.interval("kl_bits"), hue=1),
    ]
    at = subject.side.overtaken_at
    where = "at no layer" if at is None else f"from layer {at} on" if at else "at every layer"
    finding = f"W_U reads better than W_E {where}"
    return Figure(
        finding=finding,
        drawing=chart(
            lines,
            x_title=LAYER,
            y_title="KL(final ‖ lens), bits",
            spacing="decades",
            alt="both lenses",
        ),
        legend=legend(lines),
        caption="The two matrices of an untied model as lenses, against its own final prediction.",
    )


def _difference(comparison: Comparison, name: str) -> Figure:
    found = comparison.differences[name]
    line = Line(
        name=f"d{name}: {comparison.second.name} less {comparison.first.name}",
        x=comparison.depth,
        y=found.estimate,
        low=found.low,
        high=found.high,
        band_low=found.band_low,
        band_high=found.band_high,
    )
    inner = (comparison.depth > 0) & (comparison.depth < 1)
    apart = inner & ((found.band_low > 0) | (found.band_high < 0))
    finding = f"d{name}: 0 is outside the joint band at {apart.sum()} of {inner.sum()} depths"
    return Figure(
        finding=finding,
        drawing=chart(
            [line],
            x_title="relative depth",
            y_title=f"d{name}, {comparison.unit}",
            spacing="decades",
            whole_x=False,
            alt=f"d{name}",
        ),
        legend=legend([line]),
        caption=f"{QUANTITIES[name][0].upper()}{QUANTITIES[name][1:]}. Above 0: the second is "
        "worse. Shaded: 95 % at each depth; dotted: 95 % at all depths at once.",
    )


def _drawn(
    lines: list[Line], y_title: str, found: tuple[UseVerdict, ...], key: str, **how: object
) -> str:
    """A chart with the threshold of a use, and its trusted layers shaded."""
    verdict = _decided(found, key)
    use = verdict.use
    return chart(
        lines,
        x_title=LAYER,
        y_title=y_title,
        level=use.threshold,
        level_name=use.criterion(),
        from_x=verdict.crossing().proved,
        alt=y_title,
        **how,  # type: ignore[arg-type]
    )


def _decided(found: tuple[UseVerdict, ...], key: str) -> UseVerdict:
    return next(verdict for verdict in found if verdict.use.key == key)


def _layers(profile: LensProfile) -> np.ndarray:
    return np.arange(profile.n_layers + 1, dtype=np.float64)
