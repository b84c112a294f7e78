"""Searching launch configurations on one GPU, for kernels/tuned/<gpu>.json.

For each case the launcher is timed with every candidate in turn, beside the configuration that it
would choose itself. A candidate that does not compile or launch is left out. An entry is made
only where the best candidate is faster than the launcher's own choice by more than 3 %.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from bench.gpu.case import Call
from bench.gpu.child import Emit
from bench.gpu.model_shapes import TOKENS, ModelShape
from bench.gpu.operands import random_weight
from bench.gpu.ops.decode_attention import problem
from bench.gpu.ops.w4_linear import GROUP
from bench.gpu.timer import Timer
from qoff.kernels.triton.attention.decode import DecodeConfig
from qoff.kernels.triton.linear.gemm import GemmConfig
from qoff.kernels.triton.linear.gemv import GemvConfig, tokens_max
from qoff.kernels.triton.linear.linear import (
    SKINNY_MAX,
    TUNED,
    Config,
    ScratchConfig,
    tuned_key,
    w4_linear,
)
from qoff.kernels.triton.linear.skinny import SkinnyConfig

_SAMPLE_S = 1.5
_SETS = 4  # of operands, for the calls of a graph
_GAIN = 1.03
_GEMM_MAX = 4096  # tokens
_BITS = 4
_CONTEXT, _BATCH = 32768, 8


@dataclass(frozen=True)
class Search:
    """One entry of the file to find: `build` makes a call for a configuration, None for its own.

    names: what files of tuned configurations call an op by the type of its configuration, where
    that is not `op`: the op does its work in one of several ways.
    """

    op: str
    key: str
    candidates: tuple[Any, ...]
    build: Callable[[torch.device], Callable[[Any], Call]]
    names: Mapping[type, str] = field(default_factory=dict)

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
) -> None:
    """Do the searches that are not done, until `end`; each is reported once it is over."""
    for search in wanted:
        if search.name in done:
            continue
        if time.monotonic() > end:
            emit({"late": search.name})
            continue
        emit({"begin": search.name})
        with torch.inference_mode():
            config = best(search, device, timer, end)
        name = search.names.get(type(config), search.op)
        fields = None if config is None else asdict(config)
        emit({"tuned": [name, search.key, fields], "item": search.name})


def best(search: Search, device: torch.device, timer: Timer, end: float = float("inf")) -> Any:
    """The fastest candidate of those that are compiled by `end`.

    None where the launcher's own choice is as fast.
    """
    makes = [search.build(device) for _ in range(_SETS)]
    calls = {"own": [make(None) for make in makes]}
    calls["own"][0]()
    candidates = {"own": None}
    for i, config in enumerate(search.candidates):
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


def searches(op: str, models: Sequence[ModelShape]) -> Iterator[Search]:
    """What can be tuned of an op, the most useful first."""
    if op == "w4_linear":
        for m in TOKENS:
            for n, k in dict.fromkeys(s for model in models for s in model.linears().values()):
                yield _linear(m, n, k)
    if op == "decode_attention":
        yield from _decode(models)


def _linear(m: int, n: int, k: int) -> Search:
    key = tuned_key(torch.float16, _BITS, GROUP, m, n, k)

    def build(device: torch.device) -> Callable[[Any], Call]:
        q = random_weight(n, k, device, _BITS, GROUP)
        x = torch.randn(m, k, device=device).half()

        def call(config: Any) -> Call:
            return lambda: w4_linear(x, q, None, config)

        return call

    return Search("w4_linear", key, tuple(_configs(m)), build, {t: op for op, t in TUNED.items()})


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
        for row_bytes, splits in itertools.product((32, 64), (1, 2, 4) if m <= 256 else (1,)):
            yield GemmConfig(
                warps=warps,
                stages=3 if row_bytes == 64 else 4,
                splits=splits,
                block_n=rows,
                block_m=block_m,
                row_bytes=row_bytes,
            )


def _decode(models: Sequence[ModelShape]) -> Iterator[Search]:
    seen = set()
    for model in models:
        columns = 8 if model.group <= 8 else 16
        key = f"{model.head_dim}-k4-v4-{columns}"  # as the launcher makes it
        if key in seen:
            continue
        seen.add(key)

        def build(device: torch.device, model: ModelShape = model) -> Callable[[Any], Call]:
            attend, _ = problem(model, _CONTEXT, _BATCH, device)
            return lambda config: partial(attend, config)

        space = itertools.product((1, 2, 4), (0, 1), (4, 8, 16, 32), (2, 4, 8))
        configs = (
            DecodeConfig(warps, prefetch=prefetch, programs=programs, min_blocks=blocks)
            for warps, prefetch, programs, blocks in space
        )
        yield Search("decode_attention", key, tuple(configs), build)
