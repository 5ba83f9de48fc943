"""Measures real models on the sample corpus and writes docs/results.md; a stopped run continues.

    python docs/results.py NAME=SOURCE[,CORPUS] ... [--documents 214] [--second-pass 1024]

Each NAME is measured on CORPUS (the sample where left out), a fifth of whose documents is kept
back for the context-free guess. Finished documents are kept in results-run/.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path

import lens
from lens.measuring.measure import Progress

PAGE = Path(__file__).with_name("results.md")
OPENING = """# Results

Written by `docs/results.py`. KL is KL(final || lens), in bits a token; intervals are 95 % over
documents, 10,000 resamples with seed 0. Layer 0 and position 0 are in no headline.
"""


def measured(name: str, source: str, corpus: str, options: argparse.Namespace) -> lens.LensProfile:
    fit, held_out = lens.read_corpus(corpus).split()
    return lens.measure(
        lens.load(source),
        held_out.take(options.documents),
        fit_on=fit,
        window_tokens=options.window_tokens,
        sample_positions=options.second_pass,
        folder=options.folder / name,
        progress=lambda p: told(name, p),
    )


def told(name: str, p: Progress) -> None:
    minutes = p.seconds_left / 60
    print(f"{name}: {p.done:,} of {p.total:,}, {p.rate:,.0f}/s, {minutes:.0f} min left", flush=True)


def section(name: str, profile: lens.LensProfile) -> str:
    source, area = profile.provenance, profile.skill_area_interval()
    versions = ", ".join(f"{k} {v.split('+')[0]}" for k, v in source.reading.versions.items())
    table = profile.to_frame()
    rows = [
        "| layer | KL | 95 % | median | skill | X | top-1 agrees | self-copy | ECE |",
        "|--:" * 9 + "|",
    ]
    for r in table.itertuples():
        rows.append(
            f"| {r.layer} | {r.mean_kl_bits:.3f} "
            f"| {r.kl_bits_low_95:.3f} to {r.kl_bits_high_95:.3f} "
            f"| {r.median_kl_bits:.3f} | {r.skill:+.3f} | {r.usefulness_bits:+.3f} "
            f"| {r.mean_agreement:.3f} | {r.mean_self_copy_mass:.3f} | {r.ece:.3f} |"
        )
    return "\n".join(
        [
            f"## {name}",
            "",
            f"{source.reading.model_class}, {source.reading.tie}; "
            f"{profile.n_positions:,} positions of {len(profile.documents)} documents "
            f"({len(set(profile.sources))} sources) of "
            f"{source.corpus_name} ({source.corpus_hash[:12]}), windows of {source.window_tokens}. "
            f"Weights {source.reading.model_hash[:12]}; {versions}; {datetime.now(UTC):%Y-%m-%d}.",
            "",
            f"Skill area {area.estimate[0]:.3f} [{area.low[0]:.3f}, {area.high[0]:.3f}]; mean "
            f"prediction depth {profile.mean_depth():.2f} of the layers.",
            "",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=SOURCE[,CORPUS]")
    parser.add_argument("--documents", type=int, default=214)
    parser.add_argument("--second-pass", type=int, default=0)
    parser.add_argument("--window-tokens", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=Path("results-run"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    sections = []
    for model in options.models:
        name, _, rest = model.partition("=")
        source, _, corpus = rest.partition(",")
        sections.append(section(name, measured(name, source, corpus or "sample", options)))
    options.page.write_text("\n".join([OPENING, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
