"""The texts that models are evaluated on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qoff.errors import ArgumentError, QoffError

from .extras import extra

_DATA = Path(__file__).resolve().parent / "data"
DEFAULT_TEXT = _DATA / "state-of-the-union.txt"
CALIBRATION_TEXT = _DATA / "calibration.txt"
_DATASETS = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}


def read_text(path: str | Path | None = None) -> str:
    """A UTF-8 file, without the mark that editors of Windows begin one with; by default qoff's.

    Raises ArgumentError for a file that is not there, empty, or no text in UTF-8.
    """
    where = DEFAULT_TEXT if path is None else Path(path)
    try:
        text = where.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"{where}: cannot be read ({error.strerror}); name a text") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{where}: not a text in UTF-8 ({error}); convert it") from error
    if "\0" in text:
        raise ArgumentError(f"{where}: holds NUL bytes, as no text does; name another file")
    if not text.strip():
        raise ArgumentError(f"{where}: is empty; name a text")
    return text


def dataset_text(name: str) -> str:
    """A dataset's test split, joined by empty lines as is usual; fetched by `datasets`.

    Raises ArgumentError for another name than "wikitext2", QoffError where the package is not
    installed or the dataset cannot be fetched.
    """
    if name not in _DATASETS:
        raise ArgumentError(f"no dataset {name!r} is known; use {', '.join(_DATASETS)}, or --text")
    path, config = _DATASETS[name]
    datasets = extra("datasets")
    try:
        rows = datasets.load_dataset(path, config, split="test")
    except Exception as error:  # whatever hub, network or file system raise
        reason = " ".join(str(error).split())
        raise QoffError(f"dataset {path} cannot be fetched ({reason}); use --text FILE") from error
    return "\n\n".join(rows["text"])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Token ids, int64 [n], without special tokens."""
    ids: Any = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return torch.tensor(ids, dtype=torch.int64)


def first_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the tokenizer puts before a text; None: none."""
    special = tokenizer.encode("", verbose=False)
    bos = tokenizer.bos_token_id
    return bos if bos is not None and special[:1] == [bos] else None


def begun(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Texts [..., n] with what the tokenizer puts before one, if anything, as their first token."""
    first, found = first_token(tokenizer), ids.clone()
    if first is not None:
        found[..., 0] = first
    return found


def digest(*parts: object) -> str:
    """16 hex digits that change with the parts; tensors count by their values."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode()
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:16]
