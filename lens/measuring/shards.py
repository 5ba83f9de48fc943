"""The folder of a run that can resume: finished documents, each file whole or not there."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from lens.errors import ProvenanceError, ResultFileError
from lens.files import written_whole
from lens.measuring.baseline import Baseline
from lens.measuring.kept_folder import make_folder, read_claim
from lens.measuring.profile import LensProfile, ProfileProvenance, require_same
from lens.measuring.profile_file import read_profile, write_profile


class Shards:
    """Profiles of a few documents each, in one folder; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, source: ProfileProvenance):
        self.folder, self.source = folder, source
        if folder is not None:
            make_folder(folder)
            self._claim(folder / "measurement.json")

    def load(self, wanted: Iterable[int]) -> list[LensProfile]:
        """What is finished of the wanted documents, each of them once.

        A file that holds another document beside a wanted one is left out: its histograms cannot
        be told apart by document. Raises ProvenanceError where a file is of another measurement.
        """
        if self.folder is None:
            return []
        found = [read_profile(path) for path in sorted(self.folder.glob("documents-*.parquet"))]
        for profile in found:
            require_same(self.source, profile.provenance)
        missing, chosen = set(wanted), []
        # Parts of several runs may overlap: the larger first, and none that repeats a document.
        for profile in sorted(found, key=lambda p: -len(p.documents)):
            held = {int(d) for d in profile.documents}
            if held <= missing:
                chosen.append(profile)
                missing -= held
        return chosen

    def save(self, profile: LensProfile) -> None:
        """Keep finished documents; the file appears whole, under a name of just these documents."""
        if self.folder is not None:
            held = hashlib.blake2b(profile.documents.tobytes(), digest_size=4).hexdigest()
            name = f"documents-{int(profile.documents[0]):08}-{held}.parquet"
            write_profile(profile, self.folder / name)

    def load_baseline(self) -> Baseline | None:
        """The context-free guess of this measurement, where it is fitted already.

        Raises ResultFileError for a damaged file.
        """
        if self.folder is None or not (self.folder / "baseline.npz").is_file():
            return None
        path = self.folder / "baseline.npz"
        try:
            with np.load(path) as held:
                return Baseline(
                    logprob_bits=held["logprob_bits"],
                    hash=self.source.baseline_hash,
                    name=self.source.baseline_name,
                    n_positions=int(held["n_positions"]),
                )
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise ResultFileError(
                f"{path} cannot be read ({type(error).__name__}: {error}). Remove it, and the "
                "guess is fitted again."
            ) from error

    def save_baseline(self, baseline: Baseline) -> None:
        """Keep it, so that a resumed run measures against the very same numbers."""
        if self.folder is None:
            return
        with written_whole(self.folder / "baseline.npz") as partial, partial.open("wb") as file:
            np.savez(file, logprob_bits=baseline.logprob_bits, n_positions=baseline.n_positions)

    def _claim(self, path: Path) -> None:
        """The first run writes what it measures; a later one must measure the same."""
        mine = asdict(self.source)
        if not path.is_file():
            with written_whole(path) as partial:
                partial.write_text(json.dumps(mine, indent=1, default=dict), encoding="utf-8")
            return
        held = read_claim(path)
        again = json.loads(json.dumps(mine, default=dict))
        differing = [k for k in again if again[k] != held.get(k)]
        if differing == ["reading"] and isinstance(held.get("reading"), dict):
            differing = [k for k, v in again["reading"].items() if v != held["reading"].get(k)]
        if differing:
            raise ProvenanceError(
                f"{path.parent} holds another measurement: it differs in {', '.join(differing)}. "
                "Continue it with the same model, lens, corpus and options, or name a new folder."
            )
