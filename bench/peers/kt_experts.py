"""kt-kernel's MLP of a mixture of experts on the CPU, on 4-bit weights of its own making.

Two of its backends run on any processor with AVX2, and it takes the best of its builds for this
one: RAWINT4 (groups with one bfloat16 scale, no minimum; activations of 8 bits but on AVX2) and
LLAMAFILE (GGUF's Q4_0; activations of 8 bits). `packages.install("kt-kernel")` installs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers import packages
from qoff.errors import QoffError

RAW, LLAMAFILE = "kt-kernel, RAWINT4", "kt-kernel, LLAMAFILE Q4_0"
METHODS = (RAW, LLAMAFILE)
_LLAMAFILE_MULTIPLE = 256  # of an expert's inner size
_TOLERANCE = 0.03  # of RMS: results are bfloat16, activations of 8 bits
_WIDE_GROUP = 32  # the only one that RAWINT4 computes with AVX-512 and AMX; others give NaN


def methods(inner: int) -> tuple[str, ...]:
    """Those that are installed and can take experts of this inner size."""
    if not packages.use("kt-kernel"):
        return ()
    return METHODS if inner % _LLAMAFILE_MULTIPLE == 0 else (RAW,)


class KtExperts:
    """A layer's experts, called with float32 [tokens, hidden] and the top-k; bfloat16 comes out."""

    def __init__(
        self, experts: Sequence[tuple[Tensor, Tensor, Tensor]], top_k: int, tokens: int,
        method: str, group: int, threads: int,
    ) -> None:  # fmt: skip
        """Quantize experts, each gate, up [inner, hidden] and down [hidden, inner], in float32.

        tokens: of a call, at most. threads: beside the caller's, which waits without sleeping.
        Raises QoffError if it does not compute what its weights say.
        """
        self._ext: Any = import_module("kt_kernel").kt_kernel_ext
        inner, hidden = experts[0][0].shape
        pool = self._ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map = 1, [0]
        pool.subpool_thread_count = [threads]
        self._pool = self._ext.CPUInfer(pool)
        self._group = group
        self._absent = torch.zeros(len(experts), dtype=torch.bool)  # of experts on a GPU
        config = self._ext.moe.MOEConfig(
            len(experts), top_k, hidden, inner, self._absent.data_ptr()
        )
        config.pool, config.max_len = self._pool.backend_, max(tokens, 3)
        make = self._raw if method == RAW else self._llamafile
        self._moe = make(config, experts)
        order = torch.arange(len(experts), dtype=torch.int64)
        self._do(self._moe.load_weights_task(order.data_ptr()))
        self._check(experts, top_k, method)

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The MLP; top-k ids int64 and weights float32 [tokens, top_k]."""
        narrow, out = x.bfloat16(), torch.empty(x.shape, dtype=torch.bfloat16)
        count = torch.tensor([len(x)], dtype=torch.int32)
        ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
        pointers = (t.data_ptr() for t in (ids, weights, narrow, out))
        self._do(self._moe.forward_task(count.data_ptr(), ids.shape[1], *pointers, False))
        return out

    def _do(self, task: Any) -> None:
        self._pool.submit(task)
        self._pool.sync()

    def _raw(self, config: Any, experts: Sequence[tuple[Tensor, ...]]) -> Any:
        names = ("gate", "up", "down")
        select = import_module("kt_kernel.utils.amx")._select_rawint4_backend
        if select(self._group).__name__.startswith("AMX"):
            self._group = _WIDE_GROUP
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        scales: dict[str, list[Tensor]] = {name: [] for name in names}
        for expert in experts:
            for name, w in zip(names, expert, strict=True):
                codes, scale = _symmetric(w, self._group)
                kept[name].append((codes[:, 0::2] | codes[:, 1::2] << 4).contiguous())
                scales[name].append(scale)
        for name in names:
            setattr(config, f"{name}_projs", [[t.data_ptr() for t in kept[name]]])
            setattr(config, f"{name}_scales", [[t.data_ptr() for t in scales[name]]])
        config.quant_config.bits, config.quant_config.group_size = 4, self._group
        config.quant_config.zero_point = False
        self._kept: object = (kept, scales)  # memory that the kernels read
        return select(self._group)(config)

    def _llamafile(self, config: Any, experts: Sequence[tuple[Tensor, ...]]) -> Any:
        kind = self._ext.kvcache.ggml_type
        kept = []
        for name, matrices in zip(("gate", "up", "down"), zip(*experts, strict=True), strict=True):
            kept.append(np.stack([_gguf(w) for w in matrices]))
            setattr(config, f"{name}_proj", kept[-1].ctypes.data)
            setattr(config, f"{name}_type", kind.Q4_0)
        config.hidden_type, config.m_block, config.group_min_len = kind.BF16, 32, 10  # its own
        config.group_max_len = config.max_len
        self._kept = kept
        return self._ext.moe.MOE(config)

    def _check(self, experts: Sequence[tuple[Tensor, ...]], top_k: int, method: str) -> None:
        """One token through its first experts, beside its own weights as floats."""
        x = torch.randn(1, experts[0][0].shape[1], generator=torch.Generator().manual_seed(0))
        ids, weights = torch.arange(top_k)[None], torch.full((1, top_k), 1 / top_k)
        wanted = torch.zeros_like(x)
        for gate, up, down in experts[:top_k]:
            floats = [self._floats(w, method) for w in (gate, up, down)]
            y = F.silu(x @ floats[0].T) * (x @ floats[1].T)
            wanted += y @ floats[2].T / top_k
        error = ((self(x, ids, weights).float() - wanted).norm() / wanted.norm()).item()
        if not error < _TOLERANCE:
            raise QoffError(f"{method} is off by {error:.1%}: nothing measured")

    def _floats(self, w: Tensor, method: str) -> Tensor:
        if method == LLAMAFILE:
            quants: Any = import_module("gguf.quants")
            kind = import_module("gguf").GGMLQuantizationType.Q4_0
            return torch.from_numpy(quants.dequantize(_gguf(w), kind))
        codes, scale = _symmetric(w, self._group)
        groups = (codes.float() - 8).view(*scale.shape, -1)
        return (groups * scale.float()[..., None]).view(w.shape)


def _symmetric(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K] of 0 to 15 around 8, and bfloat16 scales [N, K / group]."""
    groups = w.view(len(w), -1, group)
    scale = (groups.abs().amax(2) / 7.5).bfloat16()
    codes = (groups / scale.float()[..., None]).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.uint8).view(w.shape), scale


def _gguf(w: Tensor) -> np.ndarray:
    quants: Any = import_module("gguf.quants")
    kind = import_module("gguf").GGMLQuantizationType.Q4_0
    return quants.quantize(w.numpy(), kind)
