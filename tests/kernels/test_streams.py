"""Streams of hidden states and sparse gates: all ops are like what transformers computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextMLP

from qoff.errors import OpError
from qoff.kernels.cpu import ops as cpu
from qoff.kernels.layout.streams import StreamRouter
from qoff.kernels.reference import ops as reference_ops
from tests.tolerances import assert_close

SIZES = [(1, 2, 16), (5, 4, 80), (300, 3, 32)]  # tokens, streams, numbers of one
EPS = 1e-5


def mixed(module: Gemma3nTextAltUp) -> tuple[StreamRouter, Tensor, Tensor, Tensor]:
    """The weights of a module, which are made up."""
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    router = StreamRouter(
        module.router_norm.weight.data, EPS, module.modality_router.weight.data.flatten() * 20
    )
    module.modality_router.weight.data.mul_(20)
    matrices = (module.prediction_coefs, module.correction_coefs)
    prediction, correction = (matrix.weight.data.flatten() for matrix in matrices)
    return router, prediction, correction, module.correct_output_scale.data


@pytest.mark.parametrize(("tokens", "count", "size"), SIZES)
@torch.no_grad()
def test_streams_are_predicted_and_corrected(tokens: int, count: int, size: int) -> None:
    config = Gemma3nTextConfig(hidden_size=size, altup_num_inputs=count, rms_norm_eps=EPS)
    module = Gemma3nTextAltUp(config).eval()
    router, prediction, correction, scale = mixed(module)
    hidden, found = torch.randn(tokens, count, size), torch.randn(tokens, size)
    predicted = module.predict(hidden.transpose(0, 1)[:, None])
    corrected = module.correct(predicted, found[None])
    first = module.scale_corrected_output(corrected[0])[0]
    for ops in (cpu, reference_ops):
        x, y = hidden.flatten(1).clone(), found.clone()
        ops.predict(x, router, prediction, out := torch.full((tokens, size), torch.nan))
        assert_close(x.view(hidden.shape), predicted[:, 0].transpose(0, 1))
        assert torch.equal(out, x[:, :size])
        ops.correct(x, y, router, correction, scale)
        assert_close(x.view(hidden.shape), corrected[:, 0].transpose(0, 1))
        assert_close(y, first)


@pytest.mark.parametrize(("tokens", "count", "size"), SIZES)
def test_rows_become_as_large_as_others(tokens: int, count: int, size: int) -> None:
    hidden = torch.randn(tokens, count * size)
    like, x = hidden[:, :size], hidden[:, size : 2 * size]
    x[0] *= 1e-4
    length = x.square().mean(1, keepdim=True).clamp(min=1e-5).sqrt()
    wanted = x * like.square().mean(1, keepdim=True).sqrt() / length
    for ops in (cpu, reference_ops):
        assert_close(ops.matched(x, like), wanted)
        assert_close(ops.matched(x, like, residual=like, sum_scale=0.5), (wanted + like) / 2)
        copy = ops.matched(x)
        assert torch.equal(copy, x)
        assert copy.is_contiguous()
        ops.matched(x, like, out=(all_ := hidden.clone())[:, :size])
        assert_close(all_[:, :size], wanted)
        assert torch.equal(all_[:, size:], hidden[:, size:])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.95])
@torch.no_grad()
def test_a_sparse_gate_is_that_of_transformers(share: float) -> None:
    config = Gemma3nTextConfig(
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=[96],
        activation_sparsity_pattern=[share],
    )
    module = Gemma3nTextMLP(config)
    x = torch.randn(300, 16)
    gate, up = module.gate_proj(x), module.up_proj(x)
    wanted = module.act_fn(module._gaussian_topk(gate)) * up
    z = torch.stack((gate.view(300, -1, 16), up.view(300, -1, 16)), 2).flatten(1)
    deviations = torch.distributions.Normal(0, 1).icdf(torch.tensor(share)).item()
    for ops in (cpu, reference_ops):
        assert_close(ops.sparse_gate(z, deviations, "gelu_tanh"), wanted)


def test_bad_operands_are_refused() -> None:
    with pytest.raises(OpError, match="multiple of 16"):
        cpu.matched(torch.ones(2, 24))
    with pytest.raises(OpError, match="multiple of 32"):
        cpu.sparse_gate(torch.ones(2, 48), 1.0, "silu")
    router = StreamRouter(torch.ones(16), EPS, torch.ones(32))
    with pytest.raises(OpError, match="mixing"):
        cpu.predict(torch.ones(2, 32), router, torch.ones(4), torch.ones(2, 16))
