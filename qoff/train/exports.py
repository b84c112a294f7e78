"""What training has made, as transformers and PEFT save it: written beside and then moved."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from qoff.checkpoint.staging import sync_directory
from qoff.errors import DiskWriteError

_INDEX = "model.safetensors.index.json"
# Names of what a loader finds, with wildcards: of a model, and of an adapter.
MODEL = ("config.json", _INDEX, "model*.safetensors")
_ADAPTER = ("adapter_config.json", "adapter_model*")


@contextmanager
def replacing(folder: Path, older: Sequence[str] = ()) -> Iterator[Path]:
    """Give an empty folder to write into, whose files then take the places of those in `folder`.

    Nothing is replaced before all is written. older: names, with wildcards, of files of an older
    result, which go then; others stay. Raises DiskWriteError.
    """
    beside: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".qoff-", dir=folder))
        yield beside
        files = [path for path in beside.rglob("*") if path.is_file()]
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        changed = {folder}
        for path in sorted(files, key=lambda path: path.suffix == ".json"):  # weights first
            place = folder / path.relative_to(beside)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
            changed |= {one for one in place.parents if one.is_relative_to(folder)}
        written = {path.relative_to(beside) for path in files}
        for path in [path for name in older for path in folder.glob(name)]:
            if path.is_file() and path.relative_to(folder) not in written:
                path.unlink()
        for one in changed:
            sync_directory(one)
    except (OSError, SafetensorError) as error:
        raise DiskWriteError(f"{folder}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer, or a processor, as transformers does. Raises OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:  # which tokenizers raises for what fails on disk
            raise
        raise OSError(str(error)) from error


def save_model(model: Any, parts: Iterable[Mapping[str, Tensor]], count: int, folder: Path) -> None:
    """Save a model of transformers, weights part by part: each is a file, as is in memory alone.

    parts: `count` of them, all weights by their names in the model. Files have the names of
    tensors that the model's checkpoints have. Weights and adapter of an older result, which would
    be read, too, go. Raises DiskWriteError.
    """
    places: dict[str, str] = {}
    total = 0
    with replacing(folder, (*MODEL, *_ADAPTER)) as beside:
        for i, part in enumerate(parts, 1):
            name = f"model-{i:05}-of-{count:05}.safetensors"
            tensors = revert_weight_conversion(model, dict(part))
            whole = {key: x.contiguous() for key, x in tensors.items()}
            save_file(whole, beside / name, metadata={"format": "pt"})
            places |= dict.fromkeys(whole, name)
            total += sum(x.nbytes for x in whole.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (beside / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.save_pretrained(beside)
        if model.can_generate():
            model.generation_config.save_pretrained(beside)
