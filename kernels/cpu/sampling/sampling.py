"""Choosing tokens from logits on the CPU: the likeliest, or one that is drawn, in one job."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from qoff.kernels.cpu.jit.pool import Pool, default_pool
from qoff.kernels.cpu.operands import fail
from qoff.kernels.layout.distribution import Shape
from qoff.process import ForkLock

from .job import Row, SamplingArguments, draw_job, likeliest_job
from .scratch import columns, sampling_bytes, weights_bytes

_OP = "sampling"
_STATE_BYTES = 5056  # of torch's generator, as this reads it
_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_likeliest, _draw = _Native(likeliest_job.address), _Native(draw_job.address)
_generator = ForkLock()  # held from reading the state of torch's generator to writing it


def likeliest(rows: Sequence[Tensor], pool: Pool | None = None) -> list[int]:
    """The likeliest token of each row, the first of several; -1 where logits are not finite.

    rows: float32 [V] each. -inf is a token that cannot be. Raises OpError for other rows.
    """
    return _chosen(rows, None, pool or default_pool())


def draw(
    rows: Sequence[Tensor], shapes: Sequence[Shape], noise: Tensor, pool: Pool | None = None
) -> list[int]:
    """A token of each row, drawn as `qoff.kernels.sampling.draw_` does; -1 as in `likeliest`.

    noise: float64 [R, noise_size], contiguous. min_p is applied before top_k and top_p, as in vLLM.
    """
    if noise.dtype != torch.float64 or not noise.is_contiguous() or len(noise) != len(rows):
        fail(_OP, f"noise must be contiguous float64 of {len(rows)} rows, not {noise.dtype}")
    return _chosen(rows, shapes, pool or default_pool(), noise)


def multinomial(rows: Sequence[Tensor], shape: Shape, pool: Pool | None = None) -> list[int]:
    """A token of each row, by torch's generator: that which `torch.multinomial` would draw.

    The generator goes on as if that had been called with a tensor of all rows. Rows that leave
    another token as likely in all their digits may differ. min_p is applied last, as in
    transformers. -1 as in `likeliest`. Raises OpError where `follows_torch` is False.
    """
    if not follows_torch():
        fail(_OP, "torch's generator is not one that is known")
    with torch_state() as state:
        return _chosen(rows, [shape] * len(rows), pool or default_pool(), state=state)


@contextmanager
def torch_state() -> Iterator[Tensor]:
    """The state of torch's generator, which becomes what is made of it."""
    with _generator:
        state = torch.get_rng_state()
        yield state
        torch.set_rng_state(state)


@functools.cache
def follows_torch() -> bool:
    """Whether `multinomial` knows how torch draws; it may differ by version and processor."""
    generator = torch.Generator().manual_seed(0)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    if state.numel() != _STATE_BYTES:
        return False
    logits = torch.linspace(0, 1, 3000).view(3, 1000)
    wanted = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    found = _chosen(logits.unbind(), [Shape()] * 3, default_pool(), state=state)
    return found == wanted.tolist() and torch.equal(state, generator.get_state())


def arguments(
    rows: Sequence[Tensor],
    shapes: Sequence[Shape] | None,
    pool: Pool,
    noise: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[int, SamplingArguments, ctypes.Array[Row]]:
    """The job that chooses a token of each row, what it is told, and where it leaves them.

    shapes None: the likeliest. noise: of this draw, as for `draw`; None: by torch's `state`. To be
    used while the pool's lock is held.
    """
    count, vocab = len(rows), len(rows[0])
    described = _described(rows, shapes or [Shape()] * count)
    args = SamplingArguments(ctypes.addressof(described), count, vocab)
    if shapes is None:
        return likeliest_job.address, args, described
    args.columns = columns(vocab)
    if noise is not None:
        args.noise, args.noise_size = noise.data_ptr(), noise.shape[1]
    else:
        assert state is not None
        args.state, args.min_p_last = state.data_ptr(), True
    args.weights = pool.workspace(sampling_bytes(vocab, count, of_torch=noise is None))
    args.compact = args.words = args.weights + weights_bytes(vocab, count)
    return draw_job.address, args, described


def _chosen(
    rows: Sequence[Tensor],
    shapes: Sequence[Shape] | None,
    pool: Pool,
    noise: Tensor | None = None,
    state: Tensor | None = None,
) -> list[int]:
    """A token of each row; of one row in this thread, without waking the others for it."""
    with pool.lock:
        job, args, described = arguments(rows, shapes, pool, noise, state)
        if len(rows) > 1:
            pool.run(job, args)
        elif shapes is None:
            _likeliest(0, 0, 1, ctypes.addressof(args))
        else:
            _draw(0, 0, 1, ctypes.addressof(args))
    return [row.token for row in described]


def _described(rows: Sequence[Tensor], shapes: Sequence[Shape]) -> ctypes.Array[Row]:
    vocab = rows[0].shape
    for row in rows:
        if row.dtype != torch.float32 or not row.is_cpu or row.shape != vocab or row.dim() != 1:
            fail(_OP, f"rows must be float32 {list(vocab)} on the CPU, not {row.dtype}")
        if row.stride(0) != 1:
            fail(_OP, "the logits of a row must lie side by side")
    return (Row * len(rows))(
        *(
            Row(row.data_ptr(), one.top_k, 0, one.temperature, one.min_p, one.top_p)
            for row, one in zip(rows, shapes, strict=True)
        )
    )
