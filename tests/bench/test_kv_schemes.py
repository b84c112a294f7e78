"""What each way to compress K and V promises, on random tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench import kv_schemes
from bench.kv_scheme_list import HEAD_DIM, schemes
from qoff.kernels.layout.kv_format import KVFormat
from tests.tolerances import assert_close

SHAPE = (1, 2, 128, HEAD_DIM)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SHAPE) * torch.linspace(0.2, 3, HEAD_DIM) + torch.randn(2, 1, HEAD_DIM)


@pytest.fixture
def rotary() -> tuple[Tensor, Tensor]:
    angles = torch.arange(SHAPE[2])[:, None] * torch.rand(HEAD_DIM // 2)
    return angles.cos(), angles.sin()


def error(found: Tensor, x: Tensor) -> float:
    return float((found - x).square().mean())


def test_all_have_names_of_their_own_and_keep_shapes(
    x: Tensor, rotary: tuple[Tensor, Tensor]
) -> None:
    found = schemes({0: torch.randn(2, HEAD_DIM)}, rotary)
    assert len({scheme.name for scheme in found}) == len(found)
    for scheme in found:
        for keep in (scheme.keys, scheme.values):
            kept = keep(0, x)
            assert kept.shape == x.shape
            assert error(kept, x) < 0.05 * float(x.var())
        assert (scheme.keys(0, x) is x) + (scheme.values(0, x) is x) <= 1


def test_fits_are_no_worse_than_min_and_max(x: Tensor) -> None:
    plain = error(kv_schemes.per_channel(kv_schemes.min_max)(0, x), x)
    for fit in (kv_schemes.least_squares, kv_schemes.clipped):
        assert error(kv_schemes.per_channel(fit)(0, x), x) <= plain


def test_simulated_channels_are_those_of_the_records(x: Tensor) -> None:
    simulated = kv_schemes.per_channel(kv_schemes.min_max)(0, x)
    assert_close(simulated, kv_schemes.packed_keys(KVFormat(HEAD_DIM), opening=False)(0, x))


def test_first_tokens_that_are_not_packed_are_exact(x: Tensor) -> None:
    keep = kv_schemes.without_first(kv_schemes.per_channel(kv_schemes.min_max), 3)
    kept = keep(0, x)
    assert torch.equal(kept[:, :, :3], x[:, :, :3])
    assert error(kept[:, :, 3:], x[:, :, 3:]) > 0


def test_before_rope_undoes_what_it_does(x: Tensor, rotary: tuple[Tensor, Tensor]) -> None:
    assert_close(kv_schemes.before_rope(kv_schemes.exact, *rotary)(0, x), x)


def test_towards_the_mean_query_scores_with_it_hardly_change(x: Tensor) -> None:
    mean = torch.randn(2, HEAD_DIM)
    plain = kv_schemes.packed_keys(KVFormat(HEAD_DIM))(0, x)
    kept = kv_schemes.towards({0: mean})(0, x)
    off, before = (((y - x) * mean[:, None]).sum(-1).square().mean() for y in (kept, plain))
    assert float(off) < 0.2 * float(before)
    assert error(kept, x) < 2 * error(plain, x)


def test_q4_0_keeps_the_largest_of_32_channels() -> None:
    x = torch.randn(SHAPE).half().float()
    kept = kv_schemes.q4_0(0, x)
    groups, found = x.unflatten(-1, (-1, 32)), kept.unflatten(-1, (-1, 32))
    at = groups.abs().argmax(-1, keepdim=True)
    assert_close(found.gather(-1, at), groups.gather(-1, at), tolerance=1e-3)
    codes = found / (groups.gather(-1, at) / -8)
    assert bool(((codes - codes.round()).abs() < 0.01).all())
    assert float(codes.min()) > -8.1
    assert float(codes.max()) < 7.1
