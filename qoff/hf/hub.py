"""Models on the Hugging Face hub: their files, and which names are not of the hub."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from qoff.errors import QoffError
from qoff.models.families import converted
from qoff.models.modules.configs import check_config, is_native
from qoff.models.spec import DecoderSpec
from qoff.quant import read_scheme, stated
from qoff.schema import read_object

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# The same weights once more, in other formats, and all folders but 1_Pooling.
_NOT_FILES = ["consolidated*", "[!1]*/*", "1[!_]*/*", "1_[!P]*/*"]


def download_config(hub_id: str, revision: str | None, trust_remote_code: bool = False) -> Path:
    """Return the path of a model's config.json, downloaded if it is not in the hub's cache.

    Raises UnsupportedModelError for a model that could not be converted, before its weights are
    downloaded, and QoffError like `download`.
    """
    path = _fetch(hub_id, revision, ["config.json"]) / "config.json"
    config = read_object(path, f"{hub_id} has no readable config.json: is it a language model?")
    if is_native(config):
        DecoderSpec.from_config(converted(config, lambda name: False)[0])
    else:
        check_config(config, trust_remote_code)
    if (quantization := stated(config)) is not None and not is_own(quantization[1]):
        read_scheme(quantization[1], f"{hub_id}: config.json: {quantization[0]}")
    return path


def exists(path: str | PathLike[str]) -> bool:
    """Whether there is such a path; what cannot be one (too long a name, or none) is not there."""
    try:
        return str(path) != "" and Path(path).exists()
    except (OSError, ValueError):
        return False


def is_own(quantization: object) -> bool:
    """Whether a `quantization_config` is that of a qoff checkpoint."""
    return isinstance(quantization, dict) and quantization.get("quant_method") == "qoff"


def download(hub_id: str, revision: str | None, trust_remote_code: bool = False) -> Path:
    """Return the directory of a model's files, downloaded if they are not in the hub's cache.

    Its code is among them only with `trust_remote_code`.

    Raises QoffError saying what to do: no such model, a gated one, no network, no space.
    """
    return _fetch(hub_id, revision, [*_FILES, *(["*.py"] if trust_remote_code else [])])


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    missing = f"{hub_id or repr('')}: no such file or directory, and"
    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_FILES
            )
        )
    except HFValidationError as error:
        raise QoffError(f"{missing} not a hub id") from error
    except GatedRepoError as error:
        reason = "is gated; accept its licence on the hub and set HF_TOKEN"
        raise QoffError(f"{hub_id}: {reason}") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        reason = "the hub has no model of that name and revision; check both"
        raise QoffError(f"{missing} {reason}") from error
    except LocalEntryNotFoundError as error:
        raise QoffError(
            f"{missing} the hub, which may have it, cannot be reached; check the name, the network "
            "and HF_HUB_OFFLINE"
        ) from error
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise QoffError(f"{hub_id}: could not be downloaded ({reason})") from error
