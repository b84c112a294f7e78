"""The quantized matmul on the CPU."""
