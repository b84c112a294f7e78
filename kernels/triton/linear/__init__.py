"""Quantized weights on a GPU: quantize, dequantize, and the matmul for each number of tokens."""
