"""Mamba 2 on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.ops.delta import tables
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates
from qoff.kernels.reference.mamba import mamba as reference
from qoff.kernels.triton.recurrent.mamba import mamba

OP = "mamba"
_MODELS = {
    "Nemotron-3-Nano": MambaShape(64, 64, 8, 128, 4),
    "Granite-4-H-Small": MambaShape(128, 64, 1, 128, 4),
}
_Operands = tuple[Tensor, MambaWeights, MambaShape, DeviceLayerStates]


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shape = MambaShape(4, 32, 2, 32, 4) if tiny else next(iter(_MODELS.values()))
    for dtype in dtypes(device)[:1] if tiny else dtypes(device):
        for counts in ([1, 1], [66, 2]) if tiny else ([1] * 5, [9, 1, 3], [700, 1, 64]):
            name = f"{short(dtype)} {counts} tokens"
            error = partial(_error, shape, counts, dtype, device)
            yield Check(OP, name, error, 2 * BOUNDS[dtype])


def _problem(
    shape: MambaShape, counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[_Operands, Ragged]:
    """What the launcher takes: new tokens of sequences of which 7 tokens are remembered."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    ragged, step = tables(counts, 7, device)
    weights = MambaWeights(
        random(shape.taps * shape.channels), random(shape.channels), random(shape.heads),
        random(shape.heads) - 4, random(shape.heads), random(shape.values).abs() + 0.5,
    )  # fmt: skip
    memory = random(len(counts), *shape.memory_shape)
    states = DeviceLayerStates(random(len(counts), *shape.conv_shape), memory, step)
    return (random(ragged.tokens, shape.width).to(dtype), weights, shape, states), ragged


def _error(
    shape: MambaShape, counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> float:
    (x, weights, _, states), ragged = _problem(shape, counts, dtype, device)
    rows = torch.tensor([(span.start, span.count, span.slot) for span in ragged.spans])
    before = LayerStates(states.conv.clone(), states.memory.clone(), rows)
    wanted = reference(x.double(), weights, shape, before, ragged)
    found = mamba(x, weights, shape, states)
    pairs = (found, wanted), (states.conv, before.conv), (states.memory, before.memory)
    return max(relative_rms(a, b) for a, b in pairs)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Steps of decoding, and prompts, of models of its own."""
    for name, shape in _MODELS.items():
        for batch, rows in ((1, 1), (1, 4096)) if quick else (
            (1, 1), (16, 1), (64, 1), (1, 16), (1, 512), (1, 4096), (8, 512),
        ):  # fmt: skip
            tokens = batch * rows
            own = 2 * tokens * (shape.width + shape.values)
            states = 2 * batch * shape.state_bytes
            # Two products with the state a token, and what tokens of a chunk have of each other.
            flops = 2.0 * tokens * shape.values * (2 * shape.state + 64)
            yield TimedCase(
                OP,
                name,
                f"{batch} x {rows} tokens, {shape.heads} heads",
                own + states,
                partial(_build, shape, batch, rows),
                flops=flops,
                m=tokens,
                footprint=states + 3 * own,
            )


def _build(shape: MambaShape, batch: int, rows: int, device: torch.device) -> PreparedCase:
    operands, _ = _problem(shape, [rows] * batch, torch.float16, device)

    def one_by_one() -> Call:
        if rows == 1:
            raise RuntimeError("left out: it is the same")
        return lambda: mamba(*operands, chunked=False)

    return PreparedCase(lambda: mamba(*operands), {"token by token": one_by_one})
