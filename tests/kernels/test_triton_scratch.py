"""Dequantized weights that passes share: dequantized once, the same bits, never more memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.linear import scratch as scratch_module
from qoff.kernels.triton.linear.linear import scratch_bytes
from qoff.kernels.triton.linear.product import PLAIN
from qoff.kernels.triton.linear.scratch import PIECE_MIN, Scratch, piece_bytes, through_scratch
from qoff.models.native.graphs import Replays
from tests.kernels.packed import quantized

tape = pytest.importorskip("tests.tape")

CPU, HALF = torch.device("cpu"), torch.float16
K = 64
ROWS = (256, 130, 384)  # of the matrices of a unit
ROW = 2 * K  # bytes


def unit() -> list[QTensor]:
    return [quantized(rows, K, 4, 32) for rows in ROWS]


def run(x: Tensor, weights: list[QTensor], scratch: Scratch) -> list[Tensor]:
    """A pass: the products with all matrices."""
    return [through_scratch(x, weight, None, PLAIN, scratch) for weight in weights]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The rows of each launch that dequantizes."""
    rows: list[int] = []
    real = scratch_module.dequantize_into

    def dequantize_into(codes: Tensor, *rest: Any) -> None:
        rows.append(len(codes))
        real(codes, *rest)

    with patch.object(scratch_module, "dequantize_into", dequantize_into):
        yield rows


@pytest.mark.parametrize(
    ("piece", "held", "first", "later"),
    [
        (512, 770, [256, 130, 384], []),  # all have room
        (128, 770, [128, 128, 128, 2, 128, 128, 128], []),
        # The last matrix has none: a piece of it takes the place of the piece before.
        (128, 600, [128, 128, 128, 2, 128, 128, 128], [128, 128, 128]),
        (384, 384, [256, 130, 384], [256, 130, 384]),
        (384, 0, [256, 130, 384], [256, 130, 384]),  # nothing is held
    ],
)
def test_passes_share_what_has_room(
    piece: int, held: int, first: list[int], later: list[int]
) -> None:
    """Sizes are in rows."""
    scratch = Scratch(piece * ROW, held * ROW)
    passes = [torch.randn(3, K).half() for _ in range(3)]
    for weights in (unit(), unit()):
        expected = [run(x, weights, Scratch(piece * ROW)) for x in passes]
        with counted() as launches:
            scratch.keep()
            found = [run(x, weights, scratch) for x in passes]
            scratch.forget()
        assert launches == first + 2 * later
        for some, wanted in zip(found, expected, strict=True):
            assert all(map(torch.equal, some, wanted))
    memory = scratch._memory
    assert (0 if memory is None else memory.nbytes) == held * ROW
    scratch.release()
    assert scratch._memory is None


def test_other_weights_at_the_same_addresses_are_not_mistaken() -> None:
    """A slot has the next unit's weights, which may even be the same objects."""
    scratch, x, (weight, *_), (other, *_) = (
        Scratch(1, 1 << 20),
        torch.randn(3, K).half(),
        unit(),
        unit(),
    )
    for change in (False, True):
        scratch.keep()
        if change:
            weight.codes.copy_(other.codes)
            weight.scale_min.copy_(other.scale_min)
        found = [through_scratch(x, weight, None, PLAIN, scratch) for _ in range(2)]
        expected = through_scratch(x, weight, None, PLAIN, Scratch(1))
        assert all(torch.equal(one, expected) for one in found)
        scratch.forget()


def test_one_pass_alone_keeps_nothing() -> None:
    scratch, weights, x = Scratch(1, 1 << 20), unit(), torch.randn(3, K).half()
    with counted() as launches:
        for _ in range(2):
            run(x, weights, scratch)
    assert len(launches) == 2 * (2 + 2 + 3)
    assert scratch.key == (False,)


def test_a_matrix_that_no_plan_knew_has_memory_of_its_own() -> None:
    scratch, (weight, *_), x = Scratch(1, 100 * ROW), unit(), torch.randn(3, K).half()
    scratch.keep()
    found = through_scratch(x, weight, None, PLAIN, scratch)
    assert torch.equal(found, through_scratch(x, weight, None, PLAIN, Scratch(1)))
    assert scratch._memory is None


def test_what_is_kept_is_told_apart_and_comes_back() -> None:
    scratch, weights, x = Scratch(1, 1 << 20), unit(), torch.randn(3, K).half()
    scratch.keep()
    empty, nothing = scratch.key, scratch.snapshot()
    run(x, weights, scratch)
    full, everything = scratch.key, scratch.snapshot()
    assert empty != full
    with counted() as launches:
        scratch.restore(nothing)
        assert scratch.key == empty
        scratch.restore(everything)
        assert scratch.key == full
        run(x, weights, scratch)
    assert launches == []


def test_the_size_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    assert piece_bytes(CPU, HALF) == PIECE_MIN
    assert piece_bytes(CPU, HALF, 16 << 30) == 256 << 20
    monkeypatch.setattr(tuned, "lookup", lambda op, device, key: {"nbytes": 400 << 20})
    assert [piece_bytes(CPU, HALF, gib << 30) for gib in (1, 8, 16)] == [
        64 << 20, 256 << 20, 400 << 20,
    ]  # fmt: skip
    assert scratch_bytes(2048, 1024, 1024, CPU, 1 << 20) == 1 << 20
    assert scratch_bytes(16, 1024, 1024, CPU, 1 << 20) == 0
    monkeypatch.setattr(Gpu, "of", staticmethod(lambda device: Gpu(75, 40)))
    assert [scratch_bytes(m, 256, 1024, CPU, 1 << 20) >> 10 for m in (4, 5)] == [0, 512]


def test_a_replay_finds_what_was_there_when_it_was_recorded() -> None:
    """And dequantizes what was not; both leave what the passes behind them find."""
    scratch, weights = Scratch(128 * ROW, 600 * ROW), unit()
    replays = Replays(CPU, tape.record, scratch=scratch)

    def work(x: Tensor) -> Tensor:
        return torch.cat(run(x, weights, scratch), dim=1)

    for turn in range(4):
        for weight in weights if turn == 3 else []:  # the slot has another layer's
            other = quantized(weight.shape[0], K, 4, 32)
            weight.codes.copy_(other.codes)
            weight.scale_min.copy_(other.scale_min)
        scratch.keep()
        for place in range(3):
            x = torch.randn(3, K).half()
            found = replays.run(place, weights, x, work)
            assert torch.equal(found, torch.cat(run(x, weights, Scratch(128 * ROW)), dim=1))
        scratch.forget()
    assert (replays.recorded, replays.replayed, replays.failed) == (3, 9, 0)
