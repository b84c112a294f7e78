"""Opening what is to be evaluated, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.errors import ArgumentError, BudgetError, FormatError, UnsupportedModelError
from qoff.eval.texts import digest
from qoff.hf.budget import Scoring
from qoff.hf.load import exists, is_checkpoint, load_tokenizer, source_stamps
from qoff.hf.load import open_runtime as open_checkpoint
from qoff.kvcache import KVQuant
from qoff.models.convert.unconverted import Unconverted
from qoff.models.runtime import Runtime
from qoff.models.sources import open_source
from qoff.system_memory import free_memory

from .reference import Reference
from .scoring import Sample, Tell, make_reference
from .subjects import LayerwiseSubject, QoffSubject, Subject, TransformersSubject

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


@contextmanager
def opened_original(
    source: Path, sample: Sample, batch: int = 1, memory: int | None = None
) -> Iterator[Subject]:
    """A model to compare with: a qoff checkpoint as it is, anything else in float32.

    transformers computes it where its weights take `memory` bytes at most (None: half of what is
    free); else it is read layer by layer from its files. Raises BudgetError where that takes more,
    too, UnsupportedModelError for what cannot be read so, and the errors of loading it.
    """
    if exists(source) and is_checkpoint(source):
        options: dict[str, Any] = {"batch_size": batch, "device_memory": memory}
        with open_runtime(source, length=sample.longest, **options) as runtime:
            yield QoffSubject(runtime, source.name, PIECE_TOKENS)
        return
    free = free_memory()
    bound = memory if memory is not None else None if free is None else free // 2
    if bound is None or (model := _too_large(source, bound)) is None:
        yield TransformersSubject(open_float(source), source.name)
    else:
        yield LayerwiseSubject(model, source.name)


def _too_large(source: Path, bound: int) -> Unconverted | None:
    """The model, if its weights do not fit but come layer by layer; None if they fit, or may."""
    try:
        model = Unconverted.of(open_source(source))
    except (UnsupportedModelError, FormatError):  # runs through transformers' modules alone
        return None
    total, least = LayerwiseSubject.nbytes(model)
    if total <= bound:
        return None
    if least > bound:
        raise BudgetError(
            f"the reference {source} takes {total:,} bytes in float32, layer by layer {least:,}, "
            f"more than {bound:,}; raise --reference-memory, or make a --reference-file on a "
            "larger machine"
        )
    return model


def check_tokenizers(source: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ArgumentError if a model's own tokenizer splits text differently."""
    ours, theirs = (
        t.encode(_PROBE, add_special_tokens=False) for t in (tokenizer, tokenizer_of(source))
    )
    if ours != theirs:
        raise ArgumentError(
            f"the reference {source} has another tokenizer; compare a model with its own original"
        )


def stored_reference(
    source: Path | None,
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    *,
    memory: int | None = None,
    batch: int = 1,
    tell: Tell | None = None,
) -> Reference:
    """The predictions in a file, to which a model adds those of windows that it lacks.

    source, memory: see `opened_original`; source None: the file has to have all of them. tokenizer:
    of what is to be compared. Raises ArgumentError for a file of something else.
    """
    if source is None:
        return Reference(path)
    check_tokenizers(source, tokenizer)
    made_of = digest(source_stamps(source))
    if path.exists() and path.stat().st_size:
        with closing(Reference(path)) as found:
            said = found.says["made_of"], found.text
            complete = said == (made_of, sample.digest) and not found.lacks(len(sample.windows))
        if complete:
            return Reference(path)
    with opened_original(source, sample, batch, memory) as subject:
        return make_reference(subject, sample, path, made_of=made_of, batch=batch, tell=tell)


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
