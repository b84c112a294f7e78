"""Linear attention on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.device_cache import PassTables
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import DeviceLayerStates, LayerStates
from qoff.kernels.reference import delta as reference
from qoff.kernels.triton.recurrent.delta import delta
from qoff.kvcache.device.tables import DeviceTables, pass_tables

OP = "delta"
_MODELS = {
    "Qwen3-Next-80B-A3B": DeltaShape(16, 32, 128, 128, 4),
    "Kimi-Linear-48B-A3B": DeltaShape(32, 32, 128, 128, 4, by_channel=True),
    "Olmo-Hybrid-7B": DeltaShape(30, 30, 96, 192, 4, learns=2.0),
    "Ling-3.0-Flash": DeltaShape(32, 32, 128, 128, 4, by_channel=True, floor=-5.0),
}
_TINY = (
    DeltaShape(1, 2, 32, 32, 4),
    DeltaShape(2, 2, 32, 32, 4, by_channel=True),
    DeltaShape(2, 2, 32, 32, 4, by_channel=True, floor=-5.0),
)
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, DeltaWeights, DeltaShape, DeviceLayerStates]


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    for shape in _TINY if tiny else _MODELS.values():
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for counts in ([1, 1], [66, 2]) if tiny else ([1] * 5, [9, 1, 3], [700, 1, 64]):
                name = f"{short(dtype)} {counts} tokens" + (", KDA" if shape.by_channel else "")
                name += " with a floor" if shape.floor else ""
                name += ", signs turned" if shape.learns > 1 else ""
                error = partial(_error, shape, counts, dtype, device)
                yield Check(OP, name, error, 2 * BOUNDS[dtype])


def problem(
    shape: DeltaShape, counts: Sequence[int], past: int, dtype: torch.dtype, device: torch.device
) -> tuple[_Operands, Ragged]:
    """What the launcher takes: new tokens of sequences of which `past` tokens are remembered."""

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device)

    ragged, step = tables(counts, past, device)
    heads = shape.value_heads
    weights = DeltaWeights(
        random(shape.taps * shape.channels), random(heads), random(shape.decays) - 4,
        random(shape.value_dim).abs() + 0.5,
    )  # fmt: skip
    memory = random(len(counts), *shape.memory_shape)
    states = DeviceLayerStates(random(len(counts), *shape.conv_shape), memory, step)
    qkv, z, b, a = (
        random(ragged.tokens, width).to(dtype)
        for width in (shape.channels, shape.values, heads, shape.decays)
    )
    return (qkv, z, b, a, weights, shape, states), ragged


def tables(counts: Sequence[int], past: int, device: torch.device) -> tuple[Ragged, PassTables]:
    """A pass of new tokens of sequences of which `past` tokens are remembered."""
    ragged, slots = Ragged.of(counts, [past] * len(counts)), len(counts)
    step = pass_tables(
        DeviceTables(slots, device), ragged.spans, ragged, packed=[0] * slots, new={},
        resident_from=[0] * slots, offloads=False, steady=False,
    )  # fmt: skip
    return ragged, step


def _error(
    shape: DeltaShape, counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> float:
    (qkv, z, b, a, weights, _, states), ragged = problem(shape, counts, 7, dtype, device)
    rows = torch.tensor([(span.start, span.count, span.slot) for span in ragged.spans])
    before = LayerStates(states.conv.clone(), states.memory.clone(), rows)
    exact = qkv.double(), z.double(), b.double(), a.double()
    wanted = reference.delta(*exact, weights, shape, before, ragged)
    found = delta(qkv, z, b, a, weights, shape, states)
    pairs = (found, wanted), (states.conv, before.conv), (states.memory, before.memory)
    return max(relative_rms(a, b) for a, b in pairs)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Steps of decoding, and prompts, of models of its own."""
    for name, shape in _MODELS.items():
        for batch, rows in ((1, 1), (16, 1), (1, 4096)) if quick else (
            (1, 1), (4, 1), (16, 1), (64, 1), (1, 16), (1, 512), (1, 4096), (8, 512),
        ):  # fmt: skip
            yield _case(name, shape, batch, rows)


def _case(name: str, shape: DeltaShape, batch: int, rows: int) -> TimedCase:
    tokens = batch * rows
    own = 2 * tokens * (shape.channels + 2 * shape.values + shape.decays)
    states = 2 * batch * shape.state_bytes
    # Three products with the state a token, and the system of a chunk of 64 tokens.
    flops = 2.0 * tokens * shape.value_heads * shape.value_dim * (3 * shape.key_dim + 2 * 64)
    return TimedCase(
        OP,
        name,
        f"{batch} x {rows} tokens, {shape.value_heads} heads",
        own + states,
        partial(_build, shape, batch, rows),
        flops=flops,
        m=tokens,
        footprint=states + 4 * own + tokens * (shape.value_heads * 4 * 64 + 4 * shape.decays),
    )


def _build(shape: DeltaShape, batch: int, rows: int, device: torch.device) -> PreparedCase:
    operands, _ = problem(shape, [rows] * batch, 64, torch.float16, device)

    def one_by_one() -> Call:
        if rows == 1:
            raise RuntimeError("left out: it is the same")
        return lambda: delta(*operands, chunked=False)

    return PreparedCase(lambda: delta(*operands), {"token by token": one_by_one})
