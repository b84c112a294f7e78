"""What the ops of the packed KV cache mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import latent_heads, latent_values, rope_channels
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, CLIPPED, KVFormat

from .elementwise import rope
from .quantization import nearest_levels


def quantize_blocks(k: Tensor, v: Tensor, form: KVFormat, opening: Tensor | None = None) -> Tensor:
    """Pack K and V, [..., 64, D] of any float dtype, to records uint8 [..., form.nbytes].

    Of a latent form K alone.

    Scale = (max - min) / (2**bits - 1) and minimum are rounded to float16; the codes are the
    nearest for the rounded ones. A group of equal values has scale 0 and codes 0. Where `opening`
    (bool, of a shape that broadcasts to [...]) is true, the block begins a sequence, and K gets
    scales and minima that keep the first token to float16: `_anchored`.
    """
    records = torch.zeros(*k.shape[:-2], form.nbytes, dtype=torch.uint8, device=k.device)
    channels = k.float().mT[..., None, :, :]  # [..., 1, D, 64]
    _quantize(channels, form.k_bits, *form.key_views(records), opening, transposed=True)
    if not form.latent:
        _quantize(_parts(v.float(), form), form.v_bits, *form.value_views(records))
    return records


def dequantize_blocks(records: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Undo `quantize_blocks`: float32 K [..., 64, D] and V [..., 64, value_dim]."""
    k_codes, k_scale, k_min = form.key_views(records)
    k = unpack(k_codes, form.k_bits)
    k = k * k_scale.float()[..., None, :] + k_min.float()[..., None, :]
    if form.latent:
        return k, latent_values(k, form.latent)
    v_codes, v_scale, v_min = form.value_views(records)
    scale, minimum = (
        x.float().unflatten(-1, (form.parts, BLOCK_TOKENS))[..., None] for x in (v_scale, v_min)
    )
    v = _parts(unpack(v_codes, form.v_bits), form) * scale + minimum
    return k, v.movedim(-3, -2).flatten(-2)


def _parts(x: Tensor, form: KVFormat) -> Tensor:
    """[..., 64, D] -> [..., parts, 64, D / parts]: the last dimension is what shares a scale."""
    return x.unflatten(-1, (form.parts, -1)).movedim(-2, -3)


