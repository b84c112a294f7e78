"""Attention over an uncompressed KV cache on the CPU."""
