"""What the CPU's ops ask of a pool is what plans count; parts of a pass change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qoff.kernels.cpu import ops as cpu
from qoff.kernels.cpu.attention import scratch as attention
from qoff.kernels.cpu.jit.emit import HAS_BF16
from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.linear.dequantize import dequantize
from qoff.kernels.cpu.linear.scratch import dequantize_bytes, linear_bytes, low_rank_bytes
from qoff.kernels.cpu.moe.scratch import ExpertSizes, route_bytes
from qoff.kernels.cpu.optim.scratch import update_bytes
from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.kernels.cpu.packed_attention import scratch as packed
from qoff.kernels.cpu.packed_attention.pack import pack_blocks
from qoff.kernels.cpu.packed_attention.places import Origins
from qoff.kernels.cpu.recurrent.scratch import conv_bytes, delta_bytes
from qoff.kernels.cpu.sampling.sampling import draw, follows_torch, multinomial
from qoff.kernels.cpu.sampling.scratch import sampling_bytes
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.distribution import Shape
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import HeadShape, cache_shapes
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.low_rank import LowRanks
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.qexperts import ExpertsMlp
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.routing import Routing
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.sampling import noise_size
from tests.kernels import (
    recurrent_states,
    test_delta,
    test_latent,
    test_low_rank,
    test_mamba,
    test_packed_attention,
    test_packed_select,
    test_short_conv,
)
from tests.kernels.operands import random_experts, random_weight

Asked = Callable[..., list[int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What some work asks of pools."""

    def record(work: Callable[[], object]) -> list[int]:
        found: list[int] = []
        taken = Pool.workspace

        def workspace(self: Pool, nbytes: int) -> int:
            found.append(nbytes)
            return taken(self, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "workspace", workspace)
            work()
        return found

    return record


@pytest.fixture(scope="module")
def threads() -> int:
    return default_pool().threads


@pytest.mark.parametrize("normed", [False, True])
def test_products(asked: Asked, threads: int, normed: bool) -> None:
    x, weight, norm = torch.randn(7, 128), random_weight(48, 128, 4, 32), Norm(torch.rand(128), 0.1)
    more: dict[str, Any] = {"norm": norm} if normed else {}
    wanted = linear_bytes(threads, 7, 128, 32, normed=normed)
    assert asked(lambda: cpu.w4_linear(x, weight, **more)) == [wanted]
    assert asked(lambda: cpu.w4_linear(x, weight, activation_bits=8, **more)) == [wanted]
    ranks, which = LowRanks([test_low_rank.adapter([3, 5])]), torch.zeros(7, dtype=torch.int64)
    norm, x = Norm(torch.rand(test_low_rank.K), 0.1), x[:, : test_low_rank.K]
    more = {"norm": norm} if normed else {}
    wanted = low_rank_bytes(threads, 7, test_low_rank.K, ranks.rank, normed=normed)
    assert asked(lambda: cpu.low_rank(x, ranks, which, slice(0, 32), **more)) == [wanted]


def test_matrices_as_dense_ones_and_steps_of_optimizers(asked: Asked, threads: int) -> None:
    weight, out = random_weight(48, 128), torch.empty(48, 128)
    assert asked(lambda: dequantize(weight, out)) == [dequantize_bytes(threads)]
    master, grad = torch.randn(2, 256)
    moments = Moments(torch.zeros(256))
    assert asked(lambda: update(Rule("sgd", 0.1), master, grad, moments)) == [update_bytes(threads)]


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("shape", test_latent.SHAPES)
def test_latents(asked: Asked, threads: int, shape: attention.LatentShape, tokens: int) -> None:
    weight, norm = test_latent.weight_of(shape), test_latent.norm_of(shape)
    q, kv = torch.randn(tokens, shape.heads * shape.query_dim), torch.randn(tokens, shape.head_dim)
    wanted = [attention.latent_bytes(threads, shape)]
    assert asked(lambda: cpu.absorb(q, kv, weight, norm, shape)) == wanted
    x = torch.randn(tokens, shape.heads * shape.latent)
    assert asked(lambda: cpu.expand(x, weight, shape)) == wanted


