"""A repository of the model hub, brought to the user's own hub cache."""

from collections.abc import Sequence
from pathlib import Path

from lens.errors import CheckpointNotFoundError

_DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_CODE = ("*.py",)
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model-*-of-*.bin")
_SUBFOLDERS = ("*/*",)


def fetch(repository: str, *, revision: str | None, with_code: bool) -> Path:
    """The folder of one revision in the hub cache; its name is the commit.

    Only what is read is downloaded: config, tokenizer and safetensors, pickles where there are no
    safetensors. Without a connection the cached files serve. Raises CheckpointNotFoundError.
    """
    described = _DESCRIPTION + (_CODE if with_code else ())
    folder = _download(repository, revision, described)
    # By the commit from here on, so that all files are of one state of the repository.
    for patterns in (_SAFETENSORS, _PICKLES):
        _download(repository, folder.name, patterns, named=revision)
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return folder
    raise CheckpointNotFoundError(
        f"{_named(repository, revision)} has no model.safetensors and no pytorch_model.bin, or the "
        "cache holds it only in part. Go online to get the rest; if the repository holds GGUF "
        f"files, get one (hf download {repository} FILE.gguf) and pass its path."
    )


def _download(
    repository: str, revision: str | None, patterns: Sequence[str], *, named: str | None = None
) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    what = _named(repository, named or revision)
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_SUBFOLDERS),
            )
        )
    except hub.GatedRepoError as error:
        reason = "asks for a licence to be accepted: do so on its page, then run `hf auth login`"
        raise CheckpointNotFoundError(f"{what} {reason}.") from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{what}: the repository has no such branch, tag or commit. Correct revision=."
        ) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise CheckpointNotFoundError(
            f"{what} is neither a path here nor a repository of the model hub (or it is private: "
            "run `hf auth login`). Correct the name."
        ) from error
    except hub.LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(_unreachable(what, repository, error)) from error
    except (hub.HfHubHTTPError, hub.OfflineModeIsEnabled, OSError) as error:
        raise CheckpointNotFoundError(
            f"{what} could not be fetched ({_first_line(error)}). Try again."
        ) from error


def _unreachable(what: str, repository: str, error: Exception) -> str:
    from huggingface_hub import constants

    offline = constants.is_offline_mode()
    because = (
        "HF_HUB_OFFLINE is set"
        if offline
        else f"the model hub cannot be reached ({_first_line(error)})"
    )
    step = "Unset HF_HUB_OFFLINE" if offline else "Go online"
    return (
        f"{what} is not whole in the hub cache ({constants.HF_HUB_CACHE}), and {because}. "
        f"{step}, or pass a folder or a .gguf file."
    )


def _named(repository: str, revision: str | None) -> str:
    return repr(repository) + (f" at revision {revision!r}" if revision else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" :.")
