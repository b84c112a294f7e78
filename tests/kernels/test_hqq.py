"""Half-quadratic splitting on the CPU's threads against plain torch."""

import pytest
import torch

from qoff.kernels.cpu.solvers import hqq as cpu
from qoff.kernels.layout.hqq import NORM
from qoff.kernels.layout.scales import expanded
from qoff.kernels.reference.quantization import minmax_scale, nearest_levels
from qoff.quant import solvers


def lost(groups, found, bits):
    """The loss of each group [N, G]."""
    scale, minimum = (x.float()[..., None] for x in found)
    values = nearest_levels(groups, *found, bits) * scale + minimum
    return (values - groups).abs().pow(NORM).sum(2)


def some_groups(count, size):
    random = torch.Generator().manual_seed(count + size)
    return torch.randn(3, count, size, generator=random) * 0.02 + 0.005


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "size", "count"), [(2, 32, 133), (4, 64, 128), (8, 128, 65)])
def test_ranges_lose_as_much_as_those_of_torch(bits, size, count, dtype):
    groups = some_groups(count, size)
    start = minmax_scale(groups, bits, dtype)
    found, wanted = cpu.hqq(groups, *start, bits), solvers.by_torch(groups, start, bits)
    assert [x.dtype for x in found] == [dtype] * 2
    here, there = lost(groups, found, bits), lost(groups, wanted, bits)
    assert torch.isclose(here, there, rtol=1e-4).float().mean() > 0.98  # steps part at a tie
    assert here.sum() < there.sum() * 1.0001
    assert here.sum() < 0.99 * lost(groups, start, bits).sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 3e4])
@pytest.mark.parametrize("kind", ["shifted", "constant", "heavy", "two values", "none"])
def test_groups_of_every_kind(kind, scale, dtype):
    groups = some_groups(20, 32)
    if kind == "shifted":
        groups += 1
    elif kind == "constant":
        groups[:] = groups[..., :1]
    elif kind == "heavy":
        groups = (groups * 50).pow(3).clamp(-1, 1)
    elif kind == "two values":
        groups = groups.sign()
    elif kind == "none":
        groups = groups[:0]
    groups = groups * scale
    start = minmax_scale(groups, 4, dtype)
    found, wanted = cpu.hqq(groups, *start, 4), solvers.by_torch(groups, start, 4)
    here, there, whole = (lost(groups, x, 4) for x in (found, wanted, start))
    assert bool((here <= whole * (1 + 1e-4)).all())
    assert here.sum() <= there.sum() * 1.001


@pytest.mark.parametrize(("bits", "size", "count"), [(2, 32, 133), (4, 64, 128), (8, 128, 65)])
def test_compact_scales_lose_as_much_as_those_of_torch(bits, size, count):
    groups = some_groups(count, size)
    found = cpu.hqq(groups, *minmax_scale(groups, bits, torch.float32), bits)
    compact = cpu.compact(groups, *found, bits)
    # All of importance 1, so that torch computes it.
    wanted = solvers.compact(groups, bits, found, NORM, torch.ones(count, size))
    here, there = (lost(groups, expanded(*x, bits), bits) for x in (compact, wanted))
    assert torch.isclose(here, there, rtol=1e-4).float().mean() > 0.98
    assert here.sum() < there.sum() * 1.0001


def test_the_bits_do_not_depend_on_threads(monkeypatch):
    groups = some_groups(40, 32)
    start = minmax_scale(groups, 4, torch.float32)
    alone = cpu.hqq(groups, *start, 4)
    monkeypatch.setattr(cpu, "_PART", 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert all(map(torch.equal, alone, cpu.hqq(groups, *start, 4)))
    parted = cpu.compact(groups, *alone, 4)
    monkeypatch.undo()
    assert all(map(torch.equal, parted, cpu.compact(groups, *alone, 4)))
