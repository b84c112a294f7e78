"""A GGUF file as a source: `config.json` and tokenizer from its metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.families.family import TensorNames
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.spec import DecoderSpec
from qoff.models.stored import check_counts
from qoff.quant import GGUFFile, QTensor, TensorInfo
from qoff.quant.gguf import DENSE, QUANTIZED, TO_FLOATS
from qoff.quant.gguf_blocks import BLOCK_TYPES, GROUP_SIZE
from qoff.quant.rows import with_columns

from .gguf_architectures import find
from .gguf_latent import is_part, joined
from .gguf_linear import TiledHeads
from .gguf_metadata import Metadata
from .gguf_rope import TENSORS as ROPE_TENSORS
from .gguf_tokenizer import companions

_BITS_FROM_FLOATS = 8  # of types whose codes no QTensor holds
_AS_CONFIGURED = ("MXFP4",)  # like floats, and like the same type in safetensors
_ONE_EXPERT = re.compile(r"(blk\.\d+\.)ffn_(gate|up|down)\.(\d+)(\.\w+)")


class GGUFSource:
    """A GGUF file of one of `ARCHITECTURES`. Raises FormatError if it is damaged."""

    def __init__(self, file: GGUFFile, metadata: Metadata) -> None:
        self.path = file.path
        self._file, self._metadata = file, metadata
        self._architecture = find(metadata)
        self._metadata.check()
        made = self._architecture.tensors
        self._made = {} if made is None else made(metadata)
        self._joined = joined(file, file.tensors)
        self._stored = {
            _own_name(name): name
            for name in self._file.tensors
            if not (self._joined and is_part(name))
        }

    @cached_property
    def tensor_names(self) -> TensorNames:
        return self._architecture.names(self._metadata)

    @cached_property
    def _tiled(self) -> TiledHeads | None:
        return TiledHeads(self._metadata) if self._architecture.linear == "all" else None

    def config(self) -> dict[str, Any]:
        config = self._architecture.config(self._metadata)
        self._check_all_known(config)
        return config

    def info(self, name: str) -> TensorInfo | None:
        if (both := self._joined.get(name)) is not None:
            floats = both.kinds <= {*DENSE, *_AS_CONFIGURED}
            form = None if floats else (_BITS_FROM_FLOATS, GROUP_SIZE)
            return TensorInfo(both.shape, form, anew=not floats)
        if name in self._made:
            return TensorInfo(tuple(self._made[name].shape), None)
        if name not in self._stored:
            return None
        stored = self._stored[name]
        kind, shape = self._file.tensor_type(stored), self._file.shape(stored)
        if ".ffn_gate_inp_shexp." in name and len(shape) == 1:  # a matrix of one row
            shape = (1, *shape)
        if len(shape) == 4:  # of KDA, as it was converted; llama-quantize leaves out the first ones
            shape = shape[next((i for i, size in enumerate(shape[:2]) if size > 1), 2) :]
        if kind in (*DENSE, *_AS_CONFIGURED):
            return TensorInfo(shape, None)
        if kind in TO_FLOATS:
            return TensorInfo(shape, (_BITS_FROM_FLOATS, GROUP_SIZE), anew=True)
        if kind in BLOCK_TYPES:
            return TensorInfo(shape, (BLOCK_TYPES[kind][0], GROUP_SIZE))
        raise FormatError(
            f"{self.path}: tensor {name} has type {kind}; supported are "
            f"{', '.join((*QUANTIZED, *DENSE))}. Use a file of one of these types"
        )

    def chunks(self, name: str, rows: int) -> Iterator[Tensor | QTensor]:
        if (both := self._joined.get(name)) is not None:
            yield from both.chunks()
            return
        if name in self._made:
            yield self._made[name]
            return
        info, stored = self.info(name), self._stored[name]
        assert info is not None
        if len(self._file.shape(stored)) != len(info.shape):
            found = self._file.load(stored)
            assert isinstance(found, Tensor)
            yield found.reshape(info.shape)
            return
        heads = self._tiled
        order = None if heads is None else heads.rows(name)
        columns = None if heads is None else heads.columns(name)
        for numbers in (torch.arange(info.shape[0]) if order is None else order).split(rows):
            found = self._file.load(stored, numbers)
            yield found if columns is None else with_columns(found, columns, name)

    def item(self, name: str, index: int) -> Tensor | QTensor:
        return self._file.item(self._stored[name], index)

    def files(self) -> Mapping[str, bytes | Path]:
        return companions(self._metadata)

    def _check_all_known(self, config: Mapping[str, Any]) -> None:
        """Raise UnsupportedModelError for a tensor that nothing here would read."""
        spec, names = DecoderSpec.from_config(config), self.tensor_names
        check_counts(spec, names, self._shape_of, self.path)
        # Layers that attend to others' keys and values may have some of their own, for nothing.
        whole = replace(spec, shared_kv=0)
        units = [layer_weights(whole, i, names) for i in range(spec.num_layers)]
        units.append(outer_weights(spec, names))
        read = {part.source for unit in units for weight in unit for part in weight.parts}
        beyond = tuple(names.layer.format(i) for i in range(spec.num_layers, self._metadata.blocks))
        for name in self._stored:
            if name not in read and name not in ROPE_TENSORS and not name.startswith(beyond):
                raise UnsupportedModelError(
                    f"{self.path}: tensor {self._stored[name]} is not one that a model of "
                    f"architecture {self._metadata.architecture} has here; convert the model's "
                    "safetensors checkpoint instead"
                )

    def _shape_of(self, name: str) -> tuple[int, ...] | None:
        info = self.info(name)
        return None if info is None else info.shape


def _own_name(name: str) -> str:
    """What the tensor of a file is called here, where that cannot be its own name."""
    if name.endswith(".attn_sinks.weight"):
        return name.removesuffix("weight") + "sinks"
    if name.endswith(".ffn_norm"):  # of Falcon H1
        return f"{name}.weight"
    return _ONE_EXPERT.sub(r"\1experts.\3.\2_proj\4", name)
