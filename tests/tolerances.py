"""How close is close enough: the tolerances of all tests, per dtype, in one place."""

from __future__ import annotations

import torch

# Largest relative RMS error of a result computed in a dtype and accumulated in float32 or wider.
# Each is a few units in the last place of the dtype: 2^-8 for bfloat16, 2^-11 for float16, 2^-24
# for float32, where the order of summation over thousands of terms adds its share.
RELATIVE_RMS = {
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of `actual - expected` over RMS of `expected`, in float64; 0 for two all-zero tensors."""
    reference = expected.double()
    error = (actual.double() - reference).square().mean().sqrt()
    scale = reference.square().mean().sqrt()
    return 0.0 if error == 0 else float(error / scale)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> None:
    """Assert equal shapes, finite values only where `expected` has them, and a small relative RMS.

    `dtype` is the lowest precision on the way to `actual` (default: the dtype of `actual`); its
    entry in `RELATIVE_RMS` is the bound unless `tolerance` gives one.
    """
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), finite), "not finite in other places than expected"
    if not finite.any():
        return
    bound = RELATIVE_RMS[dtype or actual.dtype] if tolerance is None else tolerance
    error = relative_rms(actual[finite], expected[finite])
    assert error <= bound, f"relative RMS error {error:.3g} is over {bound:.3g}"


# A quantized matmul whose activations are 16-bit integers per group of K: rounding is 2^-16 of the
# group's largest value, a few standard deviations.
INT16_ACTIVATIONS = 1e-4

# Two such products with an activation between them, which may steepen the first one's error; and
# the same with 8-bit activations, 2^-8 of the largest value of a group.
INT16_EXPERTS = 3e-4
INT8_EXPERTS = 3e-2

# Logits of a whole decoder on such matmuls, whose errors add up over its layers.
DECODER_LOGITS = 5e-4
# Linear attention makes small sums of large terms, without a softmax, and normalizes them.
LINEAR_LOGITS = 2e-3

# Share of codes of a packed KV block that may be one off the reference's: values within float32
# rounding of the middle between two levels.
MOVED_CODES = 1e-3

# Attention whose probabilities are 8-bit integers per block: a rounding of at most 1 in 510 of the
# largest, averaged over the tokens; bfloat16 probabilities would round as much.
PACKED_ATTENTION = 1e-2

# Logits of a decoder whose hidden states are float16, against one in float32, by bits of the packed
# K and V (0: none are packed). A rounding after every op makes K and V differ by about 2^-10 of
# themselves; where that crosses the middle between two levels, a code differs by one.
FLOAT16_LOGITS = {0: 3e-3, 8: 1e-2, 4: 4e-2}

# Logits of tiny random models some hundred tokens deep, over K and V of 8 and of 4 bits, against
# those that are not packed; rounding of random K is worse than that of real ones.
PACKED_8, PACKED_4 = 2e-2, 0.2
