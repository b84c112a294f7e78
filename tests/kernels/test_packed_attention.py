"""Decode attention over packed blocks on the CPU, against softmax over the dequantized cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu.packed_attention import packed_attention
from qoff.kernels.cpu.pool import Pool
from qoff.kernels.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.reference_kv import dequantize_blocks, quantize_blocks
from tests.tolerances import PACKED_ATTENTION, assert_close


@dataclass(frozen=True)
class Case:
    """Sequences of some packed blocks each, in shuffled places of a pool."""

    form: KVFormat
    q: Tensor
    pool: Tensor
    table: Tensor
    compressed: Tensor

    @property
    def scale(self) -> float:
        return self.form.head_dim**-0.5

    def run(self, **options: object) -> tuple[Tensor, Tensor]:
        return packed_attention(
            self.q, self.pool, self.table, self.compressed, self.form, scale=self.scale, **options
        )

    def expected(self, firsts: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64."""
        k, v = dequantize_blocks(self.pool, self.form)
        out, lse = torch.zeros_like(self.q, dtype=torch.float64), []
        group = self.q.shape[1] // self.pool.shape[1]
        for s, q in enumerate(self.q.double()):
            blocks = self.table[s, : int(self.compressed[s]) // 64].long()
            # [kv_heads, tokens, D] -> [heads, tokens, D]
            keys, values = (
                x[blocks].transpose(0, 1).flatten(1, 2).double().repeat_interleave(group, 0)
                for x in (k, v)
            )
            scores = (keys @ q[..., None])[..., 0] * self.scale
            scores[:, : firsts[s] if firsts else 0] = -torch.inf
            lse.append(scores.logsumexp(-1))
            if blocks.numel():
                out[s] = (scores.softmax(-1)[:, None] @ values)[:, 0]
        return out, torch.stack(lse)


def make(form: KVFormat, heads: int, kv_heads: int, blocks: tuple[int, ...]) -> Case:
    total = sum(blocks) + 1
    k, v = torch.randn(2, total, kv_heads, 64, form.head_dim)
    k[..., 3] *= 20  # an outlier channel, as keys have
    order = torch.randperm(total)
    table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32)
    start = 0
    for s, count in enumerate(blocks):
        table[s, :count] = order[start : start + count]
        start += count
    return Case(
        form,
        torch.randn(len(blocks), heads, form.head_dim),
        quantize_blocks(k, v, form),
        table,
        64 * torch.tensor(blocks, dtype=torch.int32),
    )


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_equals_attention_over_the_dequantized_cache(head_dim: int, bits: tuple[int, int]) -> None:
    case = make(KVFormat(head_dim, *bits), 6, 2, (1, 3, 40))
    out, lse = case.run()
    expected_out, expected_lse = case.expected()
    assert_close(out, expected_out.float(), tolerance=PACKED_ATTENTION)
    assert_close(lse, expected_lse.float(), tolerance=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 17, 40])
def test_any_number_of_queries_shares_a_kv_head(heads: int) -> None:
    case = make(KVFormat(64), heads, 1, (2, 5))
    assert_close(case.run()[0], case.expected()[0].float(), tolerance=PACKED_ATTENTION)


def test_a_window_leaves_out_the_oldest_tokens() -> None:
    case = make(KVFormat(128), 4, 2, (40, 40, 3))
    firsts = (2500, 0, 129)
    out, lse = case.run(first=torch.tensor(firsts, dtype=torch.int32))
    expected_out, expected_lse = case.expected(firsts)
    assert_close(out, expected_out.float(), tolerance=PACKED_ATTENTION)
    assert_close(lse, expected_lse.float(), tolerance=1e-4)


def test_a_sequence_without_blocks_weighs_nothing() -> None:
    case = make(KVFormat(64), 2, 2, (0, 2))
    out, lse = case.run()
    assert torch.equal(out[0], torch.zeros(2, 64))
    assert torch.equal(lse[0], torch.full((2,), -torch.inf))
    assert_close(out[1], case.expected()[0][1].float(), tolerance=PACKED_ATTENTION)


def test_threads_change_no_bit() -> None:
    case = make(KVFormat(128), 8, 2, (50, 1, 17))
    found = []
    for count in (1, 2, 3):
        pool = Pool(count)
        found.append(case.run(threads=pool))
        pool.close()
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


def test_a_sharp_peak_is_found() -> None:
    case = make(KVFormat(64), 1, 1, (33,))
    keys, _ = dequantize_blocks(case.pool, case.form)
    place = int(case.table[0, 20])
    case.q[0, 0] = 100 * keys[place, 0, 17] / keys[place, 0, 17].norm()
    assert_close(case.run()[0], case.expected()[0].float(), tolerance=PACKED_ATTENTION)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"q": c.q.double()}, "q must be contiguous float32"),
        (lambda c: {"q": c.q[:, :, :32]}, "q must be"),
        (lambda c: {"pool": c.pool[:, :, :-64]}, "pool must be contiguous uint8"),
        (lambda c: {"pool": c.pool[:, :1].repeat(1, 3, 1)}, "no multiple of 3 KV heads"),
        (lambda c: {"compressed": c.compressed + 1}, "in blocks of 64"),
        (lambda c: {"compressed": c.compressed + 640}, "the table has 5 blocks"),
        (lambda c: {"compressed": c.compressed.long()}, "compressed must be contiguous int32"),
        (lambda c: {"table": c.table.long()}, "block_table must be contiguous int32"),
        (lambda c: {"table": torch.full_like(c.table, 100)}, "names block 100 of a pool of 8"),
        (lambda c: {"form": KVFormat(64, k_form="token")}, "K must be quantized per channel"),
    ],
)
def test_other_operands_are_refused(change: object, message: str) -> None:
    case = make(KVFormat(64), 2, 2, (2, 5))
    with pytest.raises(OpError, match=message):
        Case(**{**case.__dict__, **change(case)}).run()  # type: ignore[operator]
