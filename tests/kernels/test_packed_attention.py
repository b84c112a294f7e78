"""Decode attention over packed blocks on the CPU, against softmax over the dequantized cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.cpu.jit.pool import Pool
from qoff.kernels.cpu.packed_attention.attention import packed_attention
from qoff.kernels.layout.kv_format import HEAD_DIMS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.kv_blocks import dequantize_blocks, quantize_blocks
from tests.tolerances import PACKED_ATTENTION, assert_close


@dataclass(frozen=True)
class Case:
    """Sequences of some packed blocks each, in shuffled places of a pool, and their new tokens."""

    form: KVFormat
    heads: int
    q: Tensor  # [M, heads * D]
    pool: Tensor
    table: Tensor
    packed: list[int]
    ragged: Ragged

    @property
    def scale(self) -> float:
        return self.form.head_dim**-0.5

    def run(self, **options: object) -> tuple[Tensor, Tensor]:
        table = BlockTable(self.table, self.packed, self.ragged)
        tokens = PackedTokens(self.form, self.pool, table)
        return packed_attention(self.q, self.heads, tokens, scale=self.scale, **options)

    def expected(self, window: int = 0, soft_cap: float = 0.0) -> tuple[Tensor, Tensor]:
        """Output [M, heads * D] and log-sum-exp [M, heads] in float64."""
        k, v = dequantize_blocks(self.pool, self.form)
        group = self.heads // self.pool.shape[1]
        width = self.heads * self.form.value_dim
        out, lse = torch.zeros(len(self.q), width, dtype=torch.float64), []
        for row, (slot, position) in enumerate(
            zip(self.ragged.slots, self.ragged.positions, strict=True)
        ):
            blocks = self.table[slot, : self.packed[slot] // 64].long()
            # [blocks, kv_heads, 64, D] -> [heads, tokens, D]
            keys, values = (
                x[blocks].transpose(0, 1).flatten(1, 2).double().repeat_interleave(group, 0)
                for x in (k, v)
            )
            q = self.q[row].double().view(self.heads, -1, 1)
            scores = (keys @ q)[..., 0] * self.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if window > 0:
                scores[:, : max(0, int(position) + 1 - window)] = -torch.inf
            elif window < 0:
                scores[:, : int(position) // -window * -window] = -torch.inf
            lse.append(scores.logsumexp(-1))
            if not torch.isinf(lse[-1]).any():
                out[row] = (scores.softmax(-1)[:, None] @ values).flatten()
        return out, torch.stack(lse)


def make(
    form: KVFormat,
    heads: int,
    kv_heads: int,
    blocks: tuple[int, ...],
    counts: tuple[int, ...] | None = None,
    recent: int = 7,
) -> Case:
    """Sequences of `blocks` packed blocks, `recent` tokens that are not, and `counts` new ones."""
    total = sum(blocks) + 1
    k, v = torch.randn(2, total, kv_heads, 64, form.head_dim)
    k[..., 3] *= 20  # an outlier channel, as keys have
    order = torch.randperm(total)
    table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32)
    start = 0
    for s, count in enumerate(blocks):
        table[s, :count] = order[start : start + count]
        start += count
    packed = [64 * count for count in blocks]
    ragged = Ragged.of(counts or [1] * len(blocks), [n + recent for n in packed])
    q = torch.randn(ragged.tokens, heads * form.head_dim)
    return Case(form, heads, q, quantize_blocks(k, v, form), table, packed, ragged)


def check(case: Case, **options: Any) -> None:
    out, lse = case.run(**options)
    options.pop("threads", None)
    expected_out, expected_lse = case.expected(**options)
    assert_close(out, expected_out.float(), tolerance=PACKED_ATTENTION)
    assert_close(lse, expected_lse.float(), tolerance=1e-4)


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (4, 8), (8, 8), (4, 2), (3, 3), (2, 3)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_equals_attention_over_the_dequantized_cache(head_dim: int, bits: tuple[int, int]) -> None:
    check(make(KVFormat(head_dim, *bits), 6, 2, (1, 3, 40)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("head_dim", "latent"), [(576, 512), (96, 64), (64, 32), (640, 320)])
def test_values_may_be_channels_of_the_keys(head_dim: int, latent: int, bits: int) -> None:
    form = KVFormat(head_dim, bits, bits, latent)
    check(make(form, 6, 1, (1, 3, 12)))
    check(make(form, 18, 1, (2, 5), (3, 1)), window=100, soft_cap=3.0)


@pytest.mark.parametrize(("head_dim", "latent"), [(256, 0), (640, 512)])
def test_the_largest_score_of_8_bit_keys_fits(head_dim: int, latent: int) -> None:
    form = KVFormat(head_dim, 8, 8, latent)
    case = make(form, 2, 1, (1,))
    k, v = torch.rand(2, 2, 1, 64, head_dim) / 100
    k[..., 5, :] = 1  # a token whose codes are all 255, and queries without a small channel
    check(replace(case, q=torch.ones_like(case.q), pool=quantize_blocks(k, v, form)))


def test_the_working_memory_of_a_prompt_does_not_grow_with_its_tokens() -> None:
    asked: list[int] = []

    class Asking(Pool):
        def workspace(self, nbytes: int) -> int:
            asked.append(nbytes)
            return super().workspace(nbytes)

    pool = Asking(2)
    for count in (2, 40):
        check(make(KVFormat(64), 6, 2, (9,), (count,)), threads=pool)
    pool.close()
    assert asked[0] == asked[1]


@pytest.mark.parametrize("bits", [(4, 4), (3, 2)])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 17, 40])
def test_any_number_of_queries_shares_a_kv_head(heads: int, bits: tuple[int, int]) -> None:
    check(make(KVFormat(64, *bits), heads, 1, (2, 5)))
    check(make(KVFormat(64, *bits), heads, 1, (2, 5), (3, 19)))


@pytest.mark.parametrize("window", [0, 100, -100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (9, 3), (10, 5), (16, 4), (64, 8)])
def test_neighbouring_kv_heads_are_attended_in_turns(
    heads: int, kv_heads: int, window: int
) -> None:
    check(make(KVFormat(64), heads, kv_heads, (11, 3, 1)), window=window)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_new_tokens_attend_together(head_dim: int) -> None:
    check(make(KVFormat(head_dim), 6, 2, (20, 0, 3), (37, 5, 1)))


@pytest.mark.parametrize("counts", [None, (40, 3, 70)])
@pytest.mark.parametrize("window", [1, 8, 64, 100, 1500, -1, -8, -64, -100, -1100, -4000])
def test_a_window_leaves_out_the_oldest_tokens(window: int, counts: tuple[int, ...] | None) -> None:
    check(make(KVFormat(64), 4, 2, (40, 17, 3), counts), window=window)


@pytest.mark.parametrize("counts", [None, (40, 3, 70)])
def test_scores_level_off(counts: tuple[int, ...] | None) -> None:
    check(make(KVFormat(64), 4, 2, (40, 17, 3), counts), soft_cap=3.0, window=100)


def test_a_sequence_without_blocks_weighs_nothing() -> None:
    case = make(KVFormat(64), 2, 2, (0, 2))
    out, lse = case.run()
    assert torch.equal(out[0], torch.zeros(2 * 64))
    assert torch.equal(lse[0], torch.full((2,), -torch.inf))
    check(case)


def test_merges_into_attention_to_other_tokens() -> None:
    case = make(KVFormat(64), 4, 2, (3, 1), (2, 1))
    part, part_lse = case.run()
    other, other_lse = torch.randn_like(part), part_lse + torch.randn_like(part_lse)
    other_lse[0, 0] = -torch.inf
    weights = torch.stack((part_lse, other_lse)).softmax(0)[..., None]
    expected = weights[0] * part.view(3, 4, 64) + weights[1] * other.view(3, 4, 64)
    out, lse = case.run(out=other, lse=other_lse.clone())
    assert out is other
    assert_close(out, expected.flatten(1), tolerance=1e-5)
    assert_close(lse, torch.logaddexp(part_lse, other_lse), tolerance=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("blocks", [1, 40])
@pytest.mark.parametrize("merged", [False, True])
def test_memory_that_holds_no_block_shows(merged: bool, blocks: int, soft_cap: float) -> None:
    case = make(KVFormat(64), 6, 2, (blocks, 2))
    case.pool[case.table[0, blocks - 1]] = 0xFF
    others = {}
    if merged:
        others = {"out": torch.randn(2, 6 * 64), "lse": torch.zeros(2, 6)}
    out, _ = case.run(soft_cap=soft_cap, **others)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("bits", [(4, 4), (4, 8)])
def test_halves_of_the_values_may_be_of_different_size(bits: tuple[int, int]) -> None:
    """Each is as exact as if the other were as large."""
    case = make(KVFormat(128, *bits), 4, 1, (6,))
    _, _, _, _, scale, minimum = case.form.views(case.pool)
    assert scale.shape[-1] == 2 * 64
    before, _ = case.run()
    for field in (scale, minimum):
        field[..., 64:] /= 64
    after, _ = case.run()
    small = after.view(4, 2, 64)[:, 1]
    assert_close(64 * small, before.view(4, 2, 64)[:, 1], tolerance=2e-3)
    check(case)


def test_threads_change_no_bit() -> None:
    for counts in (None, (1, 30, 2)):
        case = make(KVFormat(128), 8, 2, (50, 1, 17), counts)
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
    case.q[0] = 100 * keys[place, 0, 17] / keys[place, 0, 17].norm()
    check(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"q": c.q.double()}, "queries must be float32"),
        (lambda c: {"q": c.q[:, :32]}, "32 columns are less than 2 heads of 64"),
        (lambda c: {"pool": c.pool[:, :, :-64]}, "pool must be uint8"),
        (lambda c: {"pool": c.pool[:, :1].repeat(1, 3, 1)}, "no multiple of 3 KV heads"),
        (lambda c: {"packed": [129, 320]}, "slot 0: 129 of 135 tokens cannot be packed in blocks"),
        (lambda c: {"packed": [192, 320]}, "slot 0: 192 of 135 tokens"),
        (lambda c: {"packed": [128]}, "no packed tokens or no blocks for slot 1"),
        (lambda c: {"table": c.table[:, :4].contiguous()}, "room for 4 blocks"),
        (lambda c: {"table": c.table.long()}, "a block table is contiguous int32"),
        (lambda c: {"table": torch.full_like(c.table, 100)}, "names block 100 of a pool of 8"),
        (lambda c: {"table": torch.full_like(c.table, -1)}, "block -1 is no block"),
    ],
)
def test_other_operands_are_refused(change: Any, message: str) -> None:
    case = make(KVFormat(64), 2, 2, (2, 5))
    with pytest.raises(OpError, match=message):
        replace(case, **change(case)).run()