def _quantize(
    groups: Tensor,
    bits: int,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    opening: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Write codes, scale and minimum of groups [..., parts, rows, g] of float32."""
    low, high = torch.aminmax(groups, dim=-1)
    low, high = _clipped(low, high, bits)
    if opening is not None:  # the first token stays within
        first = groups[..., 0]
        there = opening.expand(low.shape[:-2])[..., None, None]
        low = torch.where(there, torch.minimum(low, first), low)
        high = torch.where(there, torch.maximum(high, first), high)
    # By a tensor: on a GPU, torch multiplies by the inverse of a number, which rounds differently.
    step = (high - low) / low.new_tensor(2**bits - 1)
    if opening is not None:
        anchored = opening.expand(low.shape[:-2])[..., None, None]
        own = _anchored(groups[..., 0], low, high, step, 2**bits - 1)
        step, low = (torch.where(anchored, x, y) for x, y in zip(own, (step, low), strict=True))
    scale.copy_(step.flatten(-2))
    minimum.copy_(low.flatten(-2))
    scale, minimum = (x.float().view_as(low) for x in (scale, minimum))
    found = nearest_levels(groups, scale, minimum, bits).to(torch.uint8)
    # [..., 1, D, 64] or [..., parts, 64, D / parts] -> [..., 64, D]
    found = found.squeeze(-3).mT if transposed else found.movedim(-3, -2).flatten(-2)
    codes.copy_(_pack(found, bits))


def _pack(found: Tensor, bits: int) -> Tensor:
    """Levels uint8 [..., 64, D] as codes."""
    if bits == 8:
        return found
    low_half, high_half = found.chunk(2, dim=-1)
    nibbles = low_half | (high_half << 4)
    planes, done = [], 0
    for width in _PLANES[bits]:
        plane = (nibbles >> done) & _EACH[width]
        parts = plane.chunk(4 // width, dim=-2)
        planes.append(torch.stack([x << width * i for i, x in enumerate(parts)]).sum(0).byte())
        done += width
    return torch.cat(planes, dim=-2)


_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}  # bits of a code that lie together, the lowest first
_EACH = {1: 0x11, 2: 0x33, 4: 0xFF}  # so many of the lowest bits of both nibbles


def _clipped(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The range that levels cover: below 4 bits a part is left off at either end."""
    off = (high - low) * CLIPPED.get(bits, 0.0)
    return (low + off, high - off) if bits in CLIPPED else (low, high)


def _anchored(
    first: Tensor, low: Tensor, high: Tensor, step: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Scale and minimum for low..high with a level at `first`; all float32 of one shape.

    Attention that looks for nothing goes to a sequence's first token, so an error of that key
    moves more of it than all others' do. The distance to the farther end is divided by as many
    steps as `step` would take, rounded down; a 64th of a step may be missing at either end.
    """
    level = torch.where(step == 0, 0.0, (first - low) / step)
    below = level < top / 2
    steps = (torch.where(below, top - level, level) + 1 / 64).floor()
    scale = torch.where(below, high - first, first - low) / steps
    return scale, first - torch.where(below, top - steps, steps) * scale.half().float()


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Undo `_pack`: float32 [..., 64, D]."""
    if bits == 8:
        return codes.float()
    nibbles, done = torch.zeros_like(codes[..., :1, :]), 0
    for width in _PLANES[bits]:
        plane = codes[..., 16 * done : 16 * (done + width), :]
        tokens = torch.cat([plane >> width * i for i in range(4 // width)], dim=-2)
        nibbles = nibbles | ((tokens & _EACH[width]) << done)
        done += width
    return torch.cat((nibbles & 15, nibbles >> 4), dim=-1).float()


def append(k: Tensor, v: Tensor, cache: DeviceLayerCache) -> None:
    """Pack the blocks that become complete, and keep the rest in the ring.

    k, v: [T, kv_heads, D], of a latent form v without channels; rows row_start[s]..row_start[s+1]-1
    of the pass are of sequence s at positions start[s] on. Keys are turned already. Tokens
    packed[s]..after[s]-1, whole blocks, go into the pool where the table says: those from start[s]
    on from k and v, older ones from the ring, which holds position p in slot p % W. Then tokens
    from after[s] on go into the ring.
    """
    step, form, recent_k, recent_v = cache.step, cache.form, cache.recent_k, cache.recent_v
    window = recent_k.shape[1]
    numbers = (step.start, step.row_start[:-1], step.row_start[1:], step.packed, step.after)
    for s, (first, row, stop, old, new) in enumerate(
        zip(*(x.tolist() for x in numbers), strict=True)
    ):
        positions = torch.arange(first, first + stop - row, device=k.device)
        key, value = k[row:stop], v[row:stop]
        if new > old:
            slots = torch.arange(old, min(first, new), device=k.device) % window
            done = max(new - first, 0)
            blocks = [
                torch.cat((recent[s, slots], fresh[max(old - first, 0) : done]))
                .unflatten(0, (-1, BLOCK_TOKENS))
                .transpose(1, 2)  # [blocks, kv_heads, 64, D]
                for recent, fresh in ((recent_k, key), (recent_v, value))
            ]
            logical = torch.arange(old // BLOCK_TOKENS, new // BLOCK_TOKENS, device=k.device)
            records = quantize_blocks(blocks[0], blocks[1], form, logical[:, None] == 0)
            cache.pool[step.table[s, logical].long()] = records
        kept = positions >= new
        recent_k[s, positions[kept] % window] = key[kept].to(recent_k.dtype)
        recent_v[s, positions[kept] % window] = value[kept].to(recent_v.dtype)


def rope_keys(x: Tensor, positions: Tensor, latent: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [T, H, D] rotated, of latent ones those channels that are."""
    if not latent:
        return rope(x, positions, cos, sin)
    rotated = rope(rope_channels(x, latent), positions, cos, sin)
    return latent_heads(latent_values(x, latent), rotated)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partial attention results outs [P, T, H, D] by their log-sum-exps [P, T, H].

    Returns the output [T, H, D] in the dtype of outs, and its log-sum-exp. A part with -inf counts
    nothing, whatever it holds; where all have -inf, the output is 0 and the log-sum-exp -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))[..., None]
    wide = outs if outs.dtype == torch.float64 else outs.float()
    out = torch.where(weights > 0, wide * weights, 0.0).sum(0)
    return out.to(outs.dtype), lse
