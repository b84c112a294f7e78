"""Attention over the packed KV cache on the CPU, where the cache is."""
