"""What a pass of `count` tokens of each sequence takes; the longest sequence then has `longest`."""

from __future__ import annotations

from qoff.kernels.cpu.linear.scratch import linear_bytes
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.packing import GROUP_SIZES
from qoff.kernels.processor import pool_threads
from qoff.kvcache import DeviceCache, PackedCache
from qoff.kvcache.host.recent import PACKING, RecentWorkspace
from qoff.models.native.scratch import Passes, attention_bytes

from .outline import Outline


def working_bytes(outline: Outline, sequences: int, count: int, longest: int) -> int:
    """An estimate of what a pass takes, without logits.

    As if nothing that a layer computes were freed before its end, and all of it were float32.
    transformers' attention has scores against the `longest` tokens of a sequence in memory, and
    masked; qoff's on a CPU the tokens of a layer that are not packed, and those that it packs.
    What is not quantized of a layer is there twice, if it is stored in another type.
    """
    each = 4 * count * (outline.width + 8 * outline.text_config.hidden_size)
    floats = outline.float_bytes
    if outline.kv is None:
        return floats + sequences * (each + 4 * count * 3 * outline.heads * longest)
    largest = 0
    if not outline.caches_on_device:
        largest = 4 * (sequences + PACKING) * max(_unpacked(outline, count))
    return floats + sequences * each + largest + lent_bytes(outline, sequences, count)


def lent_bytes(outline: Outline, sequences: int, count: int) -> int:
    """What it keeps to its end of layers whose keys and values others attend to."""
    if not outline.lent:
        return 0
    floats = _unpacked(outline, count)
    return 4 * sequences * sum(floats[i] for i in outline.lent)


def _unpacked(outline: Outline, count: int) -> list[int]:
    """Floats of each layer's tokens that are not packed, of a sequence that has `count` new."""
    assert outline.kv is not None
    tokens = count + outline.kv.window + outline.kv.sinks + 2 * BLOCK_TOKENS
    return [RecentWorkspace.floats_for(one, 1, tokens) for one in outline.packed_shapes.values()]


def kept_bytes(outline: Outline, sequences: int, count: int, longest: int) -> int:
    """What it keeps from layer to layer: hidden states, angles, masks, biases."""
    each = count * (6 * outline.text_config.hidden_size + 2 * longest)
    return 4 * sequences * (each + 2 * outline.heads * longest)


def scratch_bytes(outline: Outline, sequences: int, count: int, longest: int) -> int:
    """What qoff's ops take in it; on a CPU they share it: see `native.scratch`."""
    if outline.caches_on_device:
        return _scratch_bytes_on_gpu(outline, sequences, count, longest)
    threads, group = pool_threads(), min(GROUP_SIZES)
    found = [linear_bytes(threads, sequences * count, outline.columns, group, normed=False)]
    if outline.kv is not None:
        kv, shapes = outline.kv, list(outline.packed_shapes.values())
        place = PackedCache.recent_tokens(kv.window, kv.sinks) - 1
        blocks = PackedCache.blocks_of(longest, kv.window, kv.sinks)
        passes = Passes(0, sequences, place, 0, 0, blocks, selects=kv.attention_top < 1)
        for shape, form in zip(shapes, kv.packed_forms(shapes), strict=True):
            found += attention_bytes(shape, form, passes, threads)
    return max(found)


def _scratch_bytes_on_gpu(outline: Outline, sequences: int, count: int, longest: int) -> int:
    from qoff.kernels.triton.linear.linear import CUBLAS_BYTES, linear_bytes, scratch_bytes
    from qoff.kernels.triton.linear.scratch import piece_bytes
    from qoff.kernels.triton.ops import attention_bytes

    device, dtype = outline.device, outline.dtype
    tokens, piece = sequences * count, piece_bytes(device, dtype, outline.device_memory)
    found = [
        linear_bytes(rows, n, k, dtype, device) + scratch_bytes(rows, n, k, device, piece)
        for rows, n, k in (
            (tokens, outline.columns, outline.columns),
            (sequences, outline.vocab_size, outline.text_config.hidden_size),
        )
    ]
    if outline.kv is not None:
        kv, shapes = outline.kv, list(outline.packed_shapes.values())
        blocks = DeviceCache.blocks_of(longest, kv.window, 0)
        found += [
            attention_bytes(
                tokens,
                sequences,
                blocks,
                shape,
                form,
                dtype,
                device,
                values_rotated=kv.values_rotated,
                top=kv.attention_top,
            )
            for shape, form in zip(shapes, kv.packed_forms(shapes), strict=True)
        ]
    return CUBLAS_BYTES + max(found)
