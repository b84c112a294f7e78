"""Triton's attention with heads of 512 channels in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from qoff.errors import OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference import attention as reference
from tests.kernels.attention_operands import random_cache
from tests.kernels.test_triton_latent import config_of
from tests.tolerances import assert_close
from tests.triton_module import triton_module

latent = triton_module("latent.attention")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU"
)
SHAPE = HeadShape(6, 2, 512, 0.05)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bits", [(4, 4), (8, 3)])
def test_decode_attends_to_blocks_and_the_ring(bits: tuple[int, int], split: bool) -> None:
    form = KVFormat(512, *bits)
    cache = random_cache(form, 2, [(2, 5), (0, 1), (3, 40)])
    q = torch.randn(3, 6, 512).half()
    unread = torch.full((3, 2, 512), torch.nan).half()
    out, lse = latent.latent_attention(q, unread, cache, SHAPE, config_of(split), value=unread)
    expected = reference.decode_attention(q.double(), cache, SHAPE)
    assert_close(out, expected[0], dtype=torch.float16)
    assert_close(lse, expected[1], dtype=torch.float16)


@pytest.mark.parametrize("split", [False, True])
def test_prefill_attends_to_blocks_the_ring_and_itself(split: bool) -> None:
    rows, dtype = [37, 1, 0, 9], torch.bfloat16
    cache = random_cache(KVFormat(512), 2, [(2, 5), (0, 0), (1, 3), (1, 64)], dtype, rows=rows)
    both = torch.randn(sum(rows), 10, 512).to(dtype)
    q, k, v = both.split([6, 2, 2], 1)
    out, lse = latent.latent_attention(q, k, cache, SHAPE, config_of(split), value=v)
    expected = reference.prefill_attention(q.double(), k.double(), v.double(), cache, SHAPE)
    assert_close(out, expected[0], dtype=dtype)
    assert_close(lse, expected[1], dtype=dtype)


def test_windows_and_keys_that_are_values_are_refused() -> None:
    cache = random_cache(KVFormat(512), 2, [(1, 5)])
    q, k = torch.randn(1, 8, 512).half().split([6, 2], 1)
    with pytest.raises(OpError, match="neither window nor soft cap"):
        latent.latent_attention(q, k, cache, HeadShape(6, 2, 512, 0.05, 70), value=k)
    with pytest.raises(OpError, match="have no values of their own"):
        latent.latent_attention(q, k, cache, SHAPE)
