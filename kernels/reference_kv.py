"""What the ops of the packed KV cache mean, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_format import BLOCK_TOKENS, KVFormat


def hadamard(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The orthonormal Hadamard matrix [n, n] of Sylvester's construction, n a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return (h / n**0.5).to(dtype)


def quantize_blocks(k: Tensor, v: Tensor, form: KVFormat) -> Tensor:
    """Pack K and V, [..., 64, D] of any float dtype, to records uint8 [..., form.nbytes].

    Scale = (max - min) / (2**bits - 1) and minimum are rounded to float16; the codes are the
    nearest for the rounded ones. A group of equal values has scale 0 and codes 0.
    """
    records = torch.zeros(*k.shape[:-2], form.nbytes, dtype=torch.uint8, device=k.device)
    k_codes, k_scale, k_min, v_codes, v_scale, v_min = form.views(records)
    keys = k.float() @ hadamard(form.head_dim).to(k.device) if form.rotated else k.float()
    if form.k_form == "channel":
        _quantize(keys.mT[..., None, :, :], form.k_bits, k_codes, k_scale, k_min, transposed=True)
    else:
        _quantize(_parts(keys, form), form.k_bits, k_codes, k_scale, k_min)
    _quantize(_parts(v.float(), form), form.v_bits, v_codes, v_scale, v_min)
    return records


def dequantize_blocks(records: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Undo `quantize_blocks`: float32 K and V, [..., 64, D]. K of a rotated form stays rotated."""
    k_codes, k_scale, k_min, v_codes, v_scale, v_min = form.views(records)
    k = _unpack(k_codes, form.k_bits)
    if form.k_form == "channel":
        k = k * k_scale.float()[..., None, :] + k_min.float()[..., None, :]
    else:
        k = _dequantize(k, k_scale, k_min, form)
    return k, _dequantize(_unpack(v_codes, form.v_bits), v_scale, v_min, form)


def _parts(x: Tensor, form: KVFormat) -> Tensor:
    """[..., 64, D] -> [..., parts, 64, D / parts]: the last dimension is what shares a scale."""
    return x.unflatten(-1, (form.parts, -1)).movedim(-2, -3)


def _quantize(
    groups: Tensor,
    bits: int,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor,
    transposed: bool = False,
) -> None:
    """Write codes, scale and minimum of groups [..., parts, rows, g] of float32."""
    low, high = torch.aminmax(groups, dim=-1)
    scale.copy_(((high - low) / (2**bits - 1)).flatten(-2))
    minimum.copy_(low.flatten(-2))
    wide = scale.float().view_as(low)[..., None]
    levels = (groups - minimum.float().view_as(low)[..., None]) / torch.where(
        wide == 0, torch.inf, wide
    )
    levels = levels.round().clamp(0, 2**bits - 1).to(torch.uint8)
    # [..., 1, D, 64] or [..., parts, 64, D / parts] -> [..., 64, D]
    levels = levels.squeeze(-3).mT if transposed else levels.movedim(-3, -2).flatten(-2)
    if bits == 4:
        low_half, high_half = levels.chunk(2, dim=-1)
        levels = low_half | (high_half << 4)
    codes.copy_(levels)


def _unpack(codes: Tensor, bits: int) -> Tensor:
    """Codes as float32 [..., 64, D]."""
    if bits == 8:
        return codes.float()
    return torch.cat((codes & 15, codes >> 4), dim=-1).float()


def _dequantize(codes: Tensor, scale: Tensor, minimum: Tensor, form: KVFormat) -> Tensor:
    shape = (form.parts, BLOCK_TOKENS)
    s, m = (x.float().unflatten(-1, shape)[..., None] for x in (scale, minimum))
    values = _parts(codes, form) * s + m  # [..., parts, 64, D / parts]
    return values.movedim(-3, -2).flatten(-2)
