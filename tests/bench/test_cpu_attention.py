"""The bench of CPU attention runs, and counts the instructions that the kernels are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import cpu_attention
from bench.block_instructions import block_instructions
from bench.cpu_attention import CACHED, FP32, QOFF, Operands, Shape, check
from qoff.errors import QoffError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.processor import host_features

VNNI = "avx512vnni" in host_features()


def test_the_bench_runs(tmp_path: Path) -> None:
    cpu_attention.main(["--quick", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    first = cpu_attention.QUICK_SHAPES[0]
    measured = written["measured"]
    assert measured[first.name]["cache_bytes"] == 4 * 8 * KVFormat(64).nbytes
    assert measured[first.name]["us_per_cached_block"] > 0
    assert set(written["ratios"][first.name]) == {
        "eta",
        CACHED,
        cpu_attention.RECORDS,
        FP32,
        cpu_attention.BF16,
    }
    assert ("instructions of a block" in measured) == VNNI
    assert written["bars"] == []  # of small cases nothing is wanted


@pytest.mark.parametrize(("form", "group"), [(KVFormat(64), 3), (KVFormat(128, 3, 2), 1)])
def test_both_alternatives_of_qoff_attend_to_what_torch_does(form: KVFormat, group: int) -> None:
    shape = Shape(2, 128, form.head_dim, group)
    operands = Operands(shape, form, 1 << 19)
    assert operands.nbytes == 2 * 2 * 8 * form.nbytes
    calls = operands.calls()
    check(shape, calls)
    once = calls[CACHED]()
    assert torch.equal(once, calls[CACHED]())
    assert not torch.equal(calls[QOFF](), calls[QOFF]())  # other blocks each time
    operands.pool.view(torch.float32).fill_(1)
    assert calls[cpu_attention.RECORDS]() == operands.nbytes / 4


def test_what_computes_something_else_is_not_measured() -> None:
    shape = Shape(1, 64, 64, 1)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        FP32: lambda: torch.ones(4),
        QOFF: lambda: 1.1 * torch.ones(4),
    }
    with pytest.raises(QoffError, match=r"D 64, GQA 1: off by 10\.0%"):
        check(shape, calls)


@pytest.mark.skipif(not VNNI, reason="counts an instruction of AVX-512 VNNI")
@pytest.mark.parametrize(("head_dim", "rows"), [(64, 1), (64, 6), (128, 4)])
def test_every_code_is_multiplied_once_for_each_plane(head_dim: int, rows: int) -> None:
    """64 products an instruction: K by two planes of each query, V by its probabilities."""
    found = block_instructions(head_dim, rows)
    assert found is not None
    assert found.record_bytes == KVFormat(head_dim).nbytes
    assert found.dots == 3 * rows * 64 * head_dim // 64
    assert found.shuffles > 0 < found.others
    assert 0 < found.bytes_per_cycle <= found.record_bytes / found.dots
    assert str(found.dots) in found.note(head_dim)
