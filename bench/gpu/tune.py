"""Searching launch configurations on one GPU, for kernels/tuned/<gpu>.json.

For each case the launcher is timed with a dozen candidates in turn, those that `predict` expects
most of, beside the configuration that it would choose itself. A candidate that does not compile or
launch is left out. An entry is made only where the best candidate is faster than the launcher's own
choice by more than 3 %.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu import ops, pieces
from bench.gpu.case import Call
from bench.gpu.child import Emit
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_weight
from bench.gpu.ops.decode_attention import problem as decode_problem
from bench.gpu.ops.prefill_attention import problem as prefill_problem
from bench.gpu.ops.w4_linear import GROUP
from bench.gpu.timer import Timer
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.attention import decode, prefill
from qoff.kernels.triton.attention import merge as merge_module
from qoff.kernels.triton.attention.decode import DecodeConfig
from qoff.kernels.triton.attention.merge import MergeConfig, merge
from qoff.kernels.triton.attention.prefill import PrefillConfig, prefill_attention
from qoff.kernels.triton.latent import attention as latent
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.linear import dequantize as dequantize_module
from qoff.kernels.triton.linear import linear
from qoff.kernels.triton.linear.dequantize import DequantizeConfig, dequantize
from qoff.kernels.triton.linear.gemm import GemmConfig
from qoff.kernels.triton.linear.gemv import GemvConfig, tokens_max
from qoff.kernels.triton.linear.linear import SKINNY_MAX, TUNED, Config, tuned_key, w4_linear
from qoff.kernels.triton.linear.scratch import Scratch, ScratchConfig, piece_bytes
from qoff.kernels.triton.linear.skinny import SkinnyConfig

TIMED = 12  # candidates of a search, at most
_SAMPLE_S = 1.5
_SETS = 4  # of operands, for the calls of a graph
_GAIN = 1.03
_GEMM_MAX = 4096  # tokens
_BITS = 4
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)  # tokens
_CONTEXT, _BATCH = 32768, 8
_ROWS = 2048


@dataclass(frozen=True)
class Search:
    """One entry of the file to find: `build` makes a call for a configuration, None for its own.

    names: what files of tuned configurations call an op by the type of its configuration, where
    that is not `op`: the op does its work in one of several ways. expected: how long a call takes
    with a candidate on a device, in any unit, where no kernel that is launched shows it.
    """

    op: str
    key: str
    candidates: tuple[Any, ...]
    build: Callable[[torch.device], Callable[[Any], Call]]
    names: Mapping[type, str] = field(default_factory=dict)
    expected: Callable[[Any, torch.device], float] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.key}"


def tune(
    emit: Emit,
    wanted: Iterable[Search],
    done: Collection[str],
    device: torch.device,
    timer: Timer,
    end: float,
    promising: Callable[[Search], Sequence[Any]] = lambda search: search.candidates,
) -> None:
    """Do the searches that are not done, until `end`; each is reported once it is over.

    promising: which candidates are timed. What was found is what launchers then choose.
    """
    found: dict[tuple[str, str], dict[str, int]] = {}
    before = tuned.lookup

    def lookup(op: str, device: torch.device, key: str) -> Mapping[str, int] | None:
        return found.get((op, key)) or before(op, device, key)

    with patch.object(tuned, "lookup", lookup):
        for search in wanted:
            if search.name in done:
                continue
            if time.monotonic() > end:
                emit({"late": search.name})
                continue
            emit({"begin": search.name})
            with torch.inference_mode():
                config = best(search, promising(search), device, timer, end)
            name = search.names.get(type(config), search.op)
            fields = None if config is None else asdict(config)
            if fields is not None:
                found[name, search.key] = fields
                for forget in CHOOSERS:
                    forget.cache_clear()
            emit({"tuned": [name, search.key, fields], "item": search.name})


def best(
    search: Search,
    configs: Sequence[Any],
    device: torch.device,
    timer: Timer,
    end: float = float("inf"),
) -> Any:
    """The fastest of these candidates of a search, of those compiled by `end`.

    None where the launcher's own choice is as fast.
    """
    makes = [search.build(device) for _ in range(_SETS)]
    calls = {"own": [make(None) for make in makes]}
    calls["own"][0]()
    candidates = {"own": None}
    for i, config in enumerate(configs):
        if time.monotonic() > end:
            break
        try:
            several = [make(config) for make in makes]
            several[0]()
        except Exception:  # too many registers or too much shared memory for this GPU
            continue
        calls[str(i)], candidates[str(i)] = several, config
    seconds = {name: t.seconds for name, t in timer.measure(calls, _SAMPLE_S).items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    if candidates[fastest] is None or seconds["own"] < _GAIN * seconds[fastest]:
        return None
    return candidates[fastest]


def searches(op: str, models: Sequence[ModelShape], capability: int = 90) -> Iterator[Search]:
    """What can be tuned of an op on GPUs of a compute capability, the most useful first."""
    matrices = list(dict.fromkeys(s for model in models for s in model.linears().values()))
    types = (torch.float16,) if capability < 80 else (torch.bfloat16, torch.float16)
    if op == "w4_linear":  # the ways of many tokens take pieces of this size
        layers = [s for model in models for name, s in model.linears().items() if name != "head"]
        for dtype in types:
            yield _pieces(*max(layers, key=math.prod), dtype)
    if op == "w4_linear" and capability >= 80:
        for m, dtype, (n, k) in itertools.product(_BUCKETS, types, matrices):
            yield _linear(m, n, k, dtype)
    for dtype in types:
        if op == "decode_attention":
            yield from _decode(models, dtype)
        if op == "prefill_attention":
            yield from _prefill(models, dtype)
        if op == "merge":
            yield from _merge(models, dtype)
        if op == "dequantize":
            yield _dequantize(*matrices[0], dtype)
        if op == "latent_attention":
            yield from ops.module(op).searches(dtype, capability)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _linear(m: int, n: int, k: int, dtype: torch.dtype) -> Search:
    key = tuned_key(dtype, _BITS, GROUP, m, n, k)

    def build(device: torch.device) -> Callable[[Any], Call]:
        q = random_weight(n, k, device, _BITS, GROUP)
        x = torch.randn(m, k, device=device).to(dtype)
        piece = piece_bytes(device, dtype)  # as a plan of all its memory has it

        def call(config: Any) -> Call:
            given = ScratchConfig(piece) if isinstance(config, ScratchConfig) else config
            return partial(w4_linear, x, q, None, given, scratch=Scratch(piece))

        return call

    return Search("w4_linear", key, tuple(_configs(m)), build, {t: op for op, t in TUNED.items()})


def _pieces(n: int, k: int, dtype: torch.dtype) -> Search:
    def build(device: torch.device) -> Callable[[Any], Call]:
        q = random_weight(n, k, device, _BITS, GROUP)
        x = torch.randn(pieces.TOKENS, k, device=device).to(dtype)
        own = ScratchConfig(piece_bytes(device, dtype))
        return lambda config: partial(w4_linear, x, q, None, config or own)

    def expected(config: ScratchConfig, device: torch.device) -> float:
        return pieces.expected(config, n, k, device)

    candidates = tuple(pieces.sizes(n, k))
    return Search("scratch", _name(dtype), candidates, build, expected=expected)


def _configs(m: int) -> Iterator[Config]:
    """Of every way that may be the fastest for m tokens."""
    if m <= tokens_max(GROUP * _BITS // 8):
        yield from _gemvs(m)
    elif m <= SKINNY_MAX:
        yield from _skinnies(m)
    if 16 <= m <= _GEMM_MAX:
        yield from _gemms(m)
    if m > SKINNY_MAX:
        yield ScratchConfig()


def _gemvs(m: int) -> Iterator[Config]:
    for rows, warps, stages, splits in itertools.product((16, 32, 64), (4, 8), (2, 3), (1, 2, 4)):
        registers = 255 if m > 8 else 168 if warps == 4 else 128
        yield GemvConfig(warps, stages, splits, registers, block_n=rows)


def _skinnies(m: int) -> Iterator[Config]:
    for rows, parts, stages, splits in itertools.product((64, 128), (1, 2, 4), (2, 3), (1, 2, 4)):
        yield SkinnyConfig(
            block_n=rows,
            block_m=min(64, max(8, m)),
            row_bytes=32 if m >= 64 else 64,
            parts=parts,
            stages=stages,
            splits=splits,
        )


def _gemms(m: int) -> Iterator[Config]:
    """Programs along K where there are few tokens; on GPUs without `wgmma`, too."""
    for rows, warps, block_m in itertools.product((64, 128, 256), (4, 8), (16, 32, 64, 128, 256)):
        sums = rows * block_m // (32 * warps)  # registers of a thread for them
        if not min(m, 64) <= block_m <= m or not 16 <= rows // warps <= 32 or sums > 128:
            continue
        few = block_m <= 64
        copies = ((64, 3), (64, 4), (128, 3), (128, 4)) if few else ((32, 4), (64, 3))
        for (row_bytes, stages), splits in itertools.product(
            copies, (1, 2, 4) if m <= 256 else (1,)
        ):
            yield GemmConfig(
                warps=warps,
                stages=stages,
                splits=splits,
                registers=128 if few and warps == 8 else 0,
                block_n=rows,
                block_m=block_m,
                row_bytes=row_bytes,
            )


def _dequantize(n: int, k: int, dtype: torch.dtype) -> Search:
    def build(device: torch.device) -> Callable[[Any], Call]:
        q = random_weight(n, k, device, _BITS, GROUP)
        return lambda config: partial(dequantize, q, dtype, config)

    spaces = itertools.product((1024, 2048, 4096, 8192), (2, 4, 8))
    configs = tuple(DequantizeConfig(block, warps) for block, warps in spaces)
    key = f"{_name(dtype)}-{_BITS}-{GROUP}"
    return Search("dequantize", key, configs, build)


def _decode(models: Sequence[ModelShape], dtype: torch.dtype) -> Iterator[Search]:
    seen = set()
    for model in models:
        columns = 8 if model.group <= 8 else 16
        key = f"{_name(dtype)}-{model.head_dim}-k4-v4-{columns}"
        if key in seen:
            continue
        seen.add(key)

        def build(device: torch.device, model: ModelShape = model) -> Callable[[Any], Call]:
            attend, _ = decode_problem(model, _CONTEXT, _BATCH, device, dtype)
            return lambda config: partial(attend, config)

        space = itertools.product((1, 2, 4), (1, 2, 3), (4, 8, 12, 16))
        configs = itertools.starmap(DecodeConfig, space)
        yield Search("decode_attention", key, tuple(configs), build)


def _prefill(models: Sequence[ModelShape], dtype: torch.dtype) -> Iterator[Search]:
    for dim in dict.fromkeys(model.head_dim for model in models):
        model = next(one for one in models if one.head_dim == dim)
        form = KVFormat(dim)

        def build(
            device: torch.device, model: ModelShape = model, form: KVFormat = form
        ) -> Callable[[Any], Call]:
            heads = model.kv_heads, model.group
            operands = prefill_problem(form, *heads, [_CONTEXT // 4], [_ROWS], dtype, device)
            return lambda config: lambda: prefill_attention(*operands, config=config)

        space = itertools.product((32, 64, 128), (4, 8), (1, 2, 3), (0, 3, 8, 1 << 20))
        configs = (PrefillConfig(*each) for each in space)
        key = f"{_name(dtype)}-{dim}-k{form.k_bits}-v{form.v_bits}"
        yield Search("prefill_attention", key, tuple(configs), build)


def _merge(models: Sequence[ModelShape], dtype: torch.dtype) -> Iterator[Search]:
    for parts, dim in itertools.product((4, 16, 32), dict.fromkeys(m.head_dim for m in models)):
        heads = next(one.heads for one in models if one.head_dim == dim)

        def build(
            device: torch.device, shape: tuple[int, ...] = (parts, _BATCH, heads, dim)
        ) -> Callable[[Any], Call]:
            outs = torch.randn(shape, device=device).to(dtype)
            lses = torch.randn(shape[:3], device=device)
            return lambda config: partial(merge, outs, lses, config)

        space = itertools.product((1, 2, 4), (4, 8, 16, 32), (1, 2, 4, 8))
        configs = (MergeConfig(*each) for each in space if each[1] <= parts)
        key = f"{_name(dtype)}-{dim}-{parts}"
        yield Search("merge", key, tuple(configs), build)


# What launchers have looked up once.
CHOOSERS = (
    linear.configured,
    dequantize_module._configured,
    decode._configured,
    decode._bound,
    prefill._configured,
    latent._configured,
    latent._bound,
    merge_module._configured,
    merge_module._bound,
)
