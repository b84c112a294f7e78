"""Where kernels are launched, and with how many programs; no kernel runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.variants import latent, linear, moe
from bench.variants.attention import cache_of
from bench.variants.variant import empty
from qoff.kernels.layout.kv_format import KVFormat
from tests.triton_module import triton_module

append = triton_module("attention.append")

ROOT = Path(__file__).resolve().parents[2]

_GRID_MAX = (2**31 - 1, 65535, 65535)
# Kernels of ops that others call than those of `triton.ops`, where the GPU is made the current one.
_ALONE = ("absorb", "expand", "dequantize", "quantize", "repack_experts", "experts_gemv")
_LAUNCHES = {
    variant.kernel: variant.launch
    for module in (latent, linear, moe)
    for variant in module.variants(90)
}

Launch = Callable[[str, tuple[int, ...]], None]


@contextmanager
def launches(told: Launch) -> Iterator[None]:
    """Meanwhile nothing is launched, and `told` gets each kernel's name and grid."""

    def run(self: object, *args: object, grid: tuple[int, ...], **options: object) -> None:
        told(self.fn.__name__, grid)  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(append.write_kernel), "run", run)
        yield


@pytest.mark.parametrize("kernel", _ALONE)
def test_ops_launch_on_the_gpu_of_their_operands(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, found = list[torch.device](), dict[str, list[torch.device]]()

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    with launches(lambda name, grid: found.update({name: [*current]})):
        _LAUNCHES[f"{kernel}_kernel"]()
    assert found[f"{kernel}_kernel"] == [torch.device("meta")]


def test_a_ring_may_have_more_tokens_than_a_grid_has_rows() -> None:
    tokens, form = 70_000, KVFormat(64)
    cache = cache_of(form, "fp16", tokens)
    ring = empty(torch.float16, *cache.recent_k.shape[:1], tokens, *cache.recent_k.shape[2:])
    cache = replace(cache, recent_k=ring, recent_v=ring)
    key = empty(torch.float16, tokens, *ring.shape[2:])
    grids = list[tuple[int, ...]]()
    with launches(lambda name, grid: grids.append(grid)):
        append.write_recent(key, key, cache, cache.step.after)
    assert len(grids) == 1
    assert all(n <= most for n, most in zip(grids[0], _GRID_MAX, strict=True))


# Triton is no interpreter here: what it would compile is collected.
_HEAD_BY_HEAD = """
import json
from collections import Counter
from dataclasses import replace
import torch
from bench.variants.attention import cache_of
from bench.variants.variant import empty, recording
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.triton.attention.prefill import prefill_attention
from qoff.kernels.triton.launch.gpu import Gpu
blocks, shape = 2000, HeadShape(8, 8, 128, 0.1)
cache = cache_of(KVFormat(128), "fp16", 4096)
table = empty(torch.int32, 3, blocks)
cache = replace(cache, step=replace(cache.step, table=table, max_packed=64 * blocks))
q, launched = empty(torch.float16, 4096, 8, 128), []
with recording(Gpu(90, 132), 90, launched.append):
    prefill_attention(q, q, q, cache, shape)
forms = {(one.kernel.fn.__name__, one.key) for one in launched}
counts = (Counter(one.kernel.fn.__name__ for one in launched), Counter(name for name, _ in forms))
print(json.dumps(counts))
"""


def test_one_form_of_a_kernel_serves_all_heads_of_a_long_prompt() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _HEAD_BY_HEAD]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    launched, forms = json.loads(run.stdout)
    assert min(launched.values()) > 2
    assert forms == {"scratch_kernel": 1, "prefill_attention_kernel": 1}
