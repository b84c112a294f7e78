"""Short convolutions on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.ops.delta import tables
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates
from qoff.kernels.reference.short_conv import short_conv as reference
from qoff.kernels.triton.recurrent.short_conv import short_conv

OP = "short_conv"
_MODELS = {"LFM2-8B-A1B": ShortConvShape(2048, 3)}
_Operands = tuple[Tensor, Tensor, ShortConvShape, DeviceLayerStates]


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shape = ShortConvShape(144, 3) if tiny else next(iter(_MODELS.values()))
    for dtype in dtypes(device)[:1] if tiny else dtypes(device):
        for counts in ([1, 1], [66, 2]) if tiny else ([1] * 5, [9, 1, 3], [700, 1, 64]):
            name = f"{short(dtype)} {counts} tokens"
            error = partial(_error, shape, counts, dtype, device)
            yield Check(OP, name, error, 2 * BOUNDS[dtype])


def _problem(
    shape: ShortConvShape, counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[_Operands, Ragged]:
    """What the launcher takes: new tokens of sequences of which 7 tokens are remembered."""
    ragged, step = tables(counts, 7, device)
    conv = torch.randn(len(counts), *shape.conv_shape, device=device)
    memory = torch.empty(len(counts), *shape.memory_shape, device=device)
    weight = torch.randn(shape.taps * shape.channels, device=device)
    bcx = torch.randn(ragged.tokens, shape.width, device=device).to(dtype)
    return (bcx, weight, shape, DeviceLayerStates(conv, memory, step)), ragged


def _error(
    shape: ShortConvShape, counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> float:
    (bcx, weight, _, states), ragged = _problem(shape, counts, dtype, device)
    rows = torch.tensor([(span.start, span.count, span.slot) for span in ragged.spans])
    before = LayerStates(states.conv.clone(), states.memory, rows)
    wanted = reference(bcx.double(), weight, shape, before, ragged)
    found = short_conv(bcx, weight, shape, states)
    return max(relative_rms(found, wanted), relative_rms(states.conv, before.conv))


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Steps of decoding, and prompts, of models of its own."""
    for name, shape in _MODELS.items():
        for batch, rows in ((1, 1), (1, 4096)) if quick else ((1, 1), (64, 1), (1, 512), (1, 4096)):
            own = 2 * batch * rows * (shape.width + shape.values)
            yield TimedCase(
                OP,
                name,
                f"{batch} x {rows} tokens",
                own + 2 * batch * shape.state_bytes,
                partial(_build, shape, batch, rows),
                m=batch * rows,
                footprint=2 * own + batch * shape.state_bytes,
            )


def _build(shape: ShortConvShape, batch: int, rows: int, device: torch.device) -> PreparedCase:
    operands, _ = _problem(shape, [rows] * batch, torch.float16, device)
    return PreparedCase(lambda: short_conv(*operands))
