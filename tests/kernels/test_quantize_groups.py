"""Activations as groups of integers, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from qoff.kernels.cpu.linear.quantize import quantize_groups


@njit
def _quantized(x, group, planes, high, low, scales):
    groups = len(x) // group
    quantize_groups(
        x.ctypes.data, 0, groups, group, planes, high.ctypes.data, low.ctypes.data,
        scales.ctypes.data,
    )  # fmt: skip


def _of(x: np.ndarray, group: int, planes: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers of each group, and its scale and sum."""
    high, low = np.full((2, len(x)), 77, np.int8)
    scales = np.empty((len(x) // group, 2), np.float32)
    _quantized(x, group, planes, high, low, scales)
    assert planes == 2 or (low == 77).all()  # a plane that is not asked for is not written
    integers = high.astype(np.int64) * 256 + low if planes == 2 else high.astype(np.int64)
    return integers.reshape(-1, group), scales


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("groups", "group"), [(1, 32), (4, 64), (7, 32), (3, 128)])
def test_rounds_to_the_largest_of_a_group(groups: int, group: int, planes: int) -> None:
    x = np.random.default_rng(0).normal(size=groups * group).astype(np.float32)
    integers, scales = _of(x, group, planes)
    limit = np.float32((127, 32512)[planes - 1])
    peak = np.abs(x).reshape(groups, group).max(1)
    factors = (limit / peak)[:, None]
    assert (integers == np.rint(x.reshape(groups, group) * factors)).all()
    assert (scales[:, 0] == peak / limit).all()
    assert (scales[:, 1] == scales[:, 0] * integers.sum(1).astype(np.float32)).all()


@pytest.mark.parametrize("planes", [1, 2])
def test_zeros_infinities_and_what_is_no_number(planes: int) -> None:
    x = np.zeros(6 * 32, np.float32)
    x[32], x[70], x[100], x[130] = np.nan, np.inf, -np.nan, 1e-38
    integers, scales = _of(x, 32, planes)
    assert np.isnan(scales[1:4]).all()
    assert (integers[[0, 4, 5]] == 0).all()
    assert (scales[[0, 5]] == 0).all()
    assert scales[4, 1] == 0
