"""Searching launch configurations on one GPU; writes kernels/tuned/<gpu>.json.

For each case the launcher is timed with every candidate in turn, beside the configuration that it
would choose itself. A candidate that does not compile or launch is left out. An entry is written
only where the best candidate is faster than the launcher's own choice by more than 3 %.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cuda_timer import Timer
from bench.decode_attention import problem
from bench.gpu_case import Call
from bench.gpu_operands import random_weight
from bench.model_shapes import MODELS, TOKENS
from bench.w4_linear import GROUP
from qoff.kernels.triton.attention.decode import DecodeConfig
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.linear.gemv import GemvConfig, tokens_max
from qoff.kernels.triton.linear.linear import w4_linear
from qoff.kernels.triton.linear.skinny import SkinnyConfig

_SAMPLE_S = 1.5
_GAIN = 1.03
_SKINNY_MAX = 64
_BITS = 4
_CONTEXT, _BATCH = 32768, 8

Entries = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class Search:
    """One entry of the file to find: `build` makes a call for a configuration, None for its own."""

    op: str
    key: str
    candidates: tuple[Any, ...]
    build: Callable[[torch.device], Callable[[Any], Call]]


def tune(
    device: torch.device,
    timer: Timer,
    ops: Sequence[str],
    budget_s: float,
    folder: Path = tuned.FOLDER,
    gpu: str | None = None,
) -> Path:
    """Search until the budget is spent; each entry is written once it is found, others stay."""
    path = folder / tuned.file_name(gpu or torch.cuda.get_device_name(device))
    entries: Entries = json.loads(path.read_text()) if path.is_file() else {}
    end = time.monotonic() + budget_s
    left = 0
    folder.mkdir(parents=True, exist_ok=True)
    for search in searches(ops):
        if time.monotonic() > end:
            left += 1
        elif fields := best(search, device, timer, end):
            entries.setdefault(search.op, {})[search.key] = fields
            _write(path, entries)
            print(f"{search.op} {search.key}: {fields}", flush=True)
    if left:
        print(f"skipped {left} searches for lack of time")
    _write(path, entries)
    return path


def _write(path: Path, entries: Entries) -> None:
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def best(
    search: Search, device: torch.device, timer: Timer, end: float = float("inf")
) -> dict[str, int] | None:
    """The fields of the fastest candidate of those that are compiled by `end`.

    None where the launcher's own choice is as fast.
    """
    make = search.build(device)
    calls: dict[str, Call] = {"own": make(None)}
    calls["own"]()
    candidates = {"own": None}
    for i, config in enumerate(search.candidates):
        if time.monotonic() > end:
            break
        try:
            call = make(config)
            call()
        except Exception:  # too many registers or too much shared memory for this GPU
            continue
        calls[str(i)], candidates[str(i)] = call, config
    seconds = {name: t.seconds for name, t in timer.measure(calls, _SAMPLE_S).items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    if candidates[fastest] is None or seconds["own"] < _GAIN * seconds[fastest]:
        return None
    return asdict(candidates[fastest])  # type: ignore[call-overload]


def searches(ops: Sequence[str]) -> Iterator[Search]:
    """What can be tuned, of the ops wanted."""
    if "w4_linear" in ops:
        for m in (m for m in TOKENS if m <= _SKINNY_MAX):
            for n, k in dict.fromkeys(s for model in MODELS for s in model.linears().values()):
                yield _linear(m, n, k)
    if "decode_attention" in ops:
        yield from _decode()


def _linear(m: int, n: int, k: int) -> Search:
    gemv = m <= tokens_max(GROUP * _BITS // 8)
    key = f"float16-{_BITS}-{GROUP}-{m}-{n}x{k}"  # as the launchers make it

    def build(device: torch.device) -> Callable[[Any], Call]:
        q = random_weight(n, k, device, _BITS, GROUP)
        x = torch.randn(m, k, device=device).half()

        def call(config: Any) -> Call:
            return lambda: w4_linear(x, q, None, config)

        return call

    return Search("w4_gemv" if gemv else "w4_skinny", key, tuple(_configs(gemv, m)), build)


def _configs(gemv: bool, m: int) -> Iterator[GemvConfig | SkinnyConfig]:
    if gemv:
        for rows, warps, stages, splits in itertools.product(
            (16, 32, 64), (4, 8), (2, 3), (1, 2, 4)
        ):
            registers = 255 if m > 8 else 168 if warps == 4 else 128
            yield GemvConfig(warps, stages, splits, registers, block_n=rows)
        return
    for rows, parts, stages, splits in itertools.product((64, 128), (1, 2, 4), (2, 3), (1, 2, 4)):
        yield SkinnyConfig(
            block_n=rows,
            block_m=min(64, max(8, m)),
            row_bytes=32 if m >= 64 else 64,
            parts=parts,
            stages=stages,
            splits=splits,
        )


def _decode() -> Iterator[Search]:
    seen = set()
    for model in MODELS:
        columns = 8 if model.group <= 8 else 16
        key = f"{model.head_dim}-k4channel-v4-{columns}"  # as the launcher makes it
        if key in seen:
            continue
        seen.add(key)

        def build(device: torch.device, model: Any = model) -> Callable[[Any], Call]:
            attend, _ = problem(model, _CONTEXT, _BATCH, device)
            return lambda config: partial(attend, config)

        space = itertools.product((1, 2, 4), (0, 1), (4, 8, 16, 32), (2, 4, 8))
        configs = (
            DecodeConfig(warps, prefetch=prefetch, programs=programs, min_blocks=blocks)
            for warps, prefetch, programs, blocks in space
        )
        yield Search("decode_attention", key, tuple(configs), build)
