"""The folder of a fit that can be stopped: what it fits, how far it is, and the lens at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lens.errors import ProvenanceError, ResultFileError
from lens.files import written_whole
from lens.lenses.affine import CONFIG, AffineLens, load_affine
from lens.measuring.kept_folder import make_folder, read_claim

CLAIM, PROGRESS = "tuning.json", "tuning.pt"


class TuningFolder:
    """One fit's folder; without a folder nothing is kept.

    `claim` names all that the result depends on. Raises ProvenanceError where the folder holds
    another fit, ResultFileError where what it says of itself is damaged, ExportError where the
    folder cannot be made.
    """

    def __init__(self, folder: Path | None, claim: dict[str, Any]):
        self.folder = folder
        if folder is None:
            return
        make_folder(folder)
        path = folder / CLAIM
        mine = json.loads(json.dumps(claim))
        if not path.is_file():
            if (folder / CONFIG).is_file():
                raise ProvenanceError(
                    f"{folder} holds a lens already, and nothing of how it was fitted. Name a new "
                    "folder."
                )
            with written_whole(path) as partial:
                partial.write_text(json.dumps(mine, indent=1), encoding="utf-8")
            return
        held = read_claim(path)
        differing = [key for key in mine if mine[key] != held.get(key)]
        if differing:
            raise ProvenanceError(
                f"{folder} holds another fit: it differs in {', '.join(differing)}. Continue it "
                "with the same model, corpus and options, or name a new folder."
            )

    def finished(self) -> AffineLens | None:
        """The lens, where an earlier run came to its end."""
        if self.folder is None or not (self.folder / CONFIG).is_file():
            return None
        return load_affine(self.folder)

    def load(self) -> dict[str, Any] | None:
        """How far an earlier run came."""
        if self.folder is None or not (self.folder / PROGRESS).is_file():
            return None
        path = self.folder / PROGRESS
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever the unpickler makes of a damaged file
            raise ResultFileError(
                f"{path} cannot be read ({type(error).__name__}: {error}). Remove it to fit anew."
            ) from error
        if not isinstance(found, dict):
            raise ResultFileError(f"{path} holds no state of a fit. Remove it to fit anew.")
        return found

    def resumed(self, resume: Callable[[dict[str, Any]], None], state: Any) -> None:
        """Give the state to the fit. Raises ResultFileError where it is none."""
        try:
            resume(state)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            assert self.folder is not None
            raise ResultFileError(
                f"{self.folder / PROGRESS} holds no state of a fit ({type(error).__name__}: "
                f"{error}). Remove it to fit anew."
            ) from error

    def save(self, state: dict[str, Any]) -> None:
        """Keep how far the fit is; the file appears whole."""
        if self.folder is not None:
            with written_whole(self.folder / PROGRESS) as partial:
                torch.save(state, partial)

    def finish(self, lens: AffineLens) -> None:
        """Write the lens, and drop what only a stopped run needs."""
        if self.folder is not None:
            lens.save(self.folder)
            (self.folder / PROGRESS).unlink(missing_ok=True)
