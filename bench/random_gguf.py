"""The GGUF file of a random Qwen3-MoE checkpoint: the same weights, in Q4_0.

Written layer by layer beside the checkpoint, so that neither is ever in memory. A group of 64
becomes two blocks of Q4_0 with one scale; embedding and head, whose codes have other bits, Q8_0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.models.layer_weights import layer_weights, outer_weights
from qoff.models.names import Weight
from qoff.models.spec import DecoderSpec

_ARCH = gguf.MODEL_ARCH.QWEN3MOE
_ZERO = 8  # the code of Q4_0 whose value is 0
_BLOCK = 32  # elements of a block of Q4_0
_NUMBERS = {  # keys of GGUF by keys of the config
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LAYER = re.compile(r"^model\.layers\.\d+\.")


class RandomGguf:
    """Writes a GGUF file as `write_random_checkpoint` draws the weights: layers, then the rest.

    Matrices of 4 bits get the minima that Q4_0 has, -8 scales, and codes whose mean is 8. With
    another mean each matrix enlarges what all tokens have alike, until all are routed alike.
    """

    packing = "split32"  # whose blocks of 32 codes are those of Q4_0

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._spec = DecoderSpec.from_config(config)
        self._map = gguf.get_tensor_name_map(_ARCH, self._spec.num_layers)
        self._writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[_ARCH])
        for key, name in _NUMBERS.items():
            self._writer.add_uint32(f"qwen3moe.{name}", config[key])
        self._writer.add_uint32("qwen3moe.attention.value_length", config["head_dim"])
        self._writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        self._writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
        self._writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
        self._add_tokenizer(config["vocab_size"])
        for weights in self._in_order():
            self._declare(weights)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()

    def write(self, weights: Sequence[Weight], drawn: Mapping[str, QTensor | Tensor]) -> None:
        for value in drawn.values():
            if isinstance(value, QTensor) and value.bits == 4:
                value.scale_min[..., 1] = value.scale_min[..., 0] * -_ZERO
                codes = value.codes
                codes += _ZERO * (codes & 15 == 0) + (_ZERO << 4) * (codes >> 4 == 0)
        for arrays in self._tensors(weights, drawn):
            self._writer.write_tensor_data(np.stack(arrays) if len(arrays) > 1 else arrays[0])

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()

    def _in_order(self) -> Iterator[tuple[Weight, ...]]:
        for layer in range(self._spec.num_layers):
            yield layer_weights(self._spec, layer)
        yield outer_weights(self._spec)

    def _declare(self, weights: Sequence[Weight]) -> None:
        """Announce the tensors of `write`, in its order."""
        found: dict[str, tuple[list[int], Kind]] = {}
        for weight in weights:
            for part in weight.parts:
                name, expert = self._name(part.source)
                shape = [part.rows] if weight.columns is None else [part.rows, weight.columns]
                if expert is not None:
                    assert self._spec.experts is not None
                    shape = [self._spec.experts.count, *shape]
                found[name] = (shape, _kind(weight))
        for name, (shape, kind) in found.items():
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            total = int(np.prod(shape)) // block * nbytes
            stored = [*shape[:-1], shape[-1] // block * nbytes]
            dtype = np.dtype(np.float32 if kind is Kind.F32 else np.uint8)
            given = shape if kind is Kind.F32 else stored
            self._writer.add_tensor_info(name, given, dtype, total, kind)

    def _tensors(
        self, weights: Sequence[Weight], drawn: Mapping[str, QTensor | Tensor]
    ) -> Iterator[list[NDArray[Any]]]:
        """The parts of each tensor, those of experts in their order."""
        pieces: dict[str, list[tuple[Weight, int]]] = {}
        for weight in weights:
            for number, part in enumerate(weight.parts):
                pieces.setdefault(self._name(part.source)[0], []).append((weight, number))
        values = {_LAYER.sub("", name): value for name, value in drawn.items()}
        for some in pieces.values():
            yield [
                _stored(values[w.name], w.destination(n, 0, w.parts[n].rows), _kind(w))
                for w, n in some
            ]

    def _name(self, source: str) -> tuple[str, int | None]:
        """What GGUF calls a tensor, and which expert of it a part is."""
        numbered = re.search(r"\.experts\.(\d+)\.", source)
        plain = re.sub(r"\.experts\.\d+\.", ".experts.", source)
        name = self._map.get_name(plain, (".weight",))
        assert name is not None, source
        return name, int(numbered[1]) if numbered else None

    def _add_tokenizer(self, size: int) -> None:
        self._writer.add_tokenizer_model("gpt2")
        self._writer.add_tokenizer_pre("gpt-2")
        self._writer.add_token_list([*(f"<{i}>" for i in range(size - 3)), "a", "b", "ab"])
        self._writer.add_token_types([gguf.TokenType.NORMAL] * size)
        self._writer.add_token_merges(["a b"])


def _kind(weight: Weight) -> Kind:
    if weight.columns is None or weight.routes:
        return Kind.F32
    return Kind.Q8_0 if weight.sensitive else Kind.Q4_0


def _stored(value: QTensor | Tensor, rows: Tensor, kind: Kind) -> NDArray[Any]:
    """Rows of a weight as the file has them."""
    if not isinstance(value, QTensor):
        return value[rows].float().numpy()
    if kind is not Kind.Q4_0:
        values = value.dequantize()[rows].numpy()
        return values if kind is Kind.F32 else gguf.quants.quantize(values, kind)
    codes = value.codes[rows].view(len(rows), -1, _BLOCK // 2)
    scales = value.scale_min[..., 0].T[rows].repeat_interleave(value.group_size // _BLOCK, 1)
    both = torch.cat([scales.contiguous()[..., None].view(torch.uint8), codes], dim=2)
    return both.view(len(rows), -1).numpy()
