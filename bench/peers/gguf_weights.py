"""A float model as GGUF, quantized by llama.cpp's tools with an importance matrix, and back.

llama.cpp's k-quants have blocks of 256 columns. Where that does not divide a matrix's columns, it
takes another type of more bits; so columns of zeros are added, which cost nothing in the count of
bits, as a model of other sizes would not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.peers.llama_cpp import run

_BLOCK = 256
_CONTEXT = 512  # tokens of a chunk of the calibration text
Array = NDArray[Any]


class GgufWeights:
    """A model whose layers have the matrices in `state` (Hugging Face's names).

    like: a GGUF file of the same shape, of which all else is taken. folder: where files are kept.
    """

    def __init__(self, like: Path, state: Mapping[str, Tensor], folder: Path) -> None:
        self._like, self._state, self._folder = gguf.GGUFReader(like), state, folder
        field = self._like.get_field("general.architecture")
        assert field is not None
        self._architecture = str(field.contents())
        self._heads = {}  # of matrices whose rows are in another order
        if self._architecture == "llama":
            self._heads = {
                "attn_q": int(self._number("attention.head_count")),
                "attn_k": int(self._number("attention.head_count_kv")),
            }
        architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        blocks = int(self._number("block_count"))
        names = gguf.get_tensor_name_map(architectures[self._architecture], blocks)
        found = {name: names.get_name(name, (".weight", ".bias")) for name in state}
        self._names = {own: name for name, own in found.items() if own is not None}

    def importance(self, text: Path, chunks: int) -> Path:
        """The importance matrix of a calibration text, for the padded file."""
        plain, raw = self._folder / "float.gguf", self._folder / "importance-raw.gguf"
        padded = self._folder / f"importance-{chunks}.gguf"
        if not padded.exists():
            self._write(plain, self._tensors(pad=False))
            run("llama-imatrix", "-m", plain, "-f", text, "-o", raw, "-c", str(_CONTEXT),
                 "--chunks", str(chunks), "--no-ppl")  # fmt: skip
            plain.unlink()
            self._pad_importance(raw, padded)
        return padded

    def quantized(self, kind: str, importance: Path) -> tuple[dict[str, Tensor], float]:
        """The layers' matrices after a type of llama-quantize, and bits a weight of them."""
        plain, out = self._folder / "padded.gguf", self._folder / f"{kind}.gguf"
        self._write(plain, self._tensors(pad=True))
        run("llama-quantize", "--imatrix", importance, plain, out, kind)
        found, bits, count = dict[str, Tensor](), 0.0, 0
        for tensor in gguf.GGUFReader(out).tensors:
            if not self._is_matrix(tensor.name):
                continue
            name = self._names[tensor.name]
            block, nbytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            rows, columns = self._state[name].shape
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            values = self._permuted(tensor.name, values.reshape(rows, -1)[:, :columns], back=True)
            found[name] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            bits += rows * columns * 8 * nbytes / block
            count += rows * columns
        plain.unlink()
        out.unlink()
        return found, bits / count

    def _number(self, key: str) -> Any:
        field = self._like.get_field(f"{self._architecture}.{key}")
        assert field is not None, key
        return field.contents()

    def _is_matrix(self, name: str) -> bool:
        own = self._names.get(name)
        return name.startswith("blk.") and own is not None and self._state[own].dim() == 2

    def _permuted(self, name: str, values: Array, back: bool = False) -> Array:
        """Rows of queries and keys in the order of llama.cpp's rotation, or back from it."""
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        if kind not in self._heads:
            return values
        half = values.shape[0] // self._heads[kind] // 2
        parts = (half, 2) if back else (2, half)
        return values.reshape(-1, *parts, values.shape[1]).swapaxes(1, 2).reshape(values.shape)

    def _tensors(self, pad: bool) -> Iterator[tuple[str, Array]]:
        for tensor in self._like.tensors:
            if self._is_matrix(tensor.name):
                values = self._state[self._names[tensor.name]].float().numpy()
                values = self._permuted(tensor.name, values)
            else:
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if pad and values.ndim == 2:
                values = np.pad(values, ((0, 0), (0, -values.shape[1] % _BLOCK)))
            yield tensor.name, np.ascontiguousarray(values)

    def _write(self, path: Path, tensors: Iterator[tuple[str, Array]]) -> None:
        writer = gguf.GGUFWriter(path, self._architecture)
        for name, field in self._like.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
        for name, values in tensors:
            writer.add_tensor(name, values)
        _finish(writer)

    def _pad_importance(self, raw: Path, out: Path) -> None:
        found = gguf.GGUFReader(raw)
        writer = gguf.GGUFWriter(out, "imatrix")
        for name, field in found.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
        for tensor in found.tensors:
            values = np.array(tensor.data)
            if tensor.name.endswith(".in_sum2"):
                values = np.pad(
                    values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % _BLOCK)]
                )
            writer.add_tensor(tensor.name, values)
        _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
