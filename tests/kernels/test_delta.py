"""Gated DeltaNet and KDA: the CPU's op is the reference's, whose recurrence is transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from tests.kernels.recurrent_states import states
from tests.tolerances import assert_close

SHAPES = [
    DeltaShape(2, 4, 16, 16, 4),
    DeltaShape(2, 2, 32, 64, 2),
    DeltaShape(1, 3, 48, 96, 5),
    DeltaShape(2, 4, 128, 128, 4),
    DeltaShape(2, 2, 32, 32, 4, by_channel=True, rank=32),
    DeltaShape(1, 2, 48, 128, 3, by_channel=True, rank=16),
    DeltaShape(2, 2, 32, 64, 4, by_channel=True, floor=-5.0),
    DeltaShape(3, 3, 48, 96, 4, learns=2.0),
]


def weights(shape: DeltaShape) -> DeltaWeights:
    heads = shape.value_heads
    return DeltaWeights(
        torch.randn(shape.taps * shape.channels),
        torch.rand(heads).mul(8).add(0.1).log(),
        torch.randn(shape.decays) * 10,  # some steps are beyond where softplus is linear
        torch.rand(shape.value_dim) + 0.5,
    )


def inputs(shape: DeltaShape, tokens: int) -> tuple[Tensor, ...]:
    """qkv, z, b and a: columns of a wider matrix, as they lie in a workspace."""
    widths = (shape.channels, shape.values, shape.value_heads, shape.decays, 5)
    return torch.randn(tokens, sum(widths)).split(widths, 1)[:4]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_passes_of_any_lengths_are_the_references(shape: DeltaShape) -> None:
    given, slots, lengths = weights(shape), [2, 0, 3], [0, 0, 0]
    kept = [states(shape, Ragged.of([1, 1, 1], lengths), slots) for _ in range(2)]
    for counts in ([5, 1, 19], [1, 2, 3], [1, 1, 1]):
        ragged = Ragged.of(counts, lengths)
        lengths = [have + new for have, new in zip(lengths, counts, strict=True)]
        rows = inputs(shape, ragged.tokens)
        spans = states(shape, ragged, slots).spans
        wanted, found = (
            ops.delta(*_copies(rows), given, shape, replace(one, spans=spans), ragged)
            for ops, one in zip((reference_ops, cpu), kept, strict=True)
        )
        assert_close(found, wanted)
        for here, there in ((kept[0].conv, kept[1].conv), (kept[0].memory, kept[1].memory)):
            assert_close(there[slots], here[slots])
    assert kept[1].memory[1].isnan().all()  # a slot of nobody's


def _copies(rows: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone() for x in rows]


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]], ids=str)
def test_a_prompt_in_pieces_has_the_bits_of_the_whole(shape: DeltaShape) -> None:
    given, whole = weights(shape), Ragged.of([9], [0])
    rows = inputs(shape, 9)
    wanted = cpu.delta(*_copies(rows), given, shape, states(shape, whole, [0]), whole)
    kept, found = states(shape, whole, [0]), []
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        ragged = Ragged.of([end - begin], [begin])
        now = replace(kept, spans=torch.tensor([[0, end - begin, 0]]))
        part = tuple(x[begin:end] for x in rows)
        found.append(cpu.delta(*_copies(part), given, shape, now, ragged))
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize(
    "shape",
    [
        DeltaShape(2, 4, 16, 32, 4),
        DeltaShape(2, 4, 16, 32, 4, learns=2.0),
        DeltaShape(4, 4, 16, 32, 4, by_channel=True),
        DeltaShape(4, 4, 16, 32, 4, by_channel=True, floor=-5.0),
    ],
    ids=str,
)
def test_the_recurrence_is_that_of_transformers(shape: DeltaShape) -> None:
    given, ragged, kda = weights(shape), Ragged.of([70], [0]), shape.by_channel
    (mixed, z, b, a), kept = inputs(shape, 70), states(shape, ragged, [1])
    found = reference_ops.delta(mixed, z, b, a, given, shape, kept, ragged)
    kernel = given.conv.view(shape.taps, shape.channels).T[:, None]
    padded = F.pad(mixed.T, (shape.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], kernel, groups=shape.channels)[0].T)
    query, key, value = (
        x.unflatten(1, (heads, -1))[None]
        for x, heads in zip(
            mixed.split([shape.keys, shape.keys, shape.values], 1),
            (shape.key_heads, shape.key_heads, 4),
            strict=True,
        )
    )
    far = a + given.dt_bias
    far = far.unflatten(1, (4, -1)) if kda else far
    rate = given.decay.exp()[:, None] if kda else given.decay.exp()
    decay = shape.floor * (rate * far).sigmoid() if shape.floor else -rate * F.softplus(far)
    rule = chunk_kimi_delta_attention if kda else torch_chunk_gated_delta_rule
    out, memory = rule(
        query, key, value, g=decay[None], beta=shape.learns * b.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out = out[0] * torch.rsqrt(out[0].square().mean(-1, keepdim=True) + shape.norm_eps)
    assert_close(found, (out * given.norm).flatten(1) * (z.sigmoid() if kda else F.silu(z)))
    assert_close(kept.memory[1].transpose(1, 2).flatten(2), memory[0])


def test_bad_operands_are_refused() -> None:
    shape, ragged = SHAPES[0], Ragged.of([2], [0])
    (*rows, a), given, kept = inputs(shape, 2), weights(shape), states(shape, ragged, [0])
    for changed in (replace(kept, memory=kept.memory[:, :1]), replace(kept, spans=kept.spans[:0])):
        with pytest.raises(OpError, match="states"):
            cpu.delta(*rows, a, given, shape, changed, ragged)
    with pytest.raises(OpError, match="a must be float32"):
        cpu.delta(*rows, a[:, :-1], given, shape, kept, ragged)
    for wrong in ((2, 3, 16, 16, 4), (2, 2, 20, 16, 4), (0, 0, 16, 16, 4), (1, 1, 16, 16, 1)):
        with pytest.raises(OpError, match="linear attention"):
            DeltaShape(*wrong)
    for floor in (1.0, float("nan"), float("-inf")):
        with pytest.raises(OpError, match="a number up to 0"):
            DeltaShape(2, 2, 16, 16, 4, by_channel=True, floor=floor)
    with pytest.raises(OpError, match="use up to 2"):
        DeltaShape(2, 2, 16, 16, 4, learns=2.5)
    for one in ({"learns": 2.0}, {"apart": True}):
        with pytest.raises(OpError, match="KDA learns 1 at most"):
            DeltaShape(2, 2, 16, 16, 4, by_channel=True, **one)
    for more in ({"rank": 16}, {"floor": -5.0}):
        with pytest.raises(OpError, match="no rank and no floor"):
            DeltaShape(2, 2, 16, 16, 4, **more)
