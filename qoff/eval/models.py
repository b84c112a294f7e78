"""Opening what is to be evaluated, and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from qoff.checkpoint import Checkpoint
from qoff.checkpoint.layout import QuantEntry
from qoff.errors import ArgumentError, FormatError
from qoff.hf.load import exists, is_checkpoint, load_tokenizer
from qoff.kernels.ops import ops_for
from qoff.memory.instrumentation import Instrumentation
from qoff.models.runtime import Runtime
from qoff.models.sources.safetensors import open_source
from qoff.models.spec import DecoderSpec
from qoff.units import parse_size

from .every_token import EveryTokenOps
from .kv_setting import KVSetting
from .subjects import QoffSubject, Subject, TransformersSubject


@contextmanager
def open_runtime(
    checkpoint: Path,
    kv: KVSetting | None = None,
    *,
    device: str = "cpu",
    device_memory: int | str | None = None,
    activation_bits: int = 16,
) -> Iterator[Runtime]:
    """A checkpoint that runs, with the cache of a setting. Errors are those of `Runtime`, and
    ArgumentError for every token packed on another device than the CPU.
    """
    kv = kv or KVSetting()
    options: dict[str, Any] = {"kv": kv.quant}
    round_trip = kv.round_trip
    if round_trip is not None:
        if device != "cpu":
            raise ArgumentError("every token can be packed in an evaluation on the CPU only")
        layers = DecoderSpec.from_config(Checkpoint.open(checkpoint).config).num_layers
        ops = EveryTokenOps(ops_for(torch.device("cpu")), round_trip, layers, kv.before_rope)
        options = {"instrumentation": Instrumentation(ops=ops)}
    runtime = Runtime(
        checkpoint,
        device=device,
        device_memory=None if device_memory is None else parse_size(device_memory),
        activation_bits=activation_bits,
        **options,
    )
    with runtime:
        yield runtime


def subject_of(
    runtime: Runtime, name: str, kv: KVSetting | None = None, piece: int = 64
) -> Subject:
    """What `open_runtime` opened, to be evaluated; `piece` tokens are read at a time.

    With a packed cache, tokens of a piece attend to each other unpacked.
    """
    whole = kv is not None and kv.every_token
    return QoffSubject(runtime, name, None if whole else piece)


def open_float(path: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers with its weights in floats: a directory, GGUF file or hub id.

    Weights that are packed there are dequantized. Raises FormatError where transformers cannot
    load it.
    """
    transformers_logging.disable_progress_bar()
    where, options = str(path), {}
    if exists(path) and Path(path).is_file():
        where, options = str(Path(path).parent), {"gguf_file": Path(path).name}
    try:
        with redirect_stderr(StringIO()):  # a progress bar for GGUF that cannot be turned off
            model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
    except Exception as error:  # transformers raises many kinds
        reason = " ".join(str(error).split())
        raise FormatError(f"{path}: not a model that transformers loads ({reason})") from error
    return model.eval()


@contextmanager
def open_reference_model(path: str | Path, name: str) -> Iterator[Subject]:
    """A reference: a qoff checkpoint as it is, anything else in float32 through transformers."""
    if exists(path) and is_checkpoint(Path(path)):
        with open_runtime(Path(path)) as runtime:
            yield subject_of(runtime, name, piece=256)
        return
    yield TransformersSubject(open_float(path), name)


def tokenizer_of(source: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or a GGUF file. Raises FormatError where there is none."""
    if source.is_dir():
        return load_tokenizer(source)
    with TemporaryDirectory() as folder:
        for name, content in open_source(source).files().items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            Path(folder, name).write_bytes(data)
        return load_tokenizer(Path(folder))


def bits_per_weight(checkpoint: Path) -> float:
    """Bits of the layers' matrices, scales and minima included; embedding and head left out."""
    nbytes = weights = 0
    for file in Checkpoint.open(checkpoint).layers:
        for entry in file.weights.values():
            if isinstance(entry, QuantEntry):
                nbytes += entry.nbytes
                weights += entry.shape[0] * entry.shape[1]
    return 8 * nbytes / weights if weights else 0.0


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that qoff packs with `bits`, by name: all but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module
