"""Opening what is to be evaluated, and what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.errors import (
    ArgumentError,
    BudgetError,
    DiskReadError,
    FormatError,
    UnsupportedModelError,
)
from qoff.eval.texts import digest
from qoff.hf.budget import Scoring
from qoff.hf.checkpoints import is_checkpoint
from qoff.hf.hub import exists
from qoff.hf.load import open_runtime as open_checkpoint
from qoff.hf.tokenizer import load_tokenizer
from qoff.kvcache import KVQuant
from qoff.models.convert.unconverted import Unconverted
from qoff.models.runtime import Runtime
from qoff.models.sources import QuantizedSource, SafetensorsSource, open_source
from qoff.quant import GGUFFile
from qoff.quant.gguf_split import parts
from qoff.system_memory import free_memory

from .reference import Reference
from .scoring import Sample, Tell, make_reference, other_tokens, reference_records
from .subjects import LayerwiseSubject, QoffSubject, Subject, TransformersSubject

PIECE_TOKENS = 64  # of a window, that are read at a time
_WEIGHTS = (".safetensors", ".gguf", ".bin")  # of which files the names end so
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

    transformers computes it where its weights are floats and take `memory` bytes at most (None:
    half of what is free); else it is read layer by layer from its files. Raises BudgetError where
    that takes more, too, UnsupportedModelError for what cannot be read so, and the errors of
    loading it.
    """
    if exists(source) and is_checkpoint(source):
        options: dict[str, Any] = {"batch_size": batch, "device_memory": memory}
        with open_runtime(source, length=sample.longest, **options) as runtime:
            yield QoffSubject(runtime, source.name, PIECE_TOKENS)
        return
    free = free_memory()
    bound = memory if memory is not None else None if free is None else free // 2
    if (model := _by_layers(source, math.inf if bound is None else bound)) is None:
        yield TransformersSubject(open_float(source), source.name)
    else:
        model.spec.check_positions(sample.longest - 1)  # the last token is only predicted
        yield LayerwiseSubject(model, source.name)


def _by_layers(source: Path, bound: float) -> Unconverted | None:
    """The model, if it has to come layer by layer; None if it may come as a whole.

    Packed weights are read by qoff: transformers needs other packages for most of them.
    """
    try:
        model = Unconverted.of(open_source(source))
    except (UnsupportedModelError, FormatError) as error:  # runs through transformers' modules
        total, layers = _float_bytes(source), f"cannot be read layer by layer ({error})"
        least = total
    else:
        total, least = LayerwiseSubject.nbytes(model)
        layers = f"layer by layer {least:,}"
        if least <= bound:
            return model if total > bound or isinstance(model.source, QuantizedSource) else None
    if least <= bound:
        return None
    raise BudgetError(
        f"the reference {source} takes {total:,} bytes in float32, more than {bound:,}, and "
        f"{layers}; raise --reference-memory, or make a --reference-file on a larger machine"
    )


def _float_bytes(source: Path) -> int:
    """Bytes of a model's tensors in float32, by their headers; without these, of its files."""
    try:
        if source.is_dir():
            tensors = SafetensorsSource(source)
            kinds = map(tensors.kind, tensors.names())
            return sum(4 * math.prod(kind[1]) for kind in kinds if kind is not None)
        file = GGUFFile(source)
        return sum(4 * math.prod(file.shape(name)) for name in file.tensors)
    except FormatError:
        return sum(size for name, size, _ in model_stamps(source) if name.endswith(_WEIGHTS))


def model_stamps(source: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file that says what a model predicts, wherever it lies."""
    files: Iterable[Path]
    if source.is_dir():
        wanted = (*_WEIGHTS, "config.json", ".index.json", ".py")
        files = sorted(file for file in source.iterdir() if file.name.endswith(wanted))
    else:
        files = parts(source)
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


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
    of what is to be compared. Raises ArgumentError, before a model is loaded, for a file of
    something else, or one that another process writes.
    """
    if source is None:
        return Reference(path)
    check_tokenizers(source, tokenizer)
    made_of = digest(model_stamps(source))
    with ExitStack() as on_error, suppress(FormatError, DiskReadError):  # may be begun anew
        found = on_error.enter_context(closing(Reference(path)))
        _check_stored(found, source.name, made_of, sample)
        if not found.lacks(len(sample.windows)):
            on_error.pop_all()
            return found
    with ExitStack() as on_error:
        records = on_error.enter_context(
            closing(reference_records(path, source.name, sample, made_of))
        )
        with opened_original(source, sample, batch, memory) as subject:
            made = make_reference(subject, sample, records, batch=batch, tell=tell)
        on_error.pop_all()
        return made


def _check_stored(found: Reference, name: str, made_of: str, sample: Sample) -> None:
    """Raise ArgumentError for predictions of another model or text."""
    if found.name != name:
        why = f"is of the model {found.name}, not {name}"
    elif found.says.get("made_of") != made_of:
        why = "the files of the reference model have changed since it was begun"
    elif other := other_tokens(found, sample):
        why = other
    else:
        return
    raise ArgumentError(f"{found.path}: {why}; choose another place, or remove it")


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