@pytest.mark.parametrize("shape", test_delta.SHAPES, ids=str)
def test_linear_attention(asked: Asked, threads: int, shape: DeltaShape) -> None:
    ragged = Ragged.of([7, 1], [0, 0])
    given, states = test_delta.weights(shape), recurrent_states.states(shape, ragged, [0, 1])
    operands = (*test_delta.inputs(shape, 8), given, shape, states, ragged)
    assert asked(lambda: cpu.delta(*operands)) == [delta_bytes(threads, shape)]


@pytest.mark.parametrize("shape", test_mamba.SHAPES, ids=str)
def test_mamba_layers(asked: Asked, threads: int, shape: MambaShape) -> None:
    ragged = Ragged.of([7, 1], [0, 0])
    weights, states = test_mamba.weights_of(shape), recurrent_states.states(shape, ragged, [0, 1])
    operands = (test_mamba.inputs(shape, 8), weights, shape, states, ragged)
    assert asked(lambda: cpu.mamba(*operands)) == [conv_bytes(threads, shape)]


@pytest.mark.parametrize("shape", test_short_conv.SHAPES, ids=str)
def test_short_convolutions(asked: Asked, threads: int, shape: ShortConvShape) -> None:
    ragged = Ragged.of([7, 1], [0, 0])
    weight, states = (
        test_short_conv.weight_of(shape),
        recurrent_states.states(shape, ragged, [0, 1]),
    )
    operands = (test_short_conv.inputs(shape, 8), weight, shape, states, ragged)
    assert asked(lambda: cpu.short_conv(*operands)) == [conv_bytes(threads, shape)]


def attend(
    shape: HeadShape, counts: list[int], pasts: list[int], bits: int = 16
) -> Callable[[], torch.Tensor]:
    ragged = Ragged.of(counts, pasts)
    keys, values = map(torch.randn, cache_shapes(len(counts), shape, 1040))
    cache = LayerCache(keys, values, ragged.positions, ragged.longest)
    qkv = torch.randn(ragged.tokens, shape.qkv_width)
    return lambda: cpu.attention(qkv.clone(), shape, cache, ragged, activation_bits=bits)


