"""What a checkpoint consists of: names of files, and where each weight lies in its file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.quant import QTensor

QUANT_METHOD, FORMAT_VERSION = "qoff", 1
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
OUTER_FILE = "model-outer.safetensors"
MTP_FILE = "model-mtp.safetensors"  # of models that have a layer for multi-token prediction
# Losses by bits of the KV cache, measured and kept later; no part of what a model is.
KV_SENSITIVITY_FILE = "kv-sensitivity.json"
TOKENIZER_FILES = (  # of which a tokenizer has one at least
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
)
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (  # files of a model that are copied
    *("generation_config.json", *TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json"),
    *(CHAT_TEMPLATE, "merges.txt", "emoji.json", "modules.json"),
)
POOLING = "pooling.json"  # what sentence-transformers calls 1_Pooling/config.json
COPIED = "copied"  # what the index calls the names of all files that were
ALIGNMENT = 4096  # bytes; data sections start at a multiple: a page, and a block of any disk
CODES, SCALE_MIN = ".codes", ".scale_min"  # what a quantized weight's name is followed by
WEIGHT_FILE = re.compile(r"model-(?:layer-[0-9]{5,}|outer|mtp)\.safetensors")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def layer_file(layer: int) -> str:
    """Return the name of a layer's file."""
    return f"model-layer-{layer:05d}.safetensors"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # first byte, from the start of the file
    nbytes: int


@dataclass(frozen=True)
class QuantEntry:
    """A quantized weight in a file: its description and its two tensors."""

    name: str
    shape: tuple[int, int]  # (N, K)
    bits: int
    group_size: int
    packing: str
    codes: TensorEntry
    scale_min: TensorEntry

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale_min.nbytes


WeightEntry: TypeAlias = TensorEntry | QuantEntry


def tensors_of(entry: WeightEntry) -> tuple[TensorEntry, ...]:
    """Return the tensors that a weight consists of, in no particular order."""
    return (entry,) if isinstance(entry, TensorEntry) else (entry.codes, entry.scale_min)


@dataclass(frozen=True)
class WeightFile:
    """One file of weights: a decoder layer, or everything outside of the layers."""

    path: Path
    data_start: int  # first byte after the header, a multiple of ALIGNMENT
    nbytes: int  # of the whole file
    sha256: str  # of the whole file, hexadecimal
    weights: dict[str, WeightEntry]  # in file order

    @property
    def quantized(self) -> set[str]:
        """The names of those that are."""
        return {name for name, entry in self.weights.items() if isinstance(entry, QuantEntry)}


def view_weight(entry: WeightEntry, locate: Callable[[TensorEntry], Tensor]) -> QTensor | Tensor:
    """Return a weight as views of bytes that are in memory already; nothing is copied.

    locate: gives the uint8 tensor [nbytes] that holds a tensor's bytes, at a multiple of the size
    of its elements.
    """
    if isinstance(entry, TensorEntry):
        return locate(entry).view(entry.dtype).view(entry.shape)
    codes, scale_min = (
        locate(part).view(part.dtype).view(part.shape) for part in (entry.codes, entry.scale_min)
    )
    return QTensor(codes, scale_min, entry.shape, entry.bits, entry.group_size, entry.packing)
