"""A result into a file, by extension, whole or not at all."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lens.errors import ExportError
from lens.files import require_writable, written_whole
from lens.lenses.predictions import LayerPredictions
from lens.show.frames import predictions_to_frame
from lens.show.heatmap import heatmap
from lens.show.page import page
from lens.show.pictures import picture
from lens.show.tables import read_predictions, write_csv, write_json, write_parquet

__all__ = ["export", "predictions_to_frame", "read_predictions"]


def export(result: Any, path: str | Path, *, colour: str = "probability") -> Path:
    """Write a result to `path`, in the format that its extension names, and return the path.

    .json, .csv and .parquet read back equal with `lens.read_predictions`; .html is one page that
    needs no network; .png, .svg and .pdf are pictures of the whole heatmap. `colour` says what
    the cells of a page or a picture are coloured by, as in `lens.heatmap`. The file appears
    whole: it is written under another name in the same folder and then renamed, so a failure
    leaves nothing behind and an existing file as it was.

    Raises ExportError for an unknown extension, a result of another kind or a place that cannot
    be written; MissingPackageError where a picture lacks kaleido or a browser.

    Example: `lens.export(model.logit_lens("The Eiffel Tower"), "heatmap.html")`.
    """
    path = Path(path)
    require_exportable(path)
    if not isinstance(result, LayerPredictions):
        raise ExportError(
            f"export writes LayerPredictions, as logit_lens returns them; "
            f"it was given {type(result).__name__}."
        )
    with written_whole(path) as partial:
        WRITERS[path.suffix.lower()](result, partial, colour)
    return path


def require_exportable(path: Path) -> None:
    """Raise ExportError where `export` could not write `path`: extension, folder or permission.

    To be asked before the work whose result is to be written; it leaves nothing behind.
    """
    if path.suffix.lower() not in WRITERS:
        found = f"extension {path.suffix!r}" if path.suffix else "no extension"
        raise ExportError(f"{path} has {found}; export writes {', '.join(WRITERS)}.")
    require_writable(path)


Writer = Callable[[LayerPredictions, Path, str], None]


def _write_html(result: LayerPredictions, path: Path, colour: str) -> None:
    path.write_text(page(result, colour=colour), encoding="utf-8")


def _write_picture(kind: str) -> Writer:
    def write(result: LayerPredictions, path: Path, colour: str) -> None:
        path.write_bytes(picture(heatmap(result, colour=colour, max_width_px=None), kind))

    return write


def _numbers_alone(write: Callable[[LayerPredictions, Path], None]) -> Writer:
    return lambda result, path, colour: write(result, path)


WRITERS: Mapping[str, Writer] = {
    ".html": _write_html,
    ".json": _numbers_alone(write_json),
    ".csv": _numbers_alone(write_csv),
    ".parquet": _numbers_alone(write_parquet),
    ".png": _write_picture("png"),
    ".svg": _write_picture("svg"),
    ".pdf": _write_picture("pdf"),
}