SHAPES = [
    HeadShape(6, 2, 64, 0.1),
    HeadShape(5, 1, 96, 0.1, window=100, latent=64),
    HeadShape(16, 1, 32, 0.1),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention(asked: Asked, threads: int, shape: HeadShape) -> None:
    for pasts in ([511, 3], [512, 1030, 7]):
        each = attention.token_bytes(shape, attention.decode_runs(max(pasts)))
        wanted = attention.decode_bytes(threads, len(pasts) * each)
        assert asked(attend(shape, [1] * len(pasts), pasts)) == [wanted]
    for bits in (16, 8):
        width = 2 if bits == 8 and HAS_BF16 else 4
        wanted = attention.prefill_bytes(threads, shape, width)
        assert asked(attend(shape, [30, 1], [600, 0], bits)) == [wanted]


@pytest.mark.parametrize(
    "form", [KVFormat(64), KVFormat(80), KVFormat(256, 8, 8), KVFormat(96, 4, 4, 64)]
)
def test_attention_to_packed_blocks(asked: Asked, threads: int, form: KVFormat) -> None:
    for blocks in ((3, 1), (20, 0, 9)):
        case = test_packed_attention.make(form, 6, 1, blocks)
        each = packed.token_bytes(form, 6, packed.decode_runs(max(blocks)))
        assert asked(case.run) == [packed.attend_bytes(threads, form, len(blocks) * each)]
    case = test_packed_attention.make(form, 6, 1, (20, 3), (40, 2))
    assert asked(case.run) == [packed.attend_bytes(threads, form, 0)]


def test_selecting_and_packing_blocks(asked: Asked, threads: int) -> None:
    case = test_packed_select.make(KVFormat(64), 4, 2, ((9, 4), (30, 0)))
    wanted = packed.select_bytes(threads, 2, 2, 30 + 4)
    assert asked(lambda: case.select(0.5)) == [wanted]
    form, shape = KVFormat(80), HeadShape(2, 2, 80, 0.1)
    keys, values = map(torch.randn, cache_shapes(1, shape, 64))
    records = torch.empty(1, 2, form.nbytes, dtype=torch.uint8)
    origins = Origins(np.zeros((1, 4), np.int64))
    wanted = packed.pack_bytes(threads, form)
    assert asked(lambda: pack_blocks(keys, values, form, origins, records)) == [wanted]


def test_experts(asked: Asked, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = ExpertsMlp(*random_experts(5, 64, 96), "silu")
    sizes = ExpertSizes(64, 96, 64, (32, 32))
    x, ids = torch.randn(11, 64), torch.rand(11, 5).argsort(1)[:, :2].contiguous()
    weights = torch.rand(11, 2)
    assert asked(lambda: cpu.experts(x, ids, weights, mlp)) == [sizes.nbytes(threads, 11, 2, 5)]
    whole = cpu.experts(x, ids, weights, mlp)
    monkeypatch.setattr("qoff.kernels.cpu.moe.scratch._MOST", 10_000)
    found = asked(lambda: cpu.experts(x, ids, weights, mlp))
    assert len(found) > 1
    assert max(found) == sizes.nbytes(threads, 11, 2, 5)
    assert torch.equal(cpu.experts(x, ids, weights, mlp), whole)


@pytest.mark.parametrize("correction", [None, torch.zeros(8)])
def test_routes(asked: Asked, threads: int, correction: torch.Tensor | None) -> None:
    scores, routing = torch.randn(3, 8), Routing(2, "sigmoid")
    judged = routing.judged(correction is not None)
    wanted = route_bytes(threads, 8, judged)
    assert judged
    assert asked(lambda: cpu.route(scores, routing, correction)) == [wanted]
    assert route_bytes(threads, 8, False) == 0
    assert asked(lambda: cpu.route(scores, Routing(2, "topk"))) == []


def test_choosing_tokens(asked: Asked) -> None:
    rows, shape = list(torch.randn(3, 1000)), Shape(1.0, 0, 0.9, 0.0)
    noise = torch.rand(3, noise_size(1000), dtype=torch.float64)
    wanted = [sampling_bytes(1000, 3, of_torch=False)]
    assert asked(lambda: draw(rows, [shape] * 3, noise)) == wanted
    if follows_torch():
        wanted = [sampling_bytes(1000, 3, of_torch=True)]
        assert asked(lambda: multinomial(rows, shape)) == wanted


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(nbytes: int) -> None:
        monkeypatch.setattr(attention, "_OF_THREAD", 0)
        monkeypatch.setattr(attention, "_PARTIALS", nbytes)

    return limit


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_pass_in_parts_has_the_same_bits(
    asked: Asked, in_parts: Callable[[int], None], shape: HeadShape
) -> None:
    run = attend(shape, [1] * 5, [0, 700, 511, 1030, 512])
    whole, most = run(), asked(run)
    for tokens in (1, 2, 3):
        in_parts(tokens * attention.token_bytes(shape, 3))
        assert torch.equal(run(), whole)
        assert asked(run) < most


@pytest.mark.parametrize("form", [KVFormat(64), KVFormat(96, 4, 4, 64)])
def test_so_has_one_over_packed_blocks(
    asked: Asked, in_parts: Callable[[int], None], form: KVFormat
) -> None:
    case = test_packed_attention.make(form, 6, 1, (20, 0, 9, 17, 3))
    out, lse = case.run()
    most = asked(case.run)
    for tokens in (1, 2, 3):
        in_parts(packed.token_bytes(form, 6, 3) * tokens)
        assert all(map(torch.equal, case.run(), (out, lse)))
        assert asked(case.run) < most


def test_selected_blocks_are_attended_in_parts(in_parts: Callable[[int], None]) -> None:
    case = test_packed_select.make(KVFormat(64), 4, 2, ((30, 4), (9, 25), (2, 17), (40, 0)))
    whole = case.attend(0.6)
    in_parts(packed.token_bytes(case.form, 4, 3))
    assert torch.equal(case.attend(0.6), whole)


@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_partial_results_of_shorter_contexts_are_counted_too(threads: int, tokens: int) -> None:
    form, heads, longest = KVFormat(576, 4, 4, latent=512), 128, 128
    most = attention.most_partials(threads, tokens, packed.token_bytes(form, heads, longest))
    for runs in range(1, longest + 1):
        each = packed.token_bytes(form, heads, runs)
        assert each * min(tokens, attention.partials_together(threads, each)) <= most
