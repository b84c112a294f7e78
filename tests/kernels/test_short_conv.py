"""Short convolutions: the CPU's op is the reference's, which is transformers'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.reference import ops as reference_ops
from tests.kernels.recurrent_states import states
from tests.tolerances import assert_close

# Fewer channels than a thread takes at once, as many, and more.
SHAPES = [ShortConvShape(48, 3), ShortConvShape(128, 2), ShortConvShape(272, 5)]


def weight_of(shape: ShortConvShape) -> Tensor:
    return torch.randn(shape.taps * shape.channels)


def inputs(shape: ShortConvShape, tokens: int) -> Tensor:
    """Columns of a wider matrix, as they lie in a workspace."""
    return torch.randn(tokens, shape.width + 5)[:, : shape.width]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_passes_of_any_lengths_are_the_references(shape: ShortConvShape) -> None:
    weight, slots, lengths = weight_of(shape), [2, 0, 3], [0, 0, 0]
    kept = [states(shape, Ragged.of([1, 1, 1], lengths), slots) for _ in range(2)]
    for counts in ([5, 1, 19], [1, 2, 3], [1, 1, 1]):
        ragged = Ragged.of(counts, lengths)
        lengths = [have + new for have, new in zip(lengths, counts, strict=True)]
        bcx, spans = inputs(shape, ragged.tokens), states(shape, ragged, slots).spans
        wanted, found = (
            ops.short_conv(bcx.clone(), weight, shape, replace(one, spans=spans), ragged)
            for ops, one in zip((reference_ops, cpu), kept, strict=True)
        )
        assert_close(found, wanted)
        assert_close(kept[1].conv[slots], kept[0].conv[slots])
    assert kept[1].conv[1].isnan().all()  # a slot of nobody's


def test_a_prompt_in_pieces_has_the_bits_of_the_whole() -> None:
    shape = SHAPES[-1]
    weight, whole = weight_of(shape), Ragged.of([9], [0])
    bcx = inputs(shape, 9)
    wanted = cpu.short_conv(bcx.clone(), weight, shape, states(shape, whole, [0]), whole)
    kept, found = states(shape, whole, [0]), []
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        ragged = Ragged.of([end - begin], [begin])
        now = replace(kept, spans=torch.tensor([[0, end - begin, 0]]))
        found.append(cpu.short_conv(bcx[begin:end].clone(), weight, shape, now, ragged))
    assert torch.equal(torch.cat(found), wanted)


def test_the_convolution_is_that_of_transformers() -> None:
    shape, ragged = ShortConvShape(64, 3), Ragged.of([9], [0])
    config = Lfm2Config(hidden_size=64, conv_L_cache=3, num_hidden_layers=1, layer_types=["conv"])
    module = Lfm2ShortConv(config, 0)
    module.out_proj = torch.nn.Identity()
    hidden = torch.randn(9, 64)
    with torch.no_grad():
        wanted, bcx = module(hidden[None])[0], module.in_proj(hidden)
    kernel = module.conv.weight.detach()[:, 0].T.flatten()
    found = reference_ops.short_conv(bcx, kernel, shape, states(shape, ragged, [1]), ragged)
    assert_close(found, wanted)


def test_bad_operands_are_refused() -> None:
    shape, ragged = SHAPES[0], Ragged.of([2], [0])
    bcx, weight, kept = inputs(shape, 2), weight_of(shape), states(shape, ragged, [0])
    for changed in (replace(kept, conv=kept.conv[:, :1]), replace(kept, spans=kept.spans[:0])):
        with pytest.raises(OpError, match="states"):
            cpu.short_conv(bcx, weight, shape, changed, ragged)
    with pytest.raises(OpError, match="bcx must be float32"):
        cpu.short_conv(bcx[:, :-1], weight, shape, kept, ragged)
    for wrong in ((40, 3), (0, 3), (64, 1)):
        with pytest.raises(OpError, match="short convolution"):
            ShortConvShape(*wrong)
