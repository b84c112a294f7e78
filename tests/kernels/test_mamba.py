"""Mamba 2: the CPU's op is the reference's, which is transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FalconH1Config, NemotronHConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops
from tests.kernels.recurrent_states import states
from tests.tolerances import assert_close

FACTORS: Any = {"factors": (0.4, 0.5, 1.5, 2.0, 2.5)}  # of z, x, B, C, dt
# Panels of 64 channels, of fewer, and several; more channels than a thread convolves at once.
SHAPES = [MambaShape(4, 64, 2, 32, 4), MambaShape(3, 48, 1, 16, 2), MambaShape(2, 128, 2, 16, 3)]
SHAPES += [MambaShape(4, 16, 2, 48, 4, **FACTORS)]


def weights_of(shape: MambaShape, biased: bool = True) -> MambaWeights:
    """With factors there is no norm, so that both ways are there."""
    conv, bias = torch.randn(shape.taps * shape.channels), torch.randn(shape.channels)
    decay, dt_bias, skip = torch.randn(3, shape.heads)
    norm = torch.rand(shape.values) + 0.5
    kept = norm if shape.factors[0] == 1 else None
    return MambaWeights(conv, bias if biased else None, decay, dt_bias, skip, kept)


def inputs(shape: MambaShape, tokens: int) -> Tensor:
    """Columns of a wider matrix, as they lie in a workspace."""
    return torch.randn(tokens, shape.width + 5)[:, : shape.width]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_passes_of_any_lengths_are_the_references(shape: MambaShape) -> None:
    weights, slots, lengths = weights_of(shape, biased=shape.taps > 2), [2, 0, 3], [0, 0, 0]
    kept = [states(shape, Ragged.of([1, 1, 1], lengths), slots) for _ in range(2)]
    for counts in ([5, 1, 19], [1, 2, 3], [1, 1, 1]):
        ragged = Ragged.of(counts, lengths)
        lengths = [have + new for have, new in zip(lengths, counts, strict=True)]
        x, spans = inputs(shape, ragged.tokens), states(shape, ragged, slots).spans
        wanted, found = (
            ops.mamba(x.clone(), weights, shape, replace(one, spans=spans), ragged)
            for ops, one in zip((reference_ops, cpu), kept, strict=True)
        )
        assert_close(found, wanted)
        assert_close(kept[1].conv[slots], kept[0].conv[slots])
        assert_close(kept[1].memory[slots], kept[0].memory[slots])
    assert kept[1].conv[1].isnan().all()  # a slot of nobody's
    assert kept[1].memory[1].isnan().all()


def test_a_prompt_in_pieces_has_the_bits_of_the_whole() -> None:
    shape = SHAPES[0]
    weights, whole = weights_of(shape), Ragged.of([9], [0])
    x = inputs(shape, 9)
    wanted = cpu.mamba(x.clone(), weights, shape, states(shape, whole, [0]), whole)
    kept, found = states(shape, whole, [0]), []
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        ragged = Ragged.of([end - begin], [begin])
        now = replace(kept, spans=torch.tensor([[0, end - begin, 0]]))
        found.append(cpu.mamba(x[begin:end].clone(), weights, shape, now, ragged))
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("biased", [True, False])
def test_the_mixer_is_that_of_transformers(biased: bool) -> None:
    shape, ragged = MambaShape(4, 32, 2, 16, 4), Ragged.of([9], [0])
    config = NemotronHConfig(
        hidden_size=128, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=16,
        conv_kernel=4, time_step_min=1e-9, use_conv_bias=biased, chunk_size=4,
        layers_block_type=["linear_attention"],
    )  # fmt: skip
    module = NemotronHMamba2Mixer(config, 0)
    torch.nn.init.eye_(module.out_proj.weight)
    conv, norm = module.conv1d, module.norm
    for one in (module.A_log, module.dt_bias, module.D, norm.weight):
        torch.nn.init.normal_(one)
    hidden = torch.randn(9, shape.values)
    with torch.no_grad():
        wanted, x = module(hidden[None])[0], module.in_proj(hidden)
    small = (module.A_log, module.dt_bias, module.D, norm.weight)
    bias = None if conv.bias is None else conv.bias.detach()
    kernel = conv.weight.detach()[:, 0].T.flatten()
    weights = MambaWeights(kernel, bias, *(one.detach() for one in small))
    found = reference_ops.mamba(x, weights, shape, states(shape, ragged, [1]), ragged)
    assert_close(found, wanted)


@pytest.mark.parametrize("normed", [True, False])
def test_factors_and_no_norm_are_those_of_transformers_falcon_h1(normed: bool) -> None:
    shape, ragged = MambaShape(4, 32, 2, 16, 4, **FACTORS), Ragged.of([9], [0])
    config = FalconH1Config(
        hidden_size=128, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2,
        mamba_d_state=16, mamba_rms_norm=normed, mamba_norm_before_gate=False,
        ssm_multipliers=list(shape.factors), mamba_chunk_size=4,
    )  # fmt: skip
    module = FalconH1Mixer(config, 0)
    module.register_buffer("mup_vector", compute_mup_vector(config))
    torch.nn.init.eye_(module.out_proj.weight)
    small = [module.A_log, module.dt_bias, module.D, *module.norm.parameters()]
    for one in small:
        torch.nn.init.normal_(one)
    hidden, conv = torch.randn(9, shape.values), module.conv1d
    with torch.no_grad():
        wanted, x = module(hidden[None])[0], module.in_proj(hidden)
    kernel = conv.weight.detach()[:, 0].T.flatten()
    vectors = [one.detach() for one in small] + [None] * (not normed)
    weights = MambaWeights(kernel, conv.bias.detach(), *vectors)
    found = reference_ops.mamba(x, weights, shape, states(shape, ragged, [1]), ragged)
    assert_close(found, wanted)


def test_bad_operands_are_refused() -> None:
    shape, ragged = SHAPES[0], Ragged.of([2], [0])
    x, weights, kept = inputs(shape, 2), weights_of(shape), states(shape, ragged, [0])
    for changed in (
        replace(kept, conv=kept.conv[:, :1]),
        replace(kept, memory=kept.memory[:, :1]),
        replace(kept, spans=kept.spans[:0]),
    ):
        with pytest.raises(OpError, match="states"):
            cpu.mamba(x, weights, shape, changed, ragged)
    with pytest.raises(OpError, match="zxbcdt must be float32"):
        cpu.mamba(x[:, :-1], weights, shape, kept, ragged)
    for wrong in ((4, 40, 2, 16, 4), (4, 64, 3, 16, 4), (4, 64, 2, 8, 4), (4, 64, 2, 16, 1)):
        with pytest.raises(OpError, match="Mamba"):
            MambaShape(*wrong)
