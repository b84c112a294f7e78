"""Opening what is to be evaluated, and what it is compared with."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.errors import ArgumentError, FormatError
from qoff.eval.texts import digest
from qoff.hf.budget import Scoring
from qoff.hf.load import exists, is_checkpoint, load_tokenizer, source_stamps
from qoff.hf.load import open_runtime as open_checkpoint
from qoff.kvcache import KVQuant
from qoff.models.runtime import Runtime
from qoff.models.sources import open_source
from qoff.settings import cache_directory

from .reference import VERSION, Reference
from .scoring import Progress, Sample, make_reference
from .subjects import QoffSubject, TransformersSubject

PIECE_TOKENS = 64  # of a window, that are read at a time
# Text on which tokenizers differ, if they do.
_PROBE = "The quick brown fox, 1234.56 — naïve café\n\n\tdef f(x): return x  # ünïcödé"


def open_runtime(
    checkpoint: Path, kv: KVQuant | str | None = None, length: int = 1024, **options: Any
) -> Runtime:
    """A checkpoint that runs with a KV cache, by default on the CPU.

    length: tokens of the longest window; a bound of memory has room for these. options, and the
    errors: of `hf.load.open_runtime`; batch_size is the number of windows read together.
    """
    scoring = Scoring(max(1, min(PIECE_TOKENS, length - 1)))
    options = {"device": "cpu", "batch_size": 1, **options}
    return open_checkpoint(checkpoint, kv=kv, context=length, scoring=scoring, **options).runtime


def open_float(path: str | Path) -> Any:
    """A model of transformers with its weights in float32: a directory, GGUF file or hub id.

    Weights that are packed there are dequantized. Raises FormatError where transformers cannot
    load it.
    """
    from transformers import AutoModelForCausalLM  # 140 MB, which a qoff checkpoint does not need

    transformers_logging.disable_progress_bar()
    where, options = str(path), {}
    if exists(path) and Path(path).is_file():
        where, options = str(Path(path).parent), {"gguf_file": Path(path).name}
    try:
        with redirect_stderr(StringIO()):  # a progress bar for GGUF that cannot be turned off
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise FormatError(f"{path}: not a model that transformers loads ({reason})") from error
    return model.eval()


def cached_reference(
    source: Path,
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Reference:
    """The predictions of a text by a model, from `folder` (by default in qoff's cache directory).

    A qoff checkpoint runs as it is, anything else in float32 through transformers. The predictions
    are found by the files of the model and by the text's tokens and windows, and computed if they
    are missing or damaged. tokenizer: of what is to be compared; ArgumentError if the reference's
    own splits text differently. Other errors are those of loading the model.
    """
    ours, theirs = (
        t.encode(_PROBE, add_special_tokens=False) for t in (tokenizer, tokenizer_of(source))
    )
    if ours != theirs:
        raise ArgumentError(
            f"the reference {source} has another tokenizer; compare a model with its own original"
        )
    parent = folder or cache_directory() / "references"
    path = parent / digest(source_stamps(source), sample.digest, VERSION)
    try:
        return Reference(path)
    except FormatError:  # there is none yet, or it is damaged
        pass
    if exists(source) and is_checkpoint(source):
        with open_runtime(source) as runtime:
            subject = QoffSubject(runtime, source.name, 256)
            return make_reference(subject, sample, path, progress)
    return make_reference(
        TransformersSubject(open_float(source), source.name), sample, path, progress
    )


def tokenizer_of(source: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or a GGUF file. Raises FormatError where there is none."""
    if source.is_dir():
        return load_tokenizer(source, trust_remote_code)
    with TemporaryDirectory() as folder:
        for name, content in open_source(source).files().items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            Path(folder, name).write_bytes(data)
        return load_tokenizer(Path(folder))


def bits_per_weight(checkpoint: Path) -> float:
    """Bits of the layers' matrices, scales and minima included; embedding and head left out."""
    layers = Checkpoint.open(checkpoint).layers
    entries = [e for file in layers for e in file.weights.values() if isinstance(e, QuantEntry)]
    weights = sum(entry.shape[0] * entry.shape[1] for entry in entries)
    return 8 * sum(entry.nbytes for entry in entries) / weights if weights else 0.0
