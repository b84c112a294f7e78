"""What each way to pack K and V promises, on random tensors, and the bench that compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import kv_accuracy, kv_schemes
from bench.every_token import seen_as_they_are
from bench.kv_schemes import least_squares, min_max, per_channel
from tests.tiny_models import tiny_checkpoint
from tests.tolerances import assert_close

SHAPE = (127, 2, 64)  # tokens that do not fill the last block


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SHAPE) * torch.linspace(0.2, 3, 64) + torch.randn(2, 64)


def error(found: Tensor, x: Tensor) -> float:
    return float((found - x).square().mean())


def test_all_have_names_of_their_own_and_keep_shapes(x: Tensor) -> None:
    found = kv_schemes.schemes()
    assert len({scheme.name for scheme in found}) == len(found)
    for scheme in found:
        k, v = scheme.round_trip(x, x, 0)
        for kept in (k, v):
            assert kept.shape == x.shape
            assert error(kept, x) < (0.05 if scheme.bits > 4 else 0.3) * float(x.var())
        assert (k is x) + (v is x) <= 1
        assert ("alone" in scheme.name) == (k is x or v is x)


def test_fits_are_no_worse_than_min_and_max(x: Tensor) -> None:
    assert error(per_channel(least_squares)(x), x) <= error(per_channel(min_max)(x), x)


def test_simulated_channels_are_those_of_the_records(x: Tensor) -> None:
    (own,) = (s for s in kv_schemes.schemes() if s.name == "K alone")
    kept = own.round_trip(x, x, 0)[0]
    assert_close(per_channel(min_max)(x)[64:], kept[64:])  # the first block keeps its first token


def test_first_tokens_that_are_not_packed_are_exact(x: Tensor) -> None:
    kept = kv_schemes.without_first(per_channel(min_max), 3)(x)
    assert torch.equal(kept[:3], x[:3])
    assert error(kept[3:], x[3:]) > 0


def test_the_bench_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    monkeypatch.setattr(kv_accuracy, "fetch_checkpoint", lambda: checkpoint)
    monkeypatch.setattr(kv_accuracy, "WINDOW", 200)
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("The quick brown fox jumps over the lazy dog, while nine judges watch. " * 6)
    options = ["--text", str(text), "--only", "4 and 4;8 and 8;K alone, before RoPE", "--layers"]
    kv_accuracy.main([*options, "--windows", "2", "--out", str(out)])
    found = json.loads(out.read_text())["measured"]
    assert found["4 and 4"]["kl"] > 5 * found["8 and 8"]["kl"] > 0
    assert found["K alone, before RoPE"]["kl"] > 0
    layers = [found[f"layer {i}"] for i in range(2)]
    assert all(0 < layer[what] < found["4 and 4"]["kl"] for layer in layers for what in "KV")


@pytest.mark.parametrize("window", [0, 64, 100, 1000])
def test_a_query_sees_what_a_cache_has_packed_by_then(window: int) -> None:
    tokens, q = 300, torch.randn(300, 4, 16)
    k, v, other_k, other_v = torch.randn(4, tokens, 2, 16).unbind()
    found = seen_as_they_are(q, k, v, other_k, other_v, window, 0.25)
    for at in (0, 63, 64, 127, 128, 227, 299):
        packed = max(0, at + 1 - window) // 64 * 64
        keys, values = (
            torch.cat((b[:packed], a[packed : at + 1])).repeat_interleave(2, 1)
            for a, b in ((k, other_k), (v, other_v))
        )
        part = (torch.einsum("hd,khd->hk", q[at], keys) * 0.25).softmax(-1)
        assert_close(found[at], torch.einsum("hk,khd->hd", part, values))
