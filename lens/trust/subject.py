"""One checkpoint of a report: what was measured of it, and by what plan."""

from dataclasses import dataclass
from pathlib import Path

from lens.corpus import Corpus
from lens.lenses.predictions import LayerPredictions
from lens.measuring.comparison import Side
from lens.measuring.decomposition import Decomposition
from lens.measuring.known_profile import KnownProfile
from lens.measuring.profile import LensProfile

PROMPT_TOKENS = 14
"""Tokens of a document's beginning that are shown as a heatmap."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every checkpoint of a report is measured with; of a prompt `prompt_tokens` are shown.

    On `gap_positions` positions the distance is taken apart, on none where that is 0. A tuned
    translator is fitted in `tune_steps` steps at most.
    """

    held_out: Corpus
    fit_on: Corpus
    prompts: tuple[str | tuple[int, ...], ...]
    prompt_tokens: int | None
    translator: str
    sample_positions: int
    gap_positions: int
    window_tokens: int | None
    seed: int
    folder: Path | None
    repeat: str
    tune_steps: int = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What a report holds of one checkpoint: results and words.

    `known` is the profile of this model that comes with the package, None where none does.
    """

    name: str
    output: LensProfile
    through_input: LensProfile | None
    translated: LensProfile | None
    translator: str
    tie_rows: tuple[tuple[str, str], ...]
    summary_rows: tuple[tuple[str, str], ...]
    predictions: tuple[LayerPredictions, ...]
    decomposition: Decomposition | None = None
    why_not_decomposed: str = "it was not asked for"
    known: KnownProfile | None = None

    @property
    def side(self) -> Side:
        """The same as one side of a comparison."""
        return Side(
            name=self.name,
            output=self.output,
            through_input=self.through_input,
            translated=self.translated,
        )
